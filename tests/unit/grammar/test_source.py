"""Grammars that would cost whoever compiles them minutes, or the thread they are compiled in."""

from __future__ import annotations

import json

import pytest

from baton.engine.port import Grammar, GrammarKind
from baton.errors import BatonError, Reason
from baton.grammar.compile import Vocabulary
from baton.grammar.source import MAX_GBNF_RULES, lark
from baton.model.card import Model

pytestmark = pytest.mark.timeout(30)
"""Far above what they take now, far below the minutes that they took."""


def test_lark_behind_empty_lines_is_seen_at_once() -> None:
    text = "\n" * 200_000 + 'start: "a"'
    assert lark(text) == text
    with pytest.raises(ValueError, match="GBNF"):
        lark("\n" * 200_000 + "x")


def test_gbnf_is_taken_up_to_a_size() -> None:
    chain = [f"r{i} ::= r{i + 1}" for i in range(MAX_GBNF_RULES)]
    with pytest.raises(ValueError, match="use Lark"):
        lark("\n".join(["root ::= r0", *chain, 'last ::= "a"']))
    with pytest.raises(ValueError, match="use Lark"):
        lark('root ::= "a" # ' + "x" * 40_000)
    assert "start:" in lark('root ::= "a" | "b"')


@pytest.fixture(scope="module")
def vocabulary(model: Model) -> Vocabulary:
    return Vocabulary(lambda: model.tokenizer, model.tokenizer.vocab_size, model.generation.eos_ids)


@pytest.mark.parametrize(
    "schema", [{"type": "object", "required": "é" * 60}, {"required": "é" * 60}, {"enum": "é" * 99}]
)
def test_what_the_compiler_cannot_bear_is_refused(vocabulary: Vocabulary, schema: object) -> None:
    with pytest.raises(BatonError) as refused:
        vocabulary.compile(Grammar(GrammarKind.JSON, json.dumps(schema)))
    assert refused.value.reason is Reason.INVALID_REQUEST
    assert vocabulary.compile(Grammar(GrammarKind.JSON, '{"type": "integer"}'))
