"""Llama 3: an answer that is `{"name": ..., "parameters": {...}}`, after `<|python_tag|>` or not; several by `;`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, ClassVar

from services.frontend.parsers.events import Signature, TokenId
from services.frontend.parsers.leading import LeadingParser
from services.frontend.parsers.rules import one_of, repeated

TAG = "<|python_tag|>"


class Llama3Parser(LeadingParser):
    """See the module."""

    specials: ClassVar[tuple[str, ...]] = (TAG,)

    def starts(self, head: str) -> tuple[bool | None, int]:
        start = head.lstrip()
        if start.startswith(TAG):
            start = start[len(TAG) :].lstrip()
        elif TAG.startswith(start):
            return None, 0
        if not start:
            return None, 0
        return start[0] == "{", len(head) - len(start)

    @classmethod
    def grammar(cls, functions: Sequence[Signature], parallel: bool, token_id: TokenId) -> str:
        return f"calls: {repeated('one', '; ', parallel)}\n{one_of(functions, 'parameters')}"

    @classmethod
    def write(cls, calls: Sequence[dict[str, Any]]) -> str:
        renamed = [{"name": call["name"], "parameters": call["arguments"]} for call in calls]
        return "; ".join(json.dumps(call, ensure_ascii=False) for call in renamed)
