"""How an output ends, and what is told of its tokens."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.conformance.asking import complete, disaggregated, merged
from tests.conformance.subjects import Subject
from tests.worker_process import Frontend

pytestmark = [pytest.mark.integration, pytest.mark.slow]

TEXT = "The best thing about the sea is"


def prompt(subject: Subject) -> list[int]:
    return subject.tokenizer.encode(TEXT, add_special=False)


@pytest.mark.parametrize("tokens", [1, 2, 33])
async def test_a_budget_is_kept_to_the_token(subject: Subject, client: Frontend, tokens: int) -> None:
    asked = prompt(subject)
    answer = await complete(
        client, subject.tokenizer, f"budget{tokens}", asked, merged(subject.merged), max_tokens=tokens
    )
    assert (answer.tokens, answer.finish) == (tokens, "length")
    assert answer.text == subject.golden(tuple(asked), tokens)


async def test_a_budget_of_one_is_kept_in_a_hand_over(subject: Subject, decode: Frontend) -> None:
    assert subject.prefill is not None
    assert subject.decode is not None
    plan = disaggregated(subject.prefill, subject.decode)
    answer = await complete(decode, subject.tokenizer, "one", prompt(subject), plan, max_tokens=1)
    assert (answer.tokens, answer.finish) == (1, "length")


async def test_a_stop_id_ends_and_is_not_shown(subject: Subject, client: Frontend, can: Callable[..., None]) -> None:
    can("stop_token_ids")
    whole = await complete(client, subject.tokenizer, "whole", prompt(subject), merged(subject.merged), max_tokens=24)
    stop = next(token for i, token in enumerate(whole.ids) if i > 5 and token not in whole.ids[:i])
    at = whole.ids.index(stop)
    plan = merged(subject.merged)
    answer = await complete(
        client, subject.tokenizer, "stop", prompt(subject), plan, max_tokens=24, stop_token_ids=[stop]
    )
    assert (answer.ids, answer.finish) == (whole.ids[:at], "stop")


async def test_a_first_token_that_stops_is_no_output_of_a_hand_over(
    subject: Subject, decode: Frontend, can: Callable[..., None]
) -> None:
    can("stop_token_ids")
    assert subject.prefill is not None
    assert subject.decode is not None
    plan = disaggregated(subject.prefill, subject.decode)
    (first,) = (await complete(decode, subject.tokenizer, "first", prompt(subject), plan, max_tokens=1)).ids
    answer = await complete(
        decode, subject.tokenizer, "none", prompt(subject), plan, max_tokens=9, stop_token_ids=[first]
    )
    assert (answer.ids, answer.finish) == ([], "stop")


async def test_end_of_text_ends_unless_ignored(subject: Subject, client: Frontend, can: Callable[..., None]) -> None:
    """With a bias that makes it the only token: nothing is said, or `min_tokens` that are something else."""
    can("logit_bias", "ignore_eos")
    (eos,) = subject.tokenizer.encode("<|im_end|>", add_special=False)
    plan, bias = merged(subject.merged), {eos: 100.0}
    ended = await complete(
        client, subject.tokenizer, "eos", prompt(subject), plan, logit_bias=bias, ignore_eos=False, max_tokens=8
    )
    assert (ended.text, ended.finish) == ("", "stop")
    can("min_tokens")
    later = await complete(
        client,
        subject.tokenizer,
        "later",
        prompt(subject),
        plan,
        logit_bias=bias,
        ignore_eos=False,
        max_tokens=8,
        min_tokens=3,
    )
    assert (later.tokens, later.finish) == (3, "stop")
    assert eos not in later.ids


async def test_logprobs_are_of_the_tokens(subject: Subject, client: Frontend, can: Callable[..., None]) -> None:
    can("logprobs")
    plan = merged(subject.merged)
    answer = await complete(client, subject.tokenizer, "lp", prompt(subject), plan, max_tokens=6, logprobs=3)
    assert [entry.token_id for entry in answer.logprobs] == answer.ids
    for entry in answer.logprobs:
        assert entry.logprob <= 0
        assert len(entry.top_ids) == len(entry.top_logprobs) == 3
        assert (entry.top_ids[0], entry.top_logprobs[0]) == (entry.token_id, entry.logprob), "greedy takes the best"
        assert list(entry.top_logprobs) == sorted(entry.top_logprobs, reverse=True)
    plain = await complete(client, subject.tokenizer, "nolp", prompt(subject), plan, max_tokens=6)
    assert (plain.ids, plain.logprobs) == (answer.ids, [])


async def test_a_handed_over_first_token_has_its_logprob(
    subject: Subject, decode: Frontend, can: Callable[..., None]
) -> None:
    can("logprobs")
    assert subject.prefill is not None
    assert subject.decode is not None
    plan = disaggregated(subject.prefill, subject.decode)
    answer = await complete(decode, subject.tokenizer, "lpo", prompt(subject), plan, max_tokens=4, logprobs=0)
    assert [entry.token_id for entry in answer.logprobs] == answer.ids
