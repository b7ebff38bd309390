"""Grammars on a random model: what it would never say by itself it says validly, wherever the output is computed."""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from baton.engine.port import FinishReason, Grammar, GrammarKind, SamplingParams
from baton.errors import BatonError, Reason
from baton.model.tokenizer import Tokenizer, load_tokenizer
from tests.unit.torch_engine.client import Client, hand_over, request
from tests.unit.torch_engine.schemas import schemas

pytestmark = pytest.mark.asyncio(loop_scope="package")

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
PROMPT = list(range(40))
SEEDED: dict[str, Any] = {"temperature": 1.0, "seed": 5}


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Tokenizer:
    return load_tokenizer(tiny_model)


def schema(value: object) -> Grammar:
    return Grammar(GrammarKind.JSON, json.dumps(value))


async def test_json_by_a_schema(client: Client, tokenizer: Tokenizer) -> None:
    for options in ({}, SEEDED, SEEDED | {"top_p": 0.5, "top_k": 3}):
        asked = request(PROMPT, max_tokens=300, grammar=schema(PERSON), ignore_eos=False, **options)
        output = (await (await client.submit(asked)).result())[0]
        assert output.finish is FinishReason.STOP
        jsonschema.validate(json.loads(tokenizer.decode(output.tokens)), PERSON)


async def test_random_schemas(client: Client, tokenizer: Tokenizer) -> None:
    """Hundreds at once: valid when it ended by itself, a beginning of something valid when the budget ended it."""
    cases = schemas(300)

    async def one(number: int) -> bool:
        asked = request(
            PROMPT[: 1 + number % 7], max_tokens=400, grammar=schema(cases[number]), ignore_eos=False,
            temperature=0.0 if number % 3 == 0 else 0.8, seed=number,
        )  # fmt: skip
        output = (await (await client.submit(asked)).result())[0]
        text = tokenizer.decode(output.tokens)
        assert "\n" not in text
        if output.finish is FinishReason.LENGTH:
            return False
        jsonschema.validate(json.loads(text), cases[number], format_checker=jsonschema.FormatChecker())
        return True

    turns = asyncio.Semaphore(16)

    async def in_turn(number: int) -> bool:
        async with turns:
            return await one(number)

    ended = await asyncio.gather(*map(in_turn, range(len(cases))))
    assert sum(ended) > 0.9 * len(cases)


@pytest.mark.parametrize(
    ("grammar", "pattern"),
    [
        (Grammar(GrammarKind.REGEX, r"[a-c]{3}-\d{2}"), r"[a-c]{3}-\d{2}"),
        (Grammar(GrammarKind.CHOICE, '["yes", "no", "möglich"]'), "yes|no|möglich"),
        (Grammar(GrammarKind.GRAMMAR, 'start: "(" start ")" | "x"'), r"\(*x\)*"),
        (Grammar(GrammarKind.GRAMMAR, 'root ::= "a" ("b" | "c") "d"'), "a(b|c)d"),
    ],
)
async def test_other_kinds(client: Client, tokenizer: Tokenizer, grammar: Grammar, pattern: str) -> None:
    output = (await (await client.submit(request(PROMPT, max_tokens=200, grammar=grammar, **SEEDED))).result())[0]
    text = tokenizer.decode(output.tokens)
    assert re.fullmatch(pattern, text) or output.finish is FinishReason.LENGTH
    assert output.finish is FinishReason.STOP or grammar.text.startswith('start: "("')


async def test_after_a_thought(client: Client, tokenizer: Tokenizer) -> None:
    """Free until the mark, and not to end before it."""
    grammar = Grammar(GrammarKind.CHOICE, '["yes", "no"]', after="!")
    output = (await (await client.submit(request(PROMPT, max_tokens=900, grammar=grammar, **SEEDED))).result())[0]
    thought, _, answer = tokenizer.decode(output.tokens).partition("!")
    assert answer in ("yes", "no")
    assert len(thought) > 3


async def test_every_choice_has_its_own_state(client: Client, tokenizer: Tokenizer) -> None:
    asked = request(PROMPT, max_tokens=300, choices=(0, 1, 2, 3), grammar=schema(PERSON), **SEEDED)
    texts = {tokenizer.decode(o.tokens) for o in (await (await client.submit(asked)).result()).values()}
    assert len(texts) == 4
    for text in texts:
        jsonschema.validate(json.loads(text), PERSON)


