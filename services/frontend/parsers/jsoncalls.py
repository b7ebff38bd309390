"""Calls one after another: an object, a list of objects, or objects with commas or semicolons between."""

from __future__ import annotations

from collections.abc import Sequence

from services.frontend.parsers.events import Event, Text
from services.frontend.parsers.jsoncall import JsonCall

_BETWEEN = " \t\r\n[],;"


class JsonCalls:
    """Reads until something comes that is none of it. What is read while there is no call yet becomes text again."""

    def __init__(self, functions: Sequence[str]) -> None:
        self._functions = functions
        self._call: JsonCall | None = None
        self._skipped = ""
        self.count = 0
        """Calls told so far."""
        self.stopped = False

    def feed(self, text: str) -> tuple[list[Event], int]:
        """Events, and how many characters were taken; all, unless it has stopped."""
        out: list[Event] = []
        taken = 0
        while taken < len(text) and not self.stopped:
            if self._call is not None:
                taken += self._in_call(text[taken:], out)
            elif text[taken] == "{":
                self._call = JsonCall(self._functions)
            elif text[taken] in _BETWEEN:
                self._skipped += "" if self.count else text[taken]
                taken += 1
            else:
                self.stopped = True
                out += self.end()
        return out, taken

    def end(self) -> list[Event]:
        """The output has ended, or something else comes: what was no call after all."""
        raw, self._skipped = self._skipped, ""
        if self._call is not None and not self._call.told:
            raw += self._call.raw
        self._call = None
        return [Text(raw)] if raw else []

    def _in_call(self, text: str, out: list[Event]) -> int:
        assert self._call is not None
        before = self._call.told
        events, taken = self._call.feed(text)
        out += events
        if self._call.told and not before:
            self.count += 1
            self._skipped = ""
        if self._call.failed:
            self.stopped = True
            out += self.end()
        elif self._call.done:
            self._call = None
        return taken
