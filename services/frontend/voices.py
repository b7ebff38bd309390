"""How this model's chats are put to it and read: its parsers, its tools in the prompt, the grammar of its answer."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from baton.engine.port import Grammar, GrammarKind
from baton.model.card import Model
from services.frontend.conversation import plain
from services.frontend.errors import invalid
from services.frontend.grammars import GrammarCheck
from services.frontend.parsers.choose import REASONING, TOOLS, reasoning_parser, tool_parser
from services.frontend.parsers.reasoning import Marks
from services.frontend.parsers.rules import arguments, embedded
from services.frontend.speech import Voice
from services.frontend.structure import Structure
from services.frontend.tools import Tools

AUTO = "auto"


class Voices:
    """Of one model. Thread-safe."""

    def __init__(self, model: Model, tools: str = AUTO, reasoning: str = AUTO) -> None:
        """`tools` and `reasoning` name parsers (choose.py), or "auto"."""
        self._template = model.template
        self._tokenizer = model.tokenizer
        self._tools = tool_parser(tools, model.template.text)
        self._reasoning = reasoning_parser(reasoning, model.template.text)
        self.grammars = GrammarCheck(model)

    @property
    def names(self) -> tuple[str, str]:
        """The parsers, for a reader in another process."""
        return self._tools, self._reasoning or "none"

    def conversation(
        self, messages: Sequence[Mapping[str, Any]], tools: Tools | None
    ) -> tuple[Sequence[Mapping[str, Any]], list[dict[str, Any]] | None]:
        """Messages and tools for the chat template."""
        offered = [function.raw for function in tools.callable] if tools is not None else []
        if self._template.takes_tools:
            return messages, offered or None
        return plain(messages, tools, TOOLS[self._tools]), None

    def voice(self, tools: Tools | None, prompt: str) -> Voice:
        """How answers to a rendered prompt are read."""
        functions = tuple(function.name for function in tools.callable) if tools is not None else ()
        reasons = self._reasoning and _thought(prompt, REASONING[self._reasoning])
        seen = (*(TOOLS[self._tools].specials if functions else ()), *(_marks(self._reasoning) if reasons else ()))
        ids = {text: self._token_id(text) for text in seen}
        return Voice(
            tools=self._tools if functions else "",
            functions=functions,
            named=tools is not None and tools.freedom == "named",
            reasoning=self._reasoning if reasons else "",
            opened=reasons == "opened",
            shown=tuple((i, text) for text, i in ids.items() if i is not None and self._tokenizer.is_special(i)),
        )

    def grammar(self, tools: Tools | None, structure: Structure | None, voice: Voice | None = None) -> Grammar | None:
        """What answers must follow; None: nothing. Raises BatonError(INVALID_REQUEST) when it does not compile, with
        the field that it came from."""
        grammar = self._answer(tools, structure)
        if grammar is None or voice is None or not voice.reasoning:
            return grammar
        marks = REASONING[voice.reasoning]
        return Grammar(grammar.kind, grammar.text, marks.closing, "" if voice.opened else marks.opening)

    def _answer(self, tools: Tools | None, structure: Structure | None) -> Grammar | None:
        if structure is not None:
            self.grammars.check(structure.grammar, structure.param, "the schema or grammar")
        if tools is None or not tools.callable or (tools.freedom == "auto" and structure is None):
            return None if structure is None else structure.grammar
        for function in tools.callable:
            taken = Grammar(GrammarKind.JSON, json.dumps(arguments(function.parameters)))
            self.grammars.check(taken, function.schema_param, f"the schema of '{function.name}'")
        signatures = [(function.name, function.parameters) for function in tools.callable]
        rules = TOOLS[self._tools].grammar(signatures, tools.parallel, self._token_id)
        start = "start: calls\n"
        if tools.freedom == "auto" and structure is not None:
            if structure.grammar.kind is not GrammarKind.JSON:
                raise invalid(f"'{structure.param}' excludes 'tools' that may be called.", structure.param)
            schema = json.loads(structure.grammar.text)
            start = f"start: calls | answer\nanswer: {embedded({} if schema is True else schema)}\n"
        grammar = Grammar(GrammarKind.GRAMMAR, start + rules)
        self.grammars.check(grammar, "tools", "what they are together")
        return grammar

    def _token_id(self, text: str) -> int | None:
        return self._tokenizer.backend.token_to_id(text)


def _marks(name: str) -> tuple[str, str]:
    marks = REASONING[name]
    return marks.opening, marks.closing


def _thought(prompt: str, marks: Marks) -> str:
    """What a prompt's end says of a thought: "opened", "" when it is over or not wanted, else "free"."""
    end = prompt.rstrip()
    if end.endswith(marks.opening):
        return "opened"
    return "" if end.endswith(marks.closing) else "free"
