"""Calls that are all of an answer, with nothing before them: what Llama 3 and plain JSON have in common.

An answer that begins as a call and turns out to be none is content, to the last character.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from services.frontend.parsers.events import Event, Text, ToolParser, merged
from services.frontend.parsers.jsoncalls import JsonCalls


class LeadingParser(ToolParser):
    """Subclasses say what may stand before the first call."""

    def __init__(self, functions: Sequence[str]) -> None:
        self._calls = JsonCalls(functions)
        self._head = ""
        """What came before the first brace or bracket."""
        self._started = False
        self._is_text = False

    @abstractmethod
    def starts(self, head: str) -> tuple[bool | None, int]:
        """Whether calls begin, and where; None while the next characters may decide it."""

    def after(self, text: str) -> str:
        """What of the text behind the calls is content."""
        return text

    def left(self) -> str:
        """What `after` has kept back, when the output has ended."""
        return ""

    def push(self, text: str) -> list[Event]:
        if self._is_text:
            return merged([Text(self.after(text) if self._calls.count else text)])
        if not self._started:
            self._head += text
            begins, at = self.starts(self._head)
            if begins is None:
                return []
            if not begins:
                self._is_text = True
                return merged([Text(self._head)])
            self._started = True
            self._head, text = self._head[:at], self._head[at:]
        events, taken = self._calls.feed(text)
        if not self._calls.stopped:
            return merged(events)
        self._is_text = True
        rest = text[taken:]
        return merged([*self._text(events), Text(self.after(rest) if self._calls.count else rest)])

    def end(self) -> list[Event]:
        if not self._started:
            rest, self._head = self._head, ""
            return [] if self._is_text or not rest else [Text(rest)]
        return merged([*self._text(self._calls.end()), Text(self.left())])

    def _text(self, events: list[Event]) -> list[Event]:
        """With what stood before, when there was no call at all."""
        return events if self._calls.count or not events else [Text(self._head), *events]
