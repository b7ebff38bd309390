"""Hermes, Qwen, SmolLM2: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, once for each call.

A list in one pair of marks is read as well.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from services.frontend.parsers.events import MAX_CALLS, Event, Text, TokenId, alternatives, begun
from services.frontend.parsers.jsoncalls import JsonCalls
from services.frontend.parsers.marked import MarkedParser

CLOSING = "</tool_call>"


class HermesParser(MarkedParser):
    """See the module."""

    opening = "<tool_call>"

    def begin(self) -> None:
        self._calls = JsonCalls(self._functions)
        self._ended = False
        self.waits = False

    def read(self, text: str) -> tuple[list[Event], int]:
        out: list[Event] = []
        taken = 0
        if not self._calls.stopped:
            events, taken = self._calls.feed(text)
            if self._calls.stopped and not self._calls.count:
                # No call at all: the mark was text.
                self.waits = False
                return [Text(self.opening), *events], taken
            out += events
        rest = text[taken:]
        if not rest:
            return out, taken
        at = rest.find(CLOSING)
        if at >= 0:
            self.waits = False
            return self._closed(out, taken + at + len(CLOSING), text)
        # What stands between a call and the closing mark is nothing that a client could use.
        self.waits = True
        return out, len(text) - begun(text, CLOSING)

    def _closed(self, out: list[Event], taken: int, text: str) -> tuple[list[Event], int]:
        self._inside, self._behind = taken < len(text), True
        if not self._inside:
            return out, taken
        return out, taken

    def finish(self) -> list[Event]:
        if self._calls.stopped:
            self._buffer = ""
            return []
        events = self._calls.end()
        return events if self._calls.count else [Text(self.opening), *events]

    @classmethod
    def grammar(cls, calls: Sequence[str], parallel: bool, token_id: TokenId) -> str:
        more = f' ("\\n" call){{0,{MAX_CALLS - 1}}}' if parallel else ""
        return (
            f"calls: call{more}\n"
            f'call: {cls.opening_rule(token_id)} "\\n" one "\\n{CLOSING}"\n'
            f"one: {alternatives(calls)}\n"
        )

    @classmethod
    def opening_rule(cls, token_id: TokenId) -> str:
        return json.dumps(cls.opening)

    @classmethod
    def write(cls, calls: Sequence[dict[str, Any]]) -> str:
        return "\n".join(f"{cls.opening}\n{json.dumps(call, ensure_ascii=False)}\n{CLOSING}" for call in calls)
