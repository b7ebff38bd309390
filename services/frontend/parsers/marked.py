"""Calls behind a mark, anywhere in a text: what Hermes and Mistral have in common.

Blanks around calls are no content: they are dropped before a mark and behind what it opens.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from enum import Enum, auto
from typing import ClassVar

from services.frontend.parsers.events import Event, Text, ToolParser, begun, merged


class After(Enum):
    """What comes next."""

    MORE = auto()
    """More of the same."""
    BLANKS = auto()
    """Text, whose blanks at its beginning are dropped: there was a call."""
    TEXT = auto()


class MarkedParser(ToolParser):
    """`opening` is the mark. Subclasses read what it opens."""

    opening: ClassVar[str] = ""

    def __init__(self, functions: Sequence[str]) -> None:
        self._functions = functions
        self._buffer = ""
        self._inside = False
        self._behind = False
        """Whether blanks are dropped because a call has ended just now."""

    @abstractmethod
    def begin(self) -> None:
        """The mark was read."""

    @abstractmethod
    def read(self, text: str) -> tuple[list[Event], int, After]:
        """Behind the mark: events, how many characters of `text` were taken, and what comes next. What was not taken
        is given again with what comes."""

    @abstractmethod
    def finish(self) -> list[Event]:
        """The output has ended behind the mark."""

    def push(self, text: str) -> list[Event]:
        self._buffer += text
        out: list[Event] = []
        more = True
        while more and self._buffer:
            if not self._inside:
                more = self._text(out)
                continue
            events, taken, after = self.read(self._buffer)
            out += events
            self._buffer = self._buffer[taken:]
            self._inside = after is After.MORE
            if self._inside:
                more = taken > 0
            else:
                self._behind = after is After.BLANKS
        return merged(out)

    def end(self) -> list[Event]:
        out: list[Event] = self.finish() if self._inside else []
        rest = "" if self._inside else self._buffer
        self._buffer = ""
        return merged([*out, Text(rest.lstrip() if self._behind else rest)])

    def _text(self, out: list[Event]) -> bool:
        """Whether a mark was found."""
        if self._behind:
            self._buffer = self._buffer.lstrip()
        at = self._buffer.find(self.opening)
        if at >= 0:
            out.append(Text(self._buffer[:at].rstrip()))
            self._buffer = self._buffer[at + len(self.opening) :]
            self._inside, self._behind = True, False
            self.begin()
            return True
        kept = self._buffer[: len(self._buffer) - begun(self._buffer, self.opening)].rstrip()
        self._buffer = self._buffer[len(kept) :]
        self._behind = self._behind and not kept
        out.append(Text(kept))
        return False
