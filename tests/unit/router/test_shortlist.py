"""The shortlist: its sides are those of costs.py, and the plan among the few is the plan among all."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.router.costs import Ask, Parameters, Role, WorkerState, decode_side, own_cost, prefill_side, queue_seconds
from services.router.devices import with_neighbours
from services.router.policy import Choice, candidates, choose
from services.router.shortlist import Fleet
from services.router.stored import StoredRun
from tests.unit.router.test_policy import ask, rate, worker

P = Parameters()

WORKERS = st.lists(
    st.builds(
        worker,
        st.sampled_from(Role),
        st.integers(0, 30),
        streams=st.integers(0, 90),
        queued_tokens=st.floats(0, 5000),
        as_of=st.sampled_from([0.0, 7.0, 9.5]),
        blocks_free=st.integers(0, 200),
        prefill_tok_s=st.floats(10, 1e5),
        step_s=st.floats(1e-4, 0.2),
        stream_s=st.floats(0, 0.02),
        device=st.sampled_from(["", "", "", "gpu", "h/cpu:0", "h/cpu:1", "h/cpu:2", "other/cpu:0"]),
        prefill_share=st.floats(0, 1),
        chunk_tokens=st.just(256),
        short_tokens=st.sampled_from([0, 64, 600]),
        queued_short=st.sampled_from([0.0, 30.0, 400.0]),
        unusable=st.sampled_from(["", "", "", "DRAINING: x"]),
    ),
    max_size=60,
    unique_by=lambda w: w.id,
)
SIDES = {
    Role.PREFILL: prefill_side,
    Role.DECODE: decode_side,
    Role.MERGED: lambda w, request: own_cost(w, request, P).total,
}


def fleet_of(workers: list[WorkerState]) -> Fleet:
    fleet = Fleet(P)
    for state in workers:
        fleet.put(state)
    return fleet


@settings(deadline=None)
@given(WORKERS, st.integers(1, 3000), st.dictionaries(st.sampled_from(["prefill-3", "merged-4"]), st.integers(0, 3000)))
def test_the_sides_are_those_of_the_formula(workers: list[WorkerState], tokens: int, hits: dict[str, int]) -> None:
    fleet, request = fleet_of(workers), ask(tokens, hits=hits, now=10.0)
    costs = fleet.costs(request)
    assert costs.keys() == {state.id for state in workers}
    for state in with_neighbours(workers):
        assert fleet.get(state.id) == state
        assert costs[state.id] == pytest.approx(SIDES[state.role](state, request), rel=1e-5, abs=1e-5)


@settings(deadline=None, max_examples=200)
@given(WORKERS, st.integers(1, 3000), st.sets(st.sampled_from(["prefill-3", "merged-4"])))
def test_the_few_hold_the_cheapest_hand_over_and_merged_worker(
    workers: list[WorkerState], tokens: int, exclude: set[str]
) -> None:
    request = ask(tokens, exclude=frozenset(exclude))
    few = candidates(fleet_of(workers).shortlist(request), request, rate, P)
    everything = candidates(with_neighbours(workers), request, rate, P, exhaustive=True)
    for mode in ("disaggregated", "merged"):
        best = min((c.total for c in everything if c.mode == mode and not c.excluded), default=None)
        found = min((c.total for c in few if c.mode == mode and not c.excluded), default=None)
        if best is None:
            assert found is None
        elif mode == "merged":
            assert found is not None
            assert found <= best + P.tie_s
        else:
            # The sides ignore that a decode worker's own queue passes while the prefill computes.
            assert found is not None
            overlap = max((queue_seconds(s, request) for s in workers if s.role is Role.DECODE), default=0.0)
            steps = max(s.step_s for s in workers)
            assert found <= best + 2 * P.tie_s + overlap + 2 * steps


def test_a_hit_brings_a_worker_in_whatever_its_place() -> None:
    workers = [worker(Role.PREFILL, n) for n in range(100)] + [worker(Role.DECODE)]
    fleet = fleet_of(workers)
    for number in range(100):
        request = ask(600, hits={f"prefill-{number}": 320})
        choice = choose(candidates(fleet.shortlist(request), request, rate, P), request, P)
        assert isinstance(choice, Choice)
        assert choice.winner.prefill is workers[number]


def test_what_a_store_holds_makes_an_idle_worker_worth_it() -> None:
    """The worker with the hit is busy: without the load it is the cheapest all the same, with it an idle one is."""
    workers = [worker(Role.PREFILL, n, queued_tokens=2000.0 if n else 400.0) for n in range(50)]
    workers += [worker(Role.PREFILL, n) for n in range(50, 100)]
    workers += [worker(Role.DECODE)]
    request = ask(1025, strict=True, hits={"prefill-0": 1024}, stored=[StoredRun("s", "fp", 32, {"host": 32})])
    fleet = fleet_of(workers)

    def chosen(load_s: float) -> WorkerState | None:
        def load_time(store: str, tier: str, reader: str, size: float) -> float:
            return load_s

        found = candidates(fleet.shortlist(request, load_time), request, rate, P, load_time=load_time)
        choice = choose(found, request, P)
        assert isinstance(choice, Choice)
        return choice.winner.prefill

    assert chosen(10.0) is workers[0]
    idle = chosen(0.1)
    assert idle is not None
    assert idle.queued_tokens == 0.0


def test_equal_workers_take_turns() -> None:
    fleet = fleet_of([worker(Role.PREFILL, n) for n in range(100)])
    seen = Counter(s.id for n in range(500) for s in fleet.shortlist(ask(100, uid=f"u{n}")))
    assert len(seen) == 100


def test_a_row_follows_its_worker() -> None:
    workers = [worker(Role.PREFILL, n, queued_tokens=1000.0 * n) for n in range(50)]
    fleet = fleet_of(workers)
    for number in range(40):
        fleet.remove(f"prefill-{number}")
    assert {s.id for s in fleet.shortlist(ask())} == {f"prefill-{n}" for n in range(40, 42)}
    fleet.put(replace(workers[49], queued_tokens=0.0))
    assert "prefill-49" in {s.id for s in fleet.shortlist(ask())}
    fleet.put(replace(workers[49], fingerprint="other"))
    assert len(fleet) == 10
    assert len(fleet.all()) == 10
    for number in range(40, 50):
        fleet.remove(f"prefill-{number}")
    assert len(fleet) == 0
    assert fleet.block_sizes() == set()


def test_when_nobody_may_be_taken_the_reason_is_still_told() -> None:
    workers = [worker(Role.MERGED, n, unusable="DRAINING: x") for n in range(50)]
    workers += [worker(Role.MERGED, 99, blocks_free=1)]
    found = candidates(fleet_of(workers).shortlist(ask()), ask(), rate, P)
    assert any(c.excluded.startswith("NO_CAPACITY") for c in found)


def test_when_no_prefill_has_room_that_is_the_reason() -> None:
    workers = [worker(Role.PREFILL, n, blocks_free=1 + n % 2) for n in range(50)] + [worker(Role.DECODE)]
    chosen = fleet_of(workers).shortlist(ask())
    assert [s.blocks_free for s in chosen if s.role is Role.PREFILL] == [2, 2], "those that lack least"
    found = candidates(chosen, ask(), rate, P)
    assert {c.excluded.partition(":")[0] for c in found if c.prefill} == {"NO_CAPACITY"}


def test_the_warmest_decode_worker_is_always_among_them() -> None:
    fleet = fleet_of([worker(Role.DECODE, n, streams=n % 7) for n in range(40)])
    request = Ask("u", 641, 16.0, hits={"decode-6": 640})
    assert "decode-6" in {s.id for s in fleet.shortlist(request)}


def test_neighbours_count_whether_they_are_listed_or_not() -> None:
    """All prefills but one share their core with a merged worker that streams; only the cheapest merged is listed."""
    prefills = [worker(Role.PREFILL, n, device=f"core:{n}") for n in range(20)]
    merged = [worker(Role.MERGED, n, device=f"core:{n}", streams=4) for n in range(20) if n != 7]
    fleet = fleet_of([*prefills, *merged, worker(Role.DECODE)])
    request = ask(500, strict=True)
    for number in range(10):
        chosen = fleet.shortlist(replace(request, uid=f"u{number}"))
        choice = choose(candidates(chosen, request, rate, P), request, P)
        assert isinstance(choice, Choice)
        assert choice.winner.prefill is not None
        assert choice.winner.prefill.id == "prefill-7"
    alternate = fleet.get("prefill-3")
    assert alternate.beside_streams == 4
    fleet.put(replace(merged[3], streams=0))
    assert fleet.get("prefill-3").beside_streams == 0, "told when the other changes"
    fleet.put(replace(prefills[3], device=""))
    fleet.remove("merged-4")
    assert fleet.get("prefill-4").beside_streams == 0
    for state in fleet.all():
        fleet.remove(state.id)
    assert not fleet._neighbours
    assert not fleet._neighbourhood_of


def test_a_core_that_begins_to_stream_is_told_to_those_of_its_host() -> None:
    decode, merged = worker(Role.DECODE, device="h/cpu:1"), worker(Role.MERGED, device="h/cpu:0")
    fleet = fleet_of([decode, merged])
    assert fleet.get(merged.id).waking_s == 0.0
    fleet.put(replace(decode, streams=2))
    assert fleet.get(merged.id).waking_s > 0.0
    fleet.put(replace(merged, streams=1))
    assert fleet.get(merged.id).waking_s == 0.0
    fleet.remove(decode.id)
    assert fleet._neighbours.keys() == {"h/cpu"}


def test_columns_stay_exact_however_long_a_router_runs() -> None:
    fleet = fleet_of([worker(Role.PREFILL, n) for n in range(20)])
    for now in (1e3, 1e5, 1e7):
        for number in range(20):
            fleet.put(worker(Role.PREFILL, number, queued_tokens=number, as_of=now))
        request = ask(500, now=now)
        costs = fleet.costs(request)
        for number in range(20):
            assert costs[f"prefill-{number}"] == pytest.approx(1.0 + number / 500, abs=2e-4)