@pytest.mark.parametrize("options", [{}, SEEDED])
async def test_resumed_anywhere_and_handed_over(engines: tuple[Client, Client], options: dict[str, Any]) -> None:
    """The same tokens from any of them on, on either engine, with the first drawn on the other."""
    one, other = engines
    asked = request(PROMPT, max_tokens=300, grammar=schema(PERSON), **options)
    whole = await one.complete(asked)
    for cut in (1, 2, len(whole) // 2, len(whole) - 1, len(whole)):
        rest = request(PROMPT, max_tokens=300, emitted=whole[:cut], grammar=schema(PERSON), **options)
        assert await other.complete(rest) == whole
    stream, _ = await hand_over(one, other, request(PROMPT, max_tokens=300, grammar=schema(PERSON), **options))
    assert await stream.tokens() == whole


async def test_ends_only_where_it_may(client: Client, tokenizer: Tokenizer) -> None:
    """`min_tokens`, `ignore_eos`, stop ids and biases do not break it."""
    grammar = Grammar(GrammarKind.REGEX, "[a-z]{2,40}")
    for options, least in (({"min_tokens": 20}, 20), ({"ignore_eos": True}, 40), ({"min_tokens": 100}, 40)):
        tokens = await client.complete(
            request(PROMPT, max_tokens=120, grammar=grammar, **SEEDED, **{"ignore_eos": False, **options})
        )
        assert least <= len(tokens) <= 40
    eos = client.engine.spec.eos_token_ids[0]
    biased = request(PROMPT, max_tokens=120, grammar=grammar, ignore_eos=False, logit_bias={eos: 100.0})
    assert len(await client.complete(biased)) == 2
    stop = tokenizer.encode("Q", add_special=False)[0]
    stopped = request(PROMPT, max_tokens=120, grammar=grammar, stop_token_ids=(stop,), logit_bias={stop: 100.0})
    assert len(await client.complete(stopped)) == 2


async def test_the_budget_ends_it(client: Client) -> None:
    asked = request(PROMPT, max_tokens=5, grammar=schema(PERSON))
    output = (await (await client.submit(asked)).result())[0]
    assert (len(output.tokens), output.finish) == (5, FinishReason.LENGTH)


async def test_a_grammar_that_cannot_be(client: Client) -> None:
    """Its request fails, in the compiler's words; others do not notice."""
    fine = await client.submit(request(PROMPT, max_tokens=60, grammar=schema(PERSON)))
    wide = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(3000)}}
    for grammar in (
        schema({"type": "nonsense"}),
        schema(wide),
        Grammar(GrammarKind.REGEX, "("),
        Grammar(GrammarKind.GRAMMAR, "?"),
    ):
        stream = await client.submit(request(PROMPT, grammar=grammar))
        with pytest.raises(BatonError) as failed:
            await stream.result()
        assert failed.value.reason is Reason.INVALID_REQUEST
        assert "grammar" in failed.value.message
        reservation = await client.engine.reserve(request(PROMPT, grammar=grammar), decode_room=False)
        with pytest.raises(BatonError, match="grammar"):
            await client.prefill(reservation)
        await reservation.release()
    await fine.result()


async def test_an_output_that_left_its_grammar(client: Client) -> None:
    asked = request(PROMPT, emitted=[1, 2, 3], grammar=Grammar(GrammarKind.CHOICE, '["yes"]'))
    with pytest.raises(BatonError, match="cannot go on by its grammar"):
        await (await client.submit(asked)).result()


async def test_a_slow_grammar_holds_up_nobody(client: Client, tokenizer: Tokenizer) -> None:
    """A request whose grammar takes long to compile waits; one that came later is served meanwhile."""
    names = [f"p{i}" for i in range(3000)]
    wide = {"type": "object", "properties": {n: {"type": "string"} for n in names}, "required": names}
    slow = await client.submit(request(PROMPT, max_tokens=4, grammar=schema(wide)))
    quick = await client.submit(request(PROMPT, max_tokens=1))
    await quick.result()
    assert not slow.done.is_set()
    assert tokenizer.decode(await slow.tokens()).startswith("{")


async def test_same_draws_as_without_where_all_is_allowed(client: Client) -> None:
    """The mask only takes away: the noise is the same."""
    free = request(PROMPT, max_tokens=30, **SEEDED)
    anything = replace(free.sampling, grammar=Grammar(GrammarKind.REGEX, "(?s:.*)"), logit_bias={})
    assert isinstance(anything, SamplingParams)
    told = await client.complete(free)
    masked = await client.complete(replace(free, uid="masked", sampling=anything))
    same = next((i for i, (a, b) in enumerate(zip(told, masked, strict=False)) if a != b), len(told))
    assert same >= 1
