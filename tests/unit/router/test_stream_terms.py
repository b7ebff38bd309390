"""Boundaries of what a stream itself suffers where it is put: a fuller batch, and prompts that come later."""

from __future__ import annotations

import pytest

from services.router.costs import Parameters, Role, WorkerState, own_cost, pair_cost
from services.router.policy import Choice, candidates, choose
from tests.unit.router.test_policy import ask, rate, worker

P = Parameters()
DECODE_S = 128 * 0.035
"""An answer's seconds, alone."""


def streamer(*workers: object) -> str:
    choice = choose(candidates(workers, ask(50), rate, P), ask(50), P)  # type: ignore[arg-type]
    assert isinstance(choice, Choice), choice
    return choice.winner.worker.id


def test_interference_is_the_measured_share_or_what_prompts_like_this_will_take() -> None:
    assumed = P.assumed_arrivals_s * 50 / 500.0  # 5 % of the time
    for share in (0.0, 0.04):
        terms = own_cost(worker(Role.MERGED, prefill_share=share), ask(50), P)
        assert terms.interference == pytest.approx(DECODE_S * assumed)
    assert own_cost(worker(Role.MERGED, prefill_share=0.06), ask(50), P).interference == pytest.approx(DECODE_S * 0.06)
    assert own_cost(worker(Role.MERGED), ask(2000), P).interference == pytest.approx(DECODE_S), "all of the time"


def test_a_pair_suffers_only_what_was_measured_on_its_decode() -> None:
    def interference(share: float) -> float:
        return pair_cost(
            worker(Role.PREFILL), worker(Role.DECODE, prefill_share=share), ask(2000), rate, P
        ).interference

    assert interference(0.0) == 0.0
    assert interference(0.25) == pytest.approx(DECODE_S * 0.25)


def test_a_merged_worker_busy_with_prompts_is_left_for_one_with_streams_up_to_what_they_cost() -> None:
    """Each stream costs a frozen prompt (0.1 s, weighted) and its part of the batch (0.07 s, counted twice; of one of
    them later prompts take 5 % again), half of the time 2 s."""
    each = 50 / 500.0 * P.stall_weight + DECODE_S / 64 * (2 + P.assumed_arrivals_s * 50 / 500.0)
    least = DECODE_S * P.assumed_arrivals_s * 50 / 500.0
    boundary = int((DECODE_S * 0.5 - least) / each)
    busy = worker(Role.MERGED, 0, prefill_share=0.5)
    assert streamer(busy, worker(Role.MERGED, 1, streams=boundary)) == "merged-1"
    assert streamer(busy, worker(Role.MERGED, 1, streams=boundary + 1)) == "merged-0"


def test_a_batch_fuller_by_what_a_hand_over_saves_sends_the_stream_to_merged() -> None:
    """Computing on an idle merged worker freezes the assumed stream and later ones this one; a hand-over does not."""
    pair = worker(Role.PREFILL), worker(Role.DECODE)
    saved = own_cost(worker(Role.MERGED), ask(50), P).total - pair_cost(*pair, ask(50), rate, P).total
    boundary = int(saved / (2 * DECODE_S / 64))
    assert boundary == 5
    merged = worker(Role.MERGED)
    assert streamer(pair[0], worker(Role.DECODE, streams=boundary), merged) == "decode-0"
    assert streamer(pair[0], worker(Role.DECODE, streams=boundary + 1), merged) == "merged-0"


def test_a_stream_waits_for_what_each_other_adds_to_its_steps_and_they_for_it() -> None:
    steep, flat = {"stream_s": 0.08 * 0.035}, {"stream_s": 0.0}
    assert own_cost(worker(Role.DECODE, streams=3, **steep), ask(50), P).batch == pytest.approx(2 * 3 * 0.08 * DECODE_S)
    assert own_cost(worker(Role.DECODE, streams=3, **flat), ask(50), P).batch == 0.0
    terms = pair_cost(worker(Role.PREFILL), worker(Role.DECODE, streams=3, **steep), ask(50), rate, P)
    assert terms.batch == pytest.approx(2 * 3 * 0.08 * DECODE_S)


def test_later_prompts_take_their_share_of_steps_as_long_as_they_are_now() -> None:
    decode = worker(Role.DECODE, streams=3, stream_s=0.08 * 0.035, prefill_share=0.5)
    assert pair_cost(worker(Role.PREFILL), decode, ask(50), rate, P).interference == pytest.approx(
        0.5 * (1 + 3 * 0.08) * DECODE_S
    )


def test_a_fuller_batch_is_taken_as_long_as_its_steps_grow_less() -> None:
    """Four streams at 8 % each are as many as 8 at 4 %: one more and the other worker is cheaper."""
    prefill, steep = worker(Role.PREFILL), worker(Role.DECODE, 0, streams=4, stream_s=0.08 * 0.035)

    def other(streams: int) -> WorkerState:
        return worker(Role.DECODE, 1, streams=streams, stream_s=0.04 * 0.035)

    assert streamer(prefill, steep, other(7)) == "decode-1"
    assert streamer(prefill, steep, other(9)) == "decode-0"
