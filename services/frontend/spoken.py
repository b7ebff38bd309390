"""Speech in OpenAI's shapes: deltas of a stream, or a message."""

from __future__ import annotations

import hashlib
from typing import Any

from services.frontend.detokenise import Piece
from services.frontend.parsers.events import Arguments, Call, Event, Text, Thought
from services.frontend.speech import Speech, Voice


def call_id(key: str, number: int, *, short: bool = False, prefix: str = "call_") -> str:
    """The id of an output's call. `short`: as Mistral's templates want it, which refuse any other in the next turn."""
    digest = hashlib.blake2b(f"{key}/{number}".encode(), digest_size=12).hexdigest()
    return digest[:9] if short else prefix + digest


class Spoken:
    """One output. `key` makes the ids of its calls, unlike those of any other output."""

    def __init__(self, voice: Voice, key: str) -> None:
        self.speech = Speech(voice)
        self._key = key
        self._short_ids = voice.tools == "mistral"
        self._content = ""
        self._thoughts = ""
        self._calls: list[dict[str, Any]] = []
        self._calls_told = 0

    def deltas(self, piece: Piece) -> list[dict[str, Any]]:
        """What a piece adds, in order: the members of each delta."""
        return [self._delta(event) for event in self._events(piece)]

    def collect(self, piece: Piece) -> None:
        """Keep a piece for `message`."""
        for event in self._events(piece):
            match event:
                case Text():
                    self._content += event.text
                case Thought():
                    self._thoughts += event.text
                case Call():
                    self._calls.append(self._begun(event))
                case Arguments():
                    self._calls[-1]["function"]["arguments"] += event.text

    def message(self) -> dict[str, Any]:
        """What was kept; no content at all is null beside calls."""
        out: dict[str, Any] = {"content": self._content or (None if self._calls else "")}
        if self._thoughts:
            out |= {"reasoning_content": self._thoughts, "reasoning": self._thoughts}
        return out | ({"tool_calls": self._calls} if self._calls else {})

    def _events(self, piece: Piece) -> list[Event]:
        events = self.speech.push(piece.text) if piece.text else []
        return events + self.speech.end() if piece.finish else events

    def _delta(self, event: Event) -> dict[str, Any]:
        match event:
            case Text():
                return {"content": event.text}
            case Thought():
                return {"reasoning_content": event.text, "reasoning": event.text}
            case Call():
                index = self._calls_told
                return {"tool_calls": [{"index": index, **self._begun(event)}]}
            case Arguments():
                more = {"index": self._calls_told - 1, "function": {"arguments": event.text}}
                return {"tool_calls": [more]}

    def _begun(self, call: Call) -> dict[str, Any]:
        id = call_id(self._key, self._calls_told, short=self._short_ids)
        self._calls_told += 1
        return {"id": id, "type": "function", "function": {"name": call.name, "arguments": ""}}
