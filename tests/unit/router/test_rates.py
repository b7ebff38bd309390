"""What is learnt, from what, and what stands before."""

from __future__ import annotations

import pytest

from services.router.rates import (
    DEFAULT_PREFILL_TOK_S,
    DEFAULT_STEP_S,
    DEFAULT_TRANSFER_BYTES_S,
    PrefillShare,
    Rates,
)


def test_registration_then_report() -> None:
    rates = Rates()
    assert rates.speed("p").prefill_tok_s == DEFAULT_PREFILL_TOK_S
    rates.register("p", 700.0, 0.0, 0.0)
    assert rates.speed("p").prefill_tok_s == 700.0
    assert rates.speed("p").steps.lone_s == DEFAULT_STEP_S
    rates.reported("p", 0.0, 0.02, 1, 1.0)
    assert (rates.speed("p").prefill_tok_s, rates.speed("p").steps.lone_s) == (700.0, 0.02)
    rates.reported("p", 900.0, 0.0, 1, 2.0)
    rates.register("p", 700.0, 0.5, 0.0)
    assert (rates.speed("p").prefill_tok_s, rates.speed("p").steps.lone_s) == (900.0, 0.02)


def test_transfer_is_a_ratio_of_averages() -> None:
    rates = Rates(gain=0.5)
    rates.register("p", 0, 0, 4e9)
    rates.register("d", 0, 0, 0)
    assert rates.transfer("p", "d") == DEFAULT_TRANSFER_BYTES_S
    rates.moved("p", "d", 1_000_000_000, 0.5, "nixl")
    assert rates.transfer("p", "d") == pytest.approx(2e9)
    assert rates.transport("p", "d") == "nixl"
    rates.moved("p", "d", 1_000, 0.1, "nixl")  # a tiny, slow one hardly counts
    assert rates.transfer("p", "d") > 1.5e9
    assert rates.transfer("p", "other") == DEFAULT_TRANSFER_BYTES_S


def test_nonsense_and_strangers_are_not_learnt() -> None:
    rates = Rates()
    rates.register("p", 0, 0, 0)
    rates.moved("p", "stranger", 10, 1.0, "nixl")
    rates.moved("p", "p", 0, 1.0, "nixl")
    rates.moved("p", "p", 10, 0.0, "nixl")
    rates.answered(0)
    assert rates._moved == {}
    assert rates.output_tokens == 128.0


def test_forget_drops_every_pair() -> None:
    rates = Rates()
    for worker in ("p", "d"):
        rates.register(worker, 0, 0, 0)
    rates.moved("p", "d", 10, 1.0, "nixl")
    rates.forget("d")
    assert rates._moved == {}
    assert set(rates._speed) == {"p"}


def test_answer_lengths_move_the_expectation() -> None:
    rates = Rates()
    for _ in range(200):
        rates.answered(10)
    assert rates.output_tokens == pytest.approx(10, abs=1)


def test_prefill_share_reaches_the_true_share_and_decays() -> None:
    shares = PrefillShare(window_s=30.0)
    for second in range(300):
        shares.add("m", 0.25, float(second))
    assert shares.of("m", 299.0) == pytest.approx(0.25, abs=0.02)
    assert shares.of("m", 299.0 + 120.0) < 0.01
    assert shares.of("other", 0.0) == 0.0
    for _ in range(1000):
        shares.add("m", 10.0, 500.0)
    assert shares.of("m", 500.0) == 1.0
