"""Reservations: totals follow what is open; every way out gives back; a burst spreads."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from services.router.costs import Ask, Parameters, Role, WorkerState
from services.router.policy import Choice, candidates, choose
from services.router.reservations import Held, Reservations

UIDS = st.sampled_from(["u1", "u2", "u3"])
WORKERS = st.sampled_from(["p", "d", "m"])


class ReservationMachine(RuleBasedStateMachine):
    """Take, admit, end, forget and expire in any order."""

    @initialize()
    def start(self) -> None:
        self.held = Reservations(ttl_s=2.0)
        self.truth: dict[tuple[str, int], tuple[float, dict[str, int]]] = {}
        self.now = 0.0

    @rule(uid=UIDS, attempt=st.integers(0, 2), workers=st.sets(WORKERS, min_size=1), tokens=st.integers(0, 100))
    def take(self, uid: str, attempt: int, workers: set[str], tokens: int) -> None:
        parts = {w: Held(prefill_tokens=tokens, streams=1, blocks=2) for w in workers}
        self.held.take(uid, attempt, parts, self.now)
        self.truth[uid, attempt] = (self.now + 2.0, dict.fromkeys(workers, tokens))

    @rule(uid=UIDS, worker=WORKERS)
    def admitted(self, uid: str, worker: str) -> None:
        self.held.admitted(worker, uid)
        for (known, attempt), (_, parts) in list(self.truth.items()):
            if known == uid and parts.pop(worker, None) is not None and not parts:
                del self.truth[known, attempt]

    @rule(uid=UIDS, attempt=st.integers(0, 2))
    def end(self, uid: str, attempt: int) -> None:
        self.held.end(uid, attempt)
        self.truth.pop((uid, attempt), None)

    @rule(worker=WORKERS)
    def forget(self, worker: str) -> None:
        self.held.forget(worker)
        for key, (_, parts) in list(self.truth.items()):
            if parts.pop(worker, None) is not None and not parts:
                del self.truth[key]

    @rule(seconds=st.floats(0, 3))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.held.expire(self.now)
        self.truth = {key: value for key, value in self.truth.items() if value[0] > self.now}

    @invariant()
    def sound(self) -> None:
        if not hasattr(self, "held"):
            return
        assert self.held.check_integrity() == []
        assert len(self.held) == len(self.truth)
        for worker in ("p", "d", "m"):
            here = [parts[worker] for _, parts in self.truth.values() if worker in parts]
            on = self.held.on(worker)
            assert (on.streams, on.blocks) == (len(here), 2 * len(here))
            assert abs(on.prefill_tokens - sum(here)) < 1e-6


ReservationMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestReservations = ReservationMachine.TestCase


def test_expired_ones_are_counted() -> None:
    held = Reservations(ttl_s=2.0)
    held.take("u", 0, {"p": Held(10, 1, 1)}, 0.0)
    held.expire(1.9)
    assert len(held) == 1
    held.expire(2.0)
    assert len(held) == 0
    assert held.expired == 1
    assert held.on("p") == Held()


def test_the_check_finds_a_leaked_total() -> None:
    held = Reservations()
    held.take("u", 0, {"p": Held(10, 1, 1)}, 0.0)
    held._totals["p"].streams += 1
    assert held.check_integrity() != []


def test_a_burst_of_256_on_four_idle_prefills_spreads() -> None:
    """No load report arrives in between: only reservations tell the requests apart."""

    def idle(role: Role, number: int) -> WorkerState:
        return WorkerState(f"{role}-{number}", role, "fp", 32, 737_280, 2048, 256, 0, 0.0, 4000, 4000, 500.0, 0.035)

    prefills = [idle(Role.PREFILL, i) for i in range(4)]
    decodes = [idle(Role.DECODE, i) for i in range(2)]
    held = Reservations()
    taken: Counter[str] = Counter()
    for number in range(256):
        states = [
            replace(w, streams=held.on(w.id).streams, queued_tokens=held.on(w.id).prefill_tokens)
            for w in prefills + decodes
        ]
        ask = Ask(uid=f"u{number}", prompt_tokens=100, output_tokens=128.0, strict=True)
        choice = choose(candidates(states, ask, lambda p, d: 1e9, Parameters()), ask, Parameters())
        assert isinstance(choice, Choice)
        assert choice.winner.prefill is not None
        taken[choice.winner.prefill.id] += 1
        taken[choice.winner.worker.id] += 1
        parts = {choice.winner.prefill.id: Held(prefill_tokens=100, blocks=5)}
        parts[choice.winner.worker.id] = Held(streams=1, blocks=5)
        held.take(ask.uid, 0, parts, 0.0)
    assert all(60 <= taken[p.id] <= 68 for p in prefills), taken
    assert all(120 <= taken[d.id] <= 136 for d in decodes), taken
    assert held.check_integrity() == []
