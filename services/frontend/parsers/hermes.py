"""Hermes, Qwen, SmolLM2: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, once for each call.

A list in one pair of marks is read as well.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, ClassVar

from services.frontend.parsers.events import Event, Signature, Text, TokenId, begun
from services.frontend.parsers.jsoncalls import JsonCalls
from services.frontend.parsers.marked import After, MarkedParser
from services.frontend.parsers.rules import one_of, repeated

CLOSING = "</tool_call>"


class HermesParser(MarkedParser):
    """See the module."""

    opening = "<tool_call>"
    specials: ClassVar[tuple[str, ...]] = (opening, CLOSING)

    def begin(self) -> None:
        self._calls = JsonCalls(self._functions)

    def read(self, text: str) -> tuple[list[Event], int, After]:
        events, taken = self._calls.feed(text)
        if self._calls.stopped and not self._calls.count:
            return [Text(self.opening), *events], taken, After.TEXT  # no call at all: the mark was text
        if not self._calls.stopped:
            return events, taken, After.MORE
        # What stands between a call and the closing mark is nothing that a client could use.
        at = text.find(CLOSING, taken)
        if at >= 0:
            return events, at + len(CLOSING), After.BLANKS
        return events, max(taken, len(text) - begun(text, CLOSING)), After.MORE

    def finish(self) -> list[Event]:
        if self._calls.stopped:
            return []
        events = self._calls.end()
        return events if self._calls.count else [Text(self.opening), *events]

    @classmethod
    def grammar(cls, functions: Sequence[Signature], parallel: bool, token_id: TokenId) -> str:
        call = f"call: {json.dumps(cls.opening + chr(10))} one {json.dumps(chr(10) + CLOSING)}"
        return f"calls: {repeated('call', chr(10), parallel)}\n{call}\n{one_of(functions, 'arguments')}"

    @classmethod
    def write(cls, calls: Sequence[dict[str, Any]]) -> str:
        return "\n".join(f"{cls.opening}\n{json.dumps(call, ensure_ascii=False)}\n{CLOSING}" for call in calls)
