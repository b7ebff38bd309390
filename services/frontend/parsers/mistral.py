"""Mistral: the control token `[TOOL_CALLS]`, then a list of calls, or since 2025 `name[ARGS]{...}` for each call."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, ClassVar

from services.frontend.parsers.events import Call, Event, Signature, Text, TokenId
from services.frontend.parsers.jsoncall import JsonCall
from services.frontend.parsers.jsoncalls import JsonCalls
from services.frontend.parsers.marked import After, MarkedParser
from services.frontend.parsers.rules import arguments, embedded, mark, one_of, repeated

ARGUMENTS = "[ARGS]"


class MistralParser(MarkedParser):
    """See the module."""

    opening = "[TOOL_CALLS]"
    specials: ClassVar[tuple[str, ...]] = ("[TOOL_CALLS]", "[ARGS]")

    def begin(self) -> None:
        self._list: JsonCalls | None = None
        self._call: JsonCall | None = None

    def read(self, text: str) -> tuple[list[Event], int, After]:
        if self._list is None and self._call is None:
            bare = text.lstrip()
            if not bare:
                return [], 0, After.MORE
            if bare[0] not in "[{":
                return self._named(text)
            self._list = JsonCalls(self._functions)
        if self._list is not None:
            return self._listed(text, self._list)
        assert self._call is not None
        events, taken = self._call.feed(text)
        return events, taken, After.BLANKS if self._call.done or self._call.failed else After.MORE

    def _listed(self, text: str, calls: JsonCalls) -> tuple[list[Event], int, After]:
        events, taken = calls.feed(text)
        if not calls.stopped:
            return events, taken, After.MORE
        if not calls.count:
            return [Text(self.opening), *events], taken, After.TEXT
        return events, taken, After.BLANKS

    def _named(self, text: str) -> tuple[list[Event], int, After]:
        """`name[ARGS]`."""
        possible = False
        for name in self._functions:
            whole = name + ARGUMENTS
            start = text.lstrip()
            if start.startswith(whole):
                self._call = JsonCall.of_arguments()
                return [Call(name)], len(text) - len(start) + len(whole), After.MORE
            possible = possible or whole.startswith(start)
        return ([], 0, After.MORE) if possible else ([Text(self.opening)], 0, After.TEXT)

    def finish(self) -> list[Event]:
        if self._list is not None and not self._list.count:
            return [Text(self.opening), *self._list.end()]
        if self._list is None and self._call is None:
            return [Text(self.opening + self._buffer)]
        return self._list.end() if self._list is not None else []

    @classmethod
    def grammar(cls, functions: Sequence[Signature], parallel: bool, token_id: TokenId) -> str:
        opening = mark(cls.opening, token_id)
        if token_id(ARGUMENTS) is None:
            return f'calls: {opening} "[" {repeated("one", ", ", parallel)} "]"\n{one_of(functions, "arguments")}'
        calls = [
            f"call_{i}: {opening} {json.dumps(name)} {mark(ARGUMENTS, token_id)} {embedded(arguments(parameters))}\n"
            for i, (name, parameters) in enumerate(functions)
        ]
        one = f"one: {' | '.join(f'call_{i}' for i in range(len(functions)))}\n"
        return f"calls: {repeated('one', '', parallel)}\n{one}{''.join(calls)}"

    @classmethod
    def write(cls, calls: Sequence[dict[str, Any]]) -> str:
        return cls.opening + json.dumps(list(calls), ensure_ascii=False)
