"""Calls behind a mark, anywhere in a text: what Hermes and Mistral have in common.

Blanks around calls are no content: they are dropped before a mark and behind what it opens.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from services.frontend.parsers.events import Event, Text, ToolParser, begun, merged


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
    def read(self, text: str) -> tuple[list[Event], int]:
        """Behind the mark: events, and how many characters were taken. Not all: it has ended and the rest is text
        again, or it waits for more (`waits`)."""

    @abstractmethod
    def finish(self) -> list[Event]:
        """The output has ended behind the mark."""

    waits = False

    def push(self, text: str) -> list[Event]:
        self._buffer += text
        out: list[Event] = []
        while self._buffer:
            before = len(self._buffer), self._inside
            out += self._read() if self._inside else self._text()
            if before == (len(self._buffer), self._inside):
                break
        return merged(out)

    def end(self) -> list[Event]:
        out: list[Event] = []
        if self._inside:
            out += self.finish()
        rest, self._buffer = self._buffer, ""
        return merged([*out, Text(rest.lstrip() if self._behind else rest)])

    def _read(self) -> list[Event]:
        events, taken = self.read(self._buffer)
        whole = taken == len(self._buffer)
        self._buffer = self._buffer[taken:]
        if not whole and not self.waits:
            self._inside = False
            self._behind = True
        return events

    def _text(self) -> list[Event]:
        if self._behind:
            self._buffer = self._buffer.lstrip()
        at = self._buffer.find(self.opening)
        if at >= 0:
            text, self._buffer = self._buffer[:at].rstrip(), self._buffer[at + len(self.opening) :]
            self._inside, self._behind = True, False
            self.begin()
            return [Text(text)]
        kept = self._buffer[: len(self._buffer) - begun(self._buffer, self.opening)].rstrip()
        self._buffer = self._buffer[len(kept) :]
        self._behind = self._behind and not kept
        return [Text(kept)]
