"""Workers that share a device: what each is told of the others, and what the policy makes of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.router.costs import Parameters, Role, WorkerState, own_cost, pair_cost, shared_seconds
from services.router.devices import ASSUMED_SHARE, WAKING, with_neighbours
from services.router.policy import Choice, Mode, candidates, choose
from tests.unit.router.test_policy import ask, rate, worker

P = Parameters()


def two_cores(queued: float = 0.0, merged_streams: int = 0, decode_streams: int = 0) -> Sequence[WorkerState]:
    """Prefill and merged on core 0, decode on core 1, as `baton up --cores 0,1` places them."""
    return with_neighbours(
        [
            worker(Role.PREFILL, device="host/cpu:0", queued_tokens=queued),
            worker(Role.DECODE, device="host/cpu:1", streams=decode_streams),
            worker(Role.MERGED, device="host/cpu:0", streams=merged_streams),
        ]
    )


def mode_of(workers: Sequence[WorkerState], tokens: int) -> Mode:
    choice = choose(candidates(workers, ask(tokens), rate, P), ask(tokens), P)
    assert isinstance(choice, Choice), choice
    return choice.winner.mode


def test_each_is_told_of_the_others_on_its_device_and_of_nobody_else() -> None:
    prefill, decode, merged = two_cores(queued=500.0, merged_streams=3, decode_streams=2)
    assert (prefill.beside_streams, prefill.beside_queue_s) == (3, 0.0)
    assert (merged.beside_streams, merged.beside_queue_s) == (0, 1.0)
    assert (decode.beside_streams, decode.beside_queue_s) == (0, 0.0)


def test_each_is_told_of_the_time_that_the_others_spend_on_prompts() -> None:
    told = with_neighbours(
        [
            worker(Role.PREFILL, device="d", prefill_share=0.7),
            worker(Role.MERGED, device="d", prefill_share=0.2),
            worker(Role.DECODE, device="d", prefill_share=0.4),
        ]
    )
    assert [state.prefill_share for state in told] == [0.7, 0.2, 0.4]
    assert [state.beside_share for state in told] == pytest.approx([0.6, 1.0, 0.9])


def test_a_prefill_worker_that_rests_is_expected_to_compute_again() -> None:
    prefill, merged = with_neighbours([worker(Role.PREFILL, device="d"), worker(Role.MERGED, device="d")])
    assert (prefill.beside_share, merged.beside_share) == (0.0, ASSUMED_SHARE)


def test_a_stream_and_the_prompts_beside_it_wait_for_each_other() -> None:
    decoding_s = ask().output_tokens * worker(Role.MERGED).step_s
    beside = worker(Role.MERGED, beside_share=0.5)
    assert own_cost(beside, ask(0), P).interference == pytest.approx(3 * 0.5 * decoding_s)
    decode = worker(Role.DECODE, beside_share=0.5)
    assert pair_cost(worker(Role.PREFILL), decode, ask(0), rate, P).interference == pytest.approx(3 * 0.5 * decoding_s)


def test_the_same_core_of_another_host_is_another_device() -> None:
    states = [worker(Role.PREFILL, device="a/cpu:0"), worker(Role.MERGED, device="b/cpu:0", streams=5)]
    assert with_neighbours(states) == states


def test_a_prompt_takes_twice_as_long_beside_prompts_and_not_longer() -> None:
    state = worker(Role.MERGED, beside_queue_s=1.0)
    assert shared_seconds(state, 0.2) == 0.2
    assert shared_seconds(state, 5.0) == 1.0
    assert shared_seconds(worker(Role.MERGED), 5.0) == 0.0


def test_a_prefill_slows_the_streams_beside_it() -> None:
    prefill, decode, _ = two_cores(merged_streams=4)
    assert pair_cost(prefill, decode, ask(500), rate, P).stall == pytest.approx(4.0)
    alone, decode, _ = two_cores()
    assert pair_cost(alone, decode, ask(500), rate, P).stall == 0.0


def test_merged_and_local_freeze_their_own_streams_and_slow_those_beside_them() -> None:
    state = worker(Role.MERGED, streams=1, beside_streams=3)
    assert own_cost(state, ask(500), P).stall == pytest.approx((1 + P.assumed_streams) * P.stall_weight + 3)
    assert own_cost(state, ask(500), P).batch == pytest.approx(
        4 * own_cost(worker(Role.MERGED, streams=1), ask(), P).batch
    )


def test_a_short_prompt_does_not_go_beside_a_busy_prefill() -> None:
    """Behind 2 s of queue it goes elsewhere: where fewest streams suffer, and a share of the core is a loss too."""
    assert mode_of(two_cores(), 24) is Mode.DISAGGREGATED
    assert mode_of(two_cores(queued=1000.0), 24) is Mode.LOCAL
    assert mode_of(two_cores(queued=1000.0, decode_streams=4), 24) is Mode.LOCAL
    assert mode_of(two_cores(queued=1000.0, decode_streams=60, merged_streams=1), 24) is Mode.MERGED
    busy = [replace(state, prefill_share=0.5) if state.role is Role.PREFILL else state for state in two_cores(1000.0)]
    assert mode_of(with_neighbours([*busy[:1], replace(busy[1], streams=4), busy[2]]), 24) is Mode.LOCAL


def test_a_long_prompt_waits_rather_than_share_the_core_it_waits_for() -> None:
    assert mode_of(two_cores(queued=500.0, decode_streams=3), 1000) is Mode.DISAGGREGATED


def test_the_first_stream_of_a_core_costs_those_on_other_cores_of_its_host() -> None:
    prefill, decode, merged = two_cores(decode_streams=3)
    step_s = 0.035 * (1 + 2 / 64)
    assert prefill.waking_s == merged.waking_s == pytest.approx(WAKING * 3 * step_s)
    assert decode.waking_s == 0.0, "it streams already"
    assert own_cost(merged, ask(), P).waking == pytest.approx(ask().output_tokens * WAKING * 3 * step_s)
    assert pair_cost(prefill, decode, ask(), rate, P).waking == 0.0
    resting = two_cores(merged_streams=2)[1]
    assert pair_cost(prefill, resting, ask(), rate, P).waking > 0.0


def test_a_core_that_streams_is_as_slow_for_others_with_one_stream_as_with_more() -> None:
    assert [state.waking_s for state in two_cores(decode_streams=3, merged_streams=1)] == [0.0, 0.0, 0.0]
    assert [state.waking_s for state in two_cores()] == [0.0, 0.0, 0.0]


def test_of_more_cores_each_adds_its_part() -> None:
    cores = [worker(Role.DECODE, n, device=f"host/cpu:{n}", streams=2 * (n == 0)) for n in range(5)]
    two = with_neighbours(cores[:2])[1].waking_s
    assert [state.waking_s for state in with_neighbours(cores)] == pytest.approx([0.0, *[two / 4] * 4])


@pytest.mark.parametrize(("streams", "woken"), [(11, False), (13, True), (40, True)])
def test_a_core_that_is_crowded_is_no_reason_to_let_another_rest(streams: int, woken: bool) -> None:
    """Steps of 20 ms, 4 more for each other stream: with 12, 64 ms, which is 1.6 times the 40 of 6."""
    cores = [
        worker(Role.DECODE, device="host/cpu:1", streams=streams, step_s=0.020, stream_s=0.004),
        worker(Role.MERGED, device="host/cpu:0", step_s=0.020, stream_s=0.004),
    ]
    assert (with_neighbours(cores)[1].waking_s == 0.0) is woken


def test_gpus_and_other_hosts_do_not_slow_each_other() -> None:
    for devices in (("h/cuda:0", "h/cuda:1"), ("a/cpu:0", "b/cpu:1"), ("h/cpu:0", "h/cuda:0")):
        states = [worker(Role.DECODE, n, device=device, streams=3 * n) for n, device in enumerate(devices)]
        assert with_neighbours(states) == states


def test_streams_gather_on_one_core_while_another_rests_and_spread_once_it_does_not() -> None:
    """An answer of 128 tokens; a stream on the resting core would slow all that are on the other by a quarter."""
    assert mode_of(two_cores(decode_streams=8), 24) is Mode.DISAGGREGATED
    assert mode_of([replace(state, waking_s=0.0) for state in two_cores(decode_streams=60)], 24) is Mode.MERGED
    assert mode_of(two_cores(decode_streams=60), 24) is Mode.DISAGGREGATED
    assert mode_of(two_cores(decode_streams=60, merged_streams=1), 24) is Mode.MERGED


@given(
    st.lists(
        st.builds(worker, st.sampled_from(Role), st.integers(0, 4), streams=st.integers(0, 9)), unique_by=lambda w: w.id
    )
)
def test_without_devices_nothing_changes(states: list[WorkerState]) -> None:
    assert all(told is state for told, state in zip(with_neighbours(states), states, strict=True))
