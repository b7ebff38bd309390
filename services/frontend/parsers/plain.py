"""Plain JSON: an answer that is one call, `{"name": ..., "arguments": {...}}`, or a list of them, fenced or not."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from services.frontend.parsers.events import Signature, TokenId
from services.frontend.parsers.leading import LeadingParser
from services.frontend.parsers.rules import one_of, repeated

FENCES = ("```json", "```")
FENCE = "```"


class PlainParser(LeadingParser):
    """See the module."""

    def __init__(self, functions: Sequence[str]) -> None:
        super().__init__(functions)
        self._fenced = False
        """A fence is open."""
        self._behind = ""
        """Behind the calls of a fence: what may be its end, and blanks after that."""

    def starts(self, head: str) -> tuple[bool | None, int]:
        start = head.lstrip()
        if not start or any(fence.startswith(start) for fence in FENCES):
            return None, 0
        for fence in FENCES:
            if start.startswith(fence):
                start = start[len(fence) :].lstrip()
                self._fenced = True
                break
        if not start:
            return None, 0
        return start[0] in "{[", len(head) - len(start)

    def after(self, text: str) -> str:
        if not self._fenced:
            return text
        self._behind += text
        rest = self._behind.lstrip()
        if FENCE.startswith(rest):
            return ""
        rest = rest.removeprefix(FENCE).lstrip()
        if rest:
            self._fenced, self._behind = False, ""
        return rest

    def left(self) -> str:
        return "" if self._behind.lstrip().startswith(FENCE) else self._behind.strip()

    @classmethod
    def grammar(cls, functions: Sequence[Signature], parallel: bool, token_id: TokenId) -> str:
        calls = f'"[" {repeated("one", ", ", parallel)} "]"' if parallel else "one"
        return f"calls: {calls}\n{one_of(functions, 'arguments')}"

    @classmethod
    def write(cls, calls: Sequence[dict[str, Any]]) -> str:
        return json.dumps(list(calls) if len(calls) > 1 else calls[0], ensure_ascii=False)
