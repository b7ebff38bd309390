"""Sampling: the order of processing, the filters against transformers' own, and noise that only its counters move."""

from __future__ import annotations

import math
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from baton.engine.port import SamplingParams
from baton.engine.torch.noise import uniforms
from baton.engine.torch.sampler import SamplingState, sample, token_logprobs
from baton.errors import BatonError

VOCAB = 1000
KNOWN = [0.7510449318, 0.283282658348, 0.680339896766]
"""Noise of seed 7, choice 0, index 0, tokens 0 to 2, computed with Python integers."""


def state(
    *,
    output: list[int] | None = None,
    prompt: list[int] | None = None,
    choice: int = 0,
    mask: Any = None,
    **params: Any,
) -> SamplingState:
    sampling = SamplingParams(**{"max_tokens": 10, "seed": 1, "temperature": 0.0, **params})
    return SamplingState(sampling, choice, prompt or [], output or [], (0,), mask)


def logits_of(rows: int, vocab: int = VOCAB, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def one(logits: torch.Tensor, what: SamplingState) -> int:
    return sample(logits[None] if logits.dim() == 1 else logits, [what])[0].token_id


def draws(logits: torch.Tensor, count: int, **params: Any) -> Counter[int]:
    states = [state(output=[5] * i, **{"temperature": 1.0, **params}) for i in range(count)]
    return Counter(s.token_id for s in sample(logits.expand(count, -1), states))


def test_greedy_is_the_most_likely() -> None:
    logits = logits_of(5)
    assert [s.token_id for s in sample(logits, [state()] * 5)] == logits.argmax(-1).tolist()
    assert sample(logits[:0], []) == []


def test_logits_are_left_alone() -> None:
    logits = logits_of(2)
    before = logits.clone()
    sample(logits, [state(logit_bias={3: 50.0}, min_tokens=4), state(temperature=0.7, top_p=0.5, top_k=9)])
    assert torch.equal(logits, before)


# ---- adjustments


def test_bias_moves_the_choice() -> None:
    logits = torch.zeros(10)
    logits[4] = 1.0
    assert one(logits, state()) == 4
    assert one(logits, state(logit_bias={7: 2.0})) == 7
    assert one(logits, state(logit_bias={4: -100.0, 2: 0.5})) == 2


def test_presence_and_frequency_count_output_only() -> None:
    logits = torch.tensor([0.0, 1.0, 0.9, 0.5])
    assert one(logits, state(prompt=[1, 1], presence_penalty=2.0)) == 1
    assert one(logits, state(output=[1], presence_penalty=2.0)) == 2
    assert one(logits, state(output=[1, 1], presence_penalty=0.05)) == 1  # once, however often it came
    assert one(logits, state(output=[1, 1], frequency_penalty=0.06)) == 2
    assert one(logits, state(output=[1], frequency_penalty=0.06)) == 1
    assert one(logits, state(output=[1, 2], presence_penalty=-1.0)) == 1


def test_repetition_penalty_is_that_of_transformers() -> None:
    logits = logits_of(1)
    prompt, output = [1, 2, 3, int(logits.argmax())], [4, 5, 5]
    found = token_logprobs(logits, [0], [0])  # plain call: no processing is left behind
    assert found[0] is not None
    oracle = RepetitionPenaltyLogitsProcessor(3.0)(torch.tensor([prompt + output]), logits.clone())
    assert one(logits, state(prompt=prompt, output=output, repetition_penalty=3.0)) == int(oracle.argmax())
    assert int(oracle.argmax()) != int(logits.argmax())


def test_ends_wait_for_min_tokens() -> None:
    logits = torch.tensor([9.0, 0.0, 8.0, 1.0])  # 0 is the end of text
    assert one(logits, state()) == 0
    assert one(logits, state(min_tokens=2, output=[3])) == 2
    assert one(logits, state(min_tokens=2, stop_token_ids=(2,))) == 3
    assert one(logits, state(min_tokens=2, stop_token_ids=(2,), output=[3, 3])) == 0


def test_a_grammar_mask_has_the_last_word() -> None:
    logits = torch.tensor([9.0, 0.0, 8.0, 1.0])
    mask = torch.tensor([False, True, False, True])
    assert one(logits, state(mask=mask)) == 3
    assert one(logits, state(mask=mask, logit_bias={0: 100.0})) == 3
    assert draws(logits, 50, mask=mask, temperature=5.0).keys() == {1, 3}


# ---- filters, against transformers


@pytest.mark.parametrize(
    "params",
    [
        {"top_k": 5},
        {"top_p": 0.7},
        {"min_p": 0.1},
        {"top_k": 20, "top_p": 0.5},
        {"top_k": 50, "top_p": 0.9, "min_p": 0.05, "temperature": 1.7},
        {"temperature": 0.4},
        {"top_p": 0.999, "temperature": 3.0},  # more candidates than are looked at first
    ],
)
def test_draws_follow_the_distribution_of_transformers(params: dict[str, Any]) -> None:
    logits = logits_of(1, vocab=400, seed=3)
    warped = TemperatureLogitsWarper(float(params.get("temperature", 1.0)))(None, logits.clone())
    if "top_k" in params:
        warped = TopKLogitsWarper(params["top_k"])(None, warped)
    if "top_p" in params:
        warped = TopPLogitsWarper(params["top_p"])(None, warped)
    if "min_p" in params:
        warped = MinPLogitsWarper(params["min_p"])(None, warped)
    probabilities = warped.softmax(-1)[0].double().numpy()
    count = 4000
    found = draws(logits, count, **params)
    assert set(found) <= set(np.flatnonzero(probabilities).tolist())
    observed = np.array([found[i] for i in range(400)]) / count
    # Total variation of a sample of that size is about sqrt(support / (2 pi count)); seeds are fixed, so this is sharp.
    support = int((probabilities > 0).sum())
    assert np.abs(observed - probabilities).sum() / 2 < 1.5 * math.sqrt(support / (2 * math.pi * count)) + 0.01


def test_ties_at_the_border_are_kept() -> None:
    logits = torch.tensor([2.0, 1.0, 1.0, -3.0])
    assert draws(logits, 200, top_k=2).keys() == {0, 1, 2}


def test_extremes() -> None:
    logits = logits_of(1)[0]
    top = int(logits.argmax())
    assert draws(logits, 20, top_k=1).keys() == {top}
    assert draws(logits, 20, top_p=1e-6).keys() == {top}
    assert draws(logits, 20, min_p=1.0).keys() == {top}
    assert draws(logits, 20, temperature=1e-6).keys() == {top}
    assert draws(logits, 20, temperature=1e-60, top_p=0.9).keys() == {top}
    for least in (1e-38, 1e-42, 1e-320, 5e-324):  # below what float32 can hold
        assert draws(logits, 20, temperature=least).keys() == {top}
    assert len(draws(logits, 300, top_k=VOCAB + 5, temperature=100.0)) > 150


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", ["nan", "inf", "masked"])
def test_what_is_no_distribution_is_an_error(temperature: float, bad: str) -> None:
    logits = logits_of(3)
    states = [state(temperature=temperature, top_p=0.9) for _ in range(3)]
    if bad == "masked":
        states[1] = state(temperature=temperature, mask=torch.zeros(VOCAB, dtype=torch.bool))
    else:
        logits[1, 7] = float(bad)
    with pytest.raises(BatonError, match="not numbers"):
        sample(logits, states)
    assert sample(logits[[0, 2]], [states[0], states[2]])


# ---- noise


def noise(seed: int, choice: int, index: int, tokens: int = 1) -> list[float]:
    numbers: list[float] = uniforms(seed, choice, index, torch.arange(tokens)).tolist()
    return numbers


def test_noise_is_a_function_of_its_counters() -> None:
    # Known values: a resumed stream may be drawn by another release.
    assert [round(n, 12) for n in noise(7, 0, 0, 3)] == KNOWN
    assert noise(2**64 + 7, 0, 0, 9) == noise(7, 0, 0, 9)
    assert len({n for s in (0, 1, -1) for c in range(3) for i in range(20) for n in noise(s, c, i, 100)}) == 18_000
    assert uniforms(3, 0, 5, torch.tensor([70, 9])).tolist() == [noise(3, 0, 5, 71)[70], noise(3, 0, 5, 10)[9]]


@pytest.mark.parametrize("axis", ["tokens", "index"])
def test_noise_is_uniform_along(axis: str) -> None:
    drawn = noise(3, 0, 0, 20_000) if axis == "tokens" else [noise(3, 0, i)[0] for i in range(20_000)]
    numbers = np.array(drawn)
    assert numbers.min() > 0
    assert numbers.max() < 1
    assert np.abs(np.histogram(numbers, 20, (0, 1))[0] - 1000).max() < 150
    assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.03


def test_rounding_moves_no_draw() -> None:
    # More than another batch or another chunk of the prompt does to logits.
    logits = logits_of(1, vocab=5000)
    shaken = logits + logits_of(1, vocab=5000, seed=1) * 1e-5
    for filters in ({}, {"top_p": 0.95}, {"top_p": 0.9, "min_p": 0.001}):
        states = [state(output=[1] * i, temperature=1.0, **filters) for i in range(2000)]
        before, after = (sample(of.expand(len(states), -1), states) for of in (logits, shaken))
        assert [s.token_id for s in before] == [s.token_id for s in after]


def test_the_batch_does_not_move_a_draw() -> None:
    logits = logits_of(12, vocab=5000)
    kinds = [{"temperature": 0.9}, {"temperature": 0.0}, {"temperature": 1.2, "top_p": 0.8}, {"top_k": 40}]
    states = [state(output=[1] * i, seed=i, choice=i % 3, **{"temperature": 1.0, **kinds[i % 4]}) for i in range(12)]
    together = [s.token_id for s in sample(logits, states)]
    assert together == [one(logits[i], states[i]) for i in range(12)]
    order = [7, 2, 11, 0]
    assert [s.token_id for s in sample(logits[order], [states[i] for i in order])] == [together[i] for i in order]


def test_seed_choice_and_index_each_move_the_draws() -> None:
    logits = logits_of(1).expand(30, -1)
    base = [state(output=[1] * i, temperature=1.5) for i in range(30)]

    def ids(states: list[SamplingState]) -> list[int]:
        return [s.token_id for s in sample(logits, states)]

    assert ids(base) == ids(base)
    assert ids(base) != ids([replace(s, params=replace(s.params, seed=2)) for s in base])
    assert ids(base) != ids([replace(s, choice=1) for s in base])
    assert ids(base) != ids([replace(s, output_ids=[*s.output_ids, 1]) for s in base])
    # What the output was does not matter, how long it is does.
    assert ids(base) == ids([replace(s, output_ids=[2] * len(s.output_ids)) for s in base])


def test_another_process_draws_the_same() -> None:
    program = (
        "import torch; from baton.engine.torch.noise import uniforms;"
        "print(repr([uniforms(s, 1, i, torch.arange(50)).tolist() for s in (5, -5) for i in (0, 9)]))"
    )
    output = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert output.stdout.strip() == repr([noise(s, 1, i, 50) for s in (5, -5) for i in (0, 9)])


# ---- log-probabilities


def test_logprobs_are_of_the_distribution_as_it_came() -> None:
    logits = logits_of(3)
    states = [state(logprobs=2, logit_bias={9: 100.0}), state(), state(logprobs=0, temperature=2.0, top_k=3)]
    first, second, third = sample(logits, states)
    exact = logits.log_softmax(-1)
    assert first.token_id == 9
    assert first.logprob is not None
    assert first.logprob.token_id == 9
    assert first.logprob.logprob == pytest.approx(exact[0, 9].item(), abs=1e-5)
    values, ids = exact[0].topk(2)
    assert [i for i, _ in first.logprob.top] == ids.tolist()
    assert [v for _, v in first.logprob.top] == pytest.approx(values.tolist(), abs=1e-5)
    assert second.logprob is None
    assert third.logprob is not None
    assert third.logprob.top == ()
    assert third.logprob.logprob == pytest.approx(exact[2, third.token_id].item(), abs=1e-5)


def test_more_logprobs_than_tokens() -> None:
    (found,) = token_logprobs(torch.tensor([[1.0, 2.0, 3.0]]), [1], [20])
    assert found is not None
    assert [i for i, _ in found.top] == [2, 1, 0]
