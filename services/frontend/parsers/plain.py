"""Plain JSON: an answer that is one call, `{"name": ..., "arguments": {...}}`, or a list of them, fenced or not."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from services.frontend.parsers.events import Signature, TokenId
from services.frontend.parsers.leading import LeadingParser
from services.frontend.parsers.rules import one_of, repeated

FENCES = ("```json", "```")


class PlainParser(LeadingParser):
    """See the module."""

    def starts(self, head: str) -> tuple[bool | None, int]:
        start = head.lstrip()
        if not start or any(fence.startswith(start) for fence in FENCES):
            return None, 0
        for fence in FENCES:
            if start.startswith(fence):
                start = start[len(fence) :].lstrip()
                break
        if not start:
            return None, 0
        return start[0] in "{[", len(head) - len(start)

    @classmethod
    def grammar(cls, functions: Sequence[Signature], parallel: bool, token_id: TokenId) -> str:
        calls = f'"[" {repeated("one", ", ", parallel)} "]"' if parallel else "one"
        return f"calls: {calls}\n{one_of(functions, 'arguments')}"

    @classmethod
    def write(cls, calls: Sequence[dict[str, Any]]) -> str:
        return json.dumps(list(calls) if len(calls) > 1 else calls[0], ensure_ascii=False)
