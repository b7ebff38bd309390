"""Prefix hits, counted right: none when cold, some when warm, never beyond the prompt."""

from __future__ import annotations

import random

import pytest

from tests.conformance.asking import complete, disaggregated, merged
from tests.conformance.subjects import Subject
from tests.worker_process import Frontend

pytestmark = [pytest.mark.integration, pytest.mark.slow]


def fresh(tokens: int, seed: int) -> list[int]:
    """A prompt that nobody has seen."""
    return random.Random(f"{tokens} {seed}").choices(range(200, 4000), k=tokens)


@pytest.mark.parametrize("tokens", [20, 64, 100, 129])
async def test_cold_then_warm(subject: Subject, client: Frontend, tokens: int) -> None:
    prompt, plan = fresh(tokens, 1), merged(subject.merged)
    cold = await complete(client, subject.tokenizer, f"cold{tokens}", prompt, plan, max_tokens=2)
    assert cold.route.cached_tokens == 0
    assert cold.route.computed_tokens == tokens
    warm = await complete(client, subject.tokenizer, f"warm{tokens}", prompt, plan, max_tokens=2)
    assert 0 <= warm.route.cached_tokens < tokens, "the last token is always computed: its logits are needed"
    assert warm.route.computed_tokens == tokens - warm.route.cached_tokens
    if subject.hands_over:
        assert warm.route.cached_tokens == (tokens - 1) // 32 * 32, "all whole blocks but the one of the last token"
    if subject.exact:
        assert warm.text == cold.text


async def test_a_longer_prompt_hits_what_it_shares(subject: Subject, client: Frontend) -> None:
    shared, plan = fresh(96, 2), merged(subject.merged)
    await complete(client, subject.tokenizer, "shared", shared, plan, max_tokens=1)
    for n, tail in enumerate(([5] * 40, [6] * 7)):
        answer = await complete(client, subject.tokenizer, f"longer{n}", [*shared, *tail], plan, max_tokens=1)
        assert answer.route.cached_tokens <= 96
        if subject.hands_over:
            assert answer.route.cached_tokens == 96


async def test_hits_of_a_hand_over(subject: Subject, decode: Frontend) -> None:
    """Counted where the prompt is computed; what the decode worker holds already is not moved again."""
    assert subject.prefill is not None
    assert subject.decode is not None
    prompt, plan = fresh(100, 3), disaggregated(subject.prefill, subject.decode)
    cold = await complete(decode, subject.tokenizer, "hcold", prompt, plan, max_tokens=2)
    assert cold.route.cached_tokens == 0
    assert cold.route.loaded_tokens >= 96
    warm = await complete(decode, subject.tokenizer, "hwarm", prompt, plan, max_tokens=2)
    assert warm.route.cached_tokens <= len(prompt)
    assert warm.route.loaded_tokens <= len(prompt) - 96
    assert warm.text == cold.text
