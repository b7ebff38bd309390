"""Thoughts between two marks at the beginning of an answer. Blanks around them are dropped."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from services.frontend.parsers.events import Event, Text, Thought, begun, merged


@dataclass(frozen=True)
class Marks:
    """What opens and closes a thought."""

    opening: str
    closing: str


class _At(Enum):
    START = auto()
    OPENED = auto()
    EDGE = auto()
    THOUGHT = auto()
    CLOSED = auto()
    ANSWER = auto()


class ReasoningParser:
    """For one output; `open`: the prompt has opened the thought already."""

    def __init__(self, marks: Marks, *, open: bool) -> None:
        self._marks = marks
        # An opening mark that repeats the prompt's is no thought.
        self._at = _At.OPENED if open else _At.START
        self._buffer = ""
        self.thought = open
        """Whether there has been one."""

    @property
    def thinking(self) -> bool | None:
        """Whether what comes next belongs to the thought; None: that cannot be said yet."""
        return None if self._at is _At.START else self._at in (_At.OPENED, _At.EDGE, _At.THOUGHT)

    def push(self, text: str) -> list[Event]:
        """What the next piece makes certain."""
        self._buffer += text
        out: list[Event] = []
        while self._buffer and self._step(out):
            pass
        return merged(out)

    def end(self) -> list[Event]:
        """The output has ended: what was held back."""
        rest, self._buffer = self._buffer, ""
        if self._at in (_At.OPENED, _At.EDGE, _At.THOUGHT):
            return merged([Thought(rest)])
        return merged([Text(rest)]) if self._at is not _At.CLOSED else []

    def _step(self, out: list[Event]) -> bool:
        """One step; whether another one may follow."""
        match self._at:
            case _At.START | _At.OPENED:
                return self._begin()
            case _At.EDGE | _At.CLOSED:
                self._buffer = self._buffer.lstrip()
                if self._buffer:
                    self._at = _At.THOUGHT if self._at is _At.EDGE else _At.ANSWER
                return bool(self._buffer)
            case _At.THOUGHT:
                return self._think(out)
            case _At.ANSWER:
                out.append(Text(self._buffer))
                self._buffer = ""
                return False

    def _begin(self) -> bool:
        opening, start = self._marks.opening, self._buffer.lstrip()
        if not start or (opening != start and opening.startswith(start)):
            return False
        if start.startswith(opening):
            self._buffer = start[len(opening) :]
            self._at = _At.EDGE
            self.thought = True
        else:
            self._at = _At.ANSWER if self._at is _At.START else _At.EDGE
        return True

    def _think(self, out: list[Event]) -> bool:
        closing = self._marks.closing
        at = self._buffer.find(closing)
        if at >= 0:
            out.append(Thought(self._buffer[:at].rstrip()))
            self._buffer = self._buffer[at + len(closing) :]
            self._at = _At.CLOSED
            return True
        sure = self._buffer[: len(self._buffer) - begun(self._buffer, closing)].rstrip()
        out.append(Thought(sure))
        self._buffer = self._buffer[len(sure) :]
        return False
