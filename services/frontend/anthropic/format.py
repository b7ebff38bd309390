"""A message in Anthropic's shapes: the events of a stream, or one object."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import msgspec

from baton.errors import BatonError
from baton.v1.worker_pb2 import Logprob
from services.frontend.anthropic.errors import error_event
from services.frontend.chunks import Usage
from services.frontend.detokenise import Piece
from services.frontend.lines import one_line
from services.frontend.parsers.events import Arguments, Call, Event, Text, Thought
from services.frontend.speech import Speech, Voice
from services.frontend.spoken import call_id

_encode = msgspec.json.Encoder().encode


class MessageFormat:
    """Of one request with one output. `omit`: a thought is told without its text. A signature says nothing of who
    signed: thoughts that come back are not read again."""

    def __init__(self, uid: str, model: str, *, voice: Voice, prompt_tokens: int, omit: bool, request_id: str) -> None:
        self._uid = uid
        self._model = model
        self._speech = Speech(voice)
        self._short_ids = voice.tools == "mistral"
        self._prompt_tokens = prompt_tokens
        self._omit = omit
        self._request_id = request_id
        self._blocks: list[dict[str, Any]] = []
        self._said: list[str] = []
        """Of the block that is open."""
        self._open = ""
        """Its type."""
        self._calls = 0
        self._events: list[bytes] | None = None
        self._stop: tuple[str, str | None] = ("end_turn", None)

    # ---- as a stream

    def chunks(self, index: int, piece: Piece, prompt_logprobs: Sequence[Logprob]) -> list[bytes]:
        if self._events is None:
            self._events = []
            usage = self._usage(Usage(self._prompt_tokens, 0, self._prompt_tokens, {"cached_tokens": 0}))
            self._tell("message_start", message=self._message(None, None, usage))
            self._tell("ping")
        self._take(piece)
        return self._told()

    def finish(self, index: int, reason: str, baton: dict[str, Any] | None) -> bytes:
        self._end(reason)
        return b"".join(self._told())

    def so_far(self, usage: Usage) -> None:
        """Usage is told at the beginning and at the end only."""

    def usage(self, usage: Usage, baton: dict[str, Any]) -> bytes:
        reason, sequence = self._stop
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        self._tell("message_delta", delta=delta, usage=self._usage(usage), baton=baton)
        return b"".join(self._told())

    def done(self) -> bytes:
        self._tell("message_stop")
        return b"".join(self._told())

    def failed(self, error: BatonError) -> bytes:
        return error_event(error, self._request_id)

    # ---- as one object

    def collect(self, index: int, piece: Piece, prompt_logprobs: Sequence[Logprob]) -> None:
        self._take(piece)
        if piece.finish:
            self._end(piece.finish)

    def body(self, usage: Usage, baton: dict[str, Any]) -> bytes:
        return _encode(self._message(*self._stop, self._usage(usage)) | {"baton": baton})

    # ---- both

    def _take(self, piece: Piece) -> None:
        events = self._speech.push(piece.text, piece.taken) if piece.text or piece.taken else []
        for event in events + self._speech.end() if piece.finish else events:
            self._say(event)
        if piece.stop:
            self._stop = ("stop_sequence", piece.stop)

    def _say(self, event: Event) -> None:
        match event:
            case Text():
                self._continue("text", {"text": ""})
                self._add({"type": "text_delta", "text": event.text}, event.text)
            case Thought():
                self._continue("thinking", {"thinking": "", "signature": ""})
                delta = None if self._omit else {"type": "thinking_delta", "thinking": event.text}
                self._add(delta, event.text)
            case Call():
                self._close()
                id = call_id(self._uid, self._calls, short=self._short_ids, prefix="toolu_")
                self._calls += 1
                self._continue("tool_use", {"id": id, "name": event.name, "input": {}})
            case Arguments():
                self._add({"type": "input_json_delta", "partial_json": event.text}, event.text)

    def _continue(self, kind: str, members: dict[str, Any]) -> None:
        """Be in a block of that kind."""
        if self._open != kind:
            self._close()
            self._open, self._said = kind, []
            self._blocks.append({"type": kind, **members})
            self._tell("content_block_start", index=len(self._blocks) - 1, content_block=self._blocks[-1])

    def _add(self, delta: dict[str, Any] | None, text: str) -> None:
        self._said.append(text)
        if delta is not None:
            self._tell("content_block_delta", index=len(self._blocks) - 1, delta=delta)

    def _close(self) -> None:
        kind, self._open = self._open, ""
        if not kind:
            return
        block, text = self._blocks[-1], "".join(self._said)
        if kind == "text":
            block["text"] = text
        elif kind == "thinking":
            block["thinking"] = "" if self._omit else text
            block["signature"] = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
            delta = {"type": "signature_delta", "signature": block["signature"]}
            self._tell("content_block_delta", index=len(self._blocks) - 1, delta=delta)
        else:
            _fill(block, text)
        self._tell("content_block_stop", index=len(self._blocks) - 1)

    def _end(self, reason: str) -> None:
        self._close()
        if reason == "length":
            self._stop = ("max_tokens", None)
        elif self._speech.calls and self._stop[0] == "end_turn":
            self._stop = ("tool_use", None)

    def _message(self, reason: str | None, sequence: str | None, usage: dict[str, Any]) -> dict[str, Any]:
        return {
            "id": f"msg_{self._uid}",
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": self._blocks,
            "stop_reason": reason,
            "stop_sequence": sequence,
            "usage": usage,
        }

    def _usage(self, usage: Usage) -> dict[str, Any]:
        """Input tokens are those that were not found in a cache."""
        cached = usage.prompt_tokens_details["cached_tokens"]
        return {
            "input_tokens": usage.prompt_tokens - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"thinking_tokens": min(self._speech.thought_tokens, usage.completion_tokens)},
            "service_tier": "standard",
        }

    def _tell(self, kind: str, **fields: Any) -> None:
        if self._events is not None:
            data = one_line(_encode({"type": kind, **fields}))
            self._events.append(b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n")

    def _told(self) -> list[bytes]:
        events, self._events = self._events or [], []
        return events


def _fill(block: dict[str, Any], text: str) -> None:
    """The input of a call; what was cut before it was JSON is told as it is, beside."""
    try:
        given = json.loads(text or "{}")
    except ValueError:
        block["partial_json"] = text
        return
    block["input"] = given if isinstance(given, dict) else {"input": given}
