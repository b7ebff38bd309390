"""The prefix index: a state machine against a model of plain sets, and its bounds."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from services.router.index import PrefixIndex
from services.router.places import LAST_ERA, in_common

WORKERS = st.sampled_from(["a", "b", "c"])
KEYS = st.lists(st.integers(0, 30).map(lambda n: bytes([n]) * 16), max_size=6)


class IndexMachine(RuleBasedStateMachine):
    """Streams that snapshot, change, lose an event, restart and leave."""

    @initialize()
    def start(self) -> None:
        self.index = PrefixIndex(max_keys=1000)
        self.truth: dict[str, set[bytes]] = {}
        self.place: dict[str, tuple[int, int]] = {}

    @rule(worker=WORKERS, epoch=st.integers(1, 3), seq=st.integers(0, 9), keys=KEYS)
    def snapshot(self, worker: str, epoch: int, seq: int, keys: list[bytes]) -> None:
        assert self.index.apply(worker, epoch, seq, stored=keys, removed=[], cleared=True)
        self.truth[worker], self.place[worker] = set(keys), (epoch, seq)

    @rule(worker=WORKERS, stored=KEYS, removed=KEYS)
    def change(self, worker: str, stored: list[bytes], removed: list[bytes]) -> None:
        if worker not in self.place:
            return
        epoch, seq = self.place[worker]
        assert self.index.apply(worker, epoch, seq + 1, stored=stored, removed=removed, cleared=False)
        self.truth[worker] = (self.truth[worker] - set(removed)) | set(stored)
        self.place[worker] = epoch, seq + 1

    @rule(worker=WORKERS, skip=st.integers(0, 5).filter(lambda n: n != 1), keys=KEYS)
    def gap(self, worker: str, skip: int, keys: list[bytes]) -> None:
        epoch, seq = self.place.get(worker, (1, 0))
        assert not self.index.apply(worker, epoch, seq + skip, stored=keys, removed=[], cleared=False)
        self._lost(worker)

    @rule(worker=WORKERS, keys=KEYS)
    def new_epoch_without_a_snapshot(self, worker: str, keys: list[bytes]) -> None:
        epoch, seq = self.place.get(worker, (1, 0))
        assert not self.index.apply(worker, epoch + 7, seq + 1, stored=keys, removed=[], cleared=False)
        self._lost(worker)

    @rule(worker=WORKERS)
    def leave(self, worker: str) -> None:
        self.index.forget(worker)
        self._lost(worker)

    @rule(keys=KEYS)
    def look_up(self, keys: list[bytes]) -> None:
        expected = {}
        for worker, held in self.truth.items():
            depth = next((i for i, key in enumerate(keys) if key not in held), len(keys))
            if depth:
                expected[worker] = depth
        assert self.index.prefix(b"".join(keys)) == expected

    def _lost(self, worker: str) -> None:
        self.truth.pop(worker, None)
        self.place.pop(worker, None)

    @invariant()
    def sound(self) -> None:
        if not hasattr(self, "index"):
            return
        assert self.index.check_integrity() == []
        assert len(self.index) == len(set().union(*self.truth.values()))
        for worker in ("a", "b", "c"):
            assert self.index.held_by(worker) == len(self.truth.get(worker, ()))
            assert self.index.exact(worker) == (worker in self.truth)


class TieredMachine(RuleBasedStateMachine):
    """A store whose blocks lie on several tiers, beside a worker that holds some of the same keys."""

    @initialize()
    def start(self) -> None:
        self.index = PrefixIndex(max_keys=1000)
        self.tiers: dict[str, set[bytes]] = {"host": set(), "nvme": set(), "tape": set()}
        self.worker: set[bytes] = set()
        self.seq = self.worker_seq = 0
        assert self.index.apply("store", 1, 0, stored=[], removed=[], cleared=True, tier="host")
        assert self.index.apply("worker", 1, 0, stored=[], removed=[], cleared=True)

    @rule(tier=st.sampled_from(["nvme", "host", "tape"]), stored=KEYS, removed=KEYS)
    def moves(self, tier: str, stored: list[bytes], removed: list[bytes]) -> None:
        self.seq += 1
        assert self.index.apply("store", 1, self.seq, stored=stored, removed=removed, cleared=False, tier=tier)
        self.tiers[tier] = (self.tiers[tier] - set(removed)) | set(stored)

    @rule(stored=KEYS, removed=KEYS)
    def computes(self, stored: list[bytes], removed: list[bytes]) -> None:
        self.worker_seq += 1
        assert self.index.apply("worker", 1, self.worker_seq, stored=stored, removed=removed, cleared=False)
        self.worker = (self.worker - set(removed)) | set(stored)

    @rule(tier=st.sampled_from(["nvme", "host"]), keys=KEYS)
    def snapshot(self, tier: str, keys: list[bytes]) -> None:
        self.seq += 5
        assert self.index.apply("store", 1, self.seq, stored=keys, removed=[], cleared=True, tier=tier)
        self.tiers = {name: set(keys) if name == tier else set() for name in self.tiers}

    @rule()
    def gap(self) -> None:
        assert not self.index.apply("store", 1, self.seq + 2, stored=[], removed=[], cleared=False, tier="host")
        assert not self.index.exact("store")
        self.snapshot("host", [])

    @rule()
    def leaves(self) -> None:
        self.index.forget("store")
        self.snapshot("host", [])

    @rule(keys=KEYS)
    def look_up(self, keys: list[bytes]) -> None:
        expected: dict[str, int] = {}
        for key in keys:
            best = next((tier for tier, held in self.tiers.items() if key in held), None)
            if best is None:
                break
            expected[best] = expected.get(best, 0) + 1
        found = self.index.look_up(b"".join(keys))
        assert found.stores.get("store", {}) == expected
        run = next((i for i, key in enumerate(keys) if key not in self.worker), len(keys))
        assert found.workers.get("worker", 0) == run
        assert list(found.stores.get("store", {})) == [tier for tier in self.tiers if tier in expected], "best first"

    @invariant()
    def sound(self) -> None:
        if hasattr(self, "index"):
            assert self.index.check_integrity() == []
            assert self.index.held_by("store") == len(set().union(*self.tiers.values()))


class BoundedMachine(RuleBasedStateMachine):
    """More keys are told than there may be: those go that nobody told or asked for the longest."""

    @initialize(ends=st.booleans())
    def start(self, ends: bool) -> None:
        self.index = PrefixIndex(max_keys=12)
        if ends:
            self.index._places._era = LAST_ERA - 2  # the numbers of eras end soon
        self.last: dict[bytes, int] = {}  # when each key was told first or asked for
        self.now = self.seq = self.dropped = 0
        assert self.index.apply("a", 1, 0, stored=[], removed=[], cleared=True)

    @rule(stored=KEYS, removed=KEYS)
    def change(self, stored: list[bytes], removed: list[bytes]) -> None:
        self.seq += 1
        assert self.index.apply("a", 1, self.seq, stored=stored, removed=removed, cleared=False)
        for key in removed:
            self.last.pop(key, None)
        new = [key for key in stored if key not in self.last]
        self.last |= dict.fromkeys(new, self.now)
        gone = [key for key in self.last if not self.index.holds("a", key)]
        if gone:
            went = max(self.last.pop(key) for key in gone)
            assert went <= min(self.last.values()), "an older one stayed"
        self.dropped += len(gone)
        self.now += bool(new)

    @rule(keys=KEYS)
    def look_up(self, keys: list[bytes]) -> None:
        depth = next((i for i, key in enumerate(keys) if key not in self.last), len(keys))
        assert self.index.prefix(b"".join(keys)) == ({"a": depth} if depth else {})
        self.last |= dict.fromkeys(keys[:depth], self.now)

    @invariant()
    def sound(self) -> None:
        if hasattr(self, "index"):
            assert self.index.check_integrity() == []
            assert len(self.index) == len(self.last) <= 12
            assert self.index.dropped == self.dropped


BoundedMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestBounded = BoundedMachine.TestCase


TieredMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestTiered = TieredMachine.TestCase


IndexMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestIndex = IndexMachine.TestCase


def keys(*numbers: int) -> list[bytes]:
    return [n.to_bytes(16, "big") for n in numbers]


def packed(*numbers: int) -> bytes:
    return b"".join(keys(*numbers))


def test_bounded_by_forgetting_the_oldest_for_every_holder() -> None:
    index = PrefixIndex(max_keys=3)
    index.apply("a", 1, 1, stored=keys(1), removed=[], cleared=True)
    index.apply("b", 1, 1, stored=keys(1, 2, 3), removed=[], cleared=True)
    index.apply("b", 1, 2, stored=keys(4), removed=[], cleared=False)
    assert len(index) == 3
    assert index.dropped == 1
    assert index.prefix(packed(1)) == {}
    assert index.prefix(packed(2)) == {"b": 1}
    assert index.apply("a", 1, 2, stored=[], removed=keys(1), cleared=False), "removal of a forgotten key is no gap"
    assert index.check_integrity() == []


@pytest.mark.parametrize("bound", [100, 5000])
def test_what_is_asked_for_outlives_many_times_the_bound(bound: int) -> None:
    """A system prompt that was told long ago, and half of a longer one that begins with it."""
    index = PrefixIndex(max_keys=bound)
    index.apply("a", 1, 0, stored=keys(*range(40)), removed=[], cleared=True)
    for number in range(10 * bound):
        index.apply("a", 1, number + 1, stored=keys(1000 + number), removed=[], cleared=False)
        if number % (bound // 3) == 0:
            assert index.prefix(packed(*range(20), 999)) == {"a": 20}
    assert index.prefix(packed(*range(40))) == {"a": 20}, "what nobody asked for went"
    assert index.dropped == 40 + 10 * bound - len(index)
    assert len(index) <= bound
    assert index.check_integrity() == []


def test_the_end_of_a_prompt_goes_before_its_beginning() -> None:
    index = PrefixIndex(max_keys=100)
    index.apply("a", 1, 0, stored=keys(*range(60)), removed=[], cleared=True)
    index.apply("a", 1, 1, stored=keys(*range(100, 140)), removed=[], cleared=False)
    index.apply("a", 1, 2, stored=keys(*range(200, 225)), removed=[], cleared=False)
    assert index.dropped == 25
    assert index.prefix(packed(*range(60))) == {"a": 35}, "no key is kept that no walk reaches"
    assert index.prefix(packed(*range(100, 140))) == {"a": 40}
    assert index.prefix(packed(*range(200, 225))) == {"a": 25}


def test_a_freed_bit_is_not_inherited() -> None:
    index = PrefixIndex(max_keys=10)
    index.apply("a", 1, 1, stored=keys(1), removed=[], cleared=True)
    index.forget("a")
    index.apply("b", 1, 1, stored=keys(2), removed=[], cleared=True)
    assert index.prefix(packed(1)) == {}
    assert index.prefix(packed(2)) == {"b": 1}


def test_the_check_finds_a_lost_direction() -> None:
    index = PrefixIndex(max_keys=10)
    index.apply("a", 1, 1, stored=keys(1), removed=[], cleared=True)
    index._places._held.clear()
    assert index.check_integrity() != []


def test_many_holders_are_told_apart_by_depth() -> None:
    index = PrefixIndex(max_keys=1000)
    for number in range(100):
        index.apply(f"w{number}", 1, 1, stored=keys(*range(1 + number)), removed=[], cleared=True)
    assert index.prefix(packed(*range(60))) == {f"w{n}": min(n + 1, 60) for n in range(100)}


def test_the_bound_is_kept_a_batch_at_a_time() -> None:
    index = PrefixIndex(max_keys=3000)
    for number in range(5000):
        index.apply("w", 1, number, stored=keys(number), removed=[], cleared=number == 0)
    assert 2990 < len(index) <= 3000
    assert index.dropped == 5000 - len(index)
    assert index.check_integrity() == []


def test_a_row_that_was_left_does_not_end_a_prefix() -> None:
    """The key in the middle goes and comes again, so it lies elsewhere; where it was, its bytes still are."""
    index = PrefixIndex(max_keys=100)
    index.apply("a", 1, 1, stored=keys(9, *range(1, 6)), removed=[], cleared=True)
    index.apply("a", 1, 2, stored=[], removed=keys(9, 3), cleared=False)
    assert index.prefix(packed(*range(1, 6))) == {"a": 2}
    index.apply("a", 1, 3, stored=keys(3), removed=[], cleared=False)
    assert index.prefix(packed(*range(1, 8))) == {"a": 5}
    assert index.check_integrity() == []


@given(*[st.integers(0, 9)] * 5)
def test_how_far_two_runs_go_together(this: int, that: int, common: int, ours: int, theirs: int) -> None:
    together = packed(*range(100, 101 + common))
    these = packed(*range(this)) + together + packed(*range(20, 20 + ours))
    those = packed(*range(that)) + together + packed(*range(40, 40 + theirs))
    assert in_common(these, this, bytearray(those), that) == 1 + common


def test_keys_of_another_length_are_refused() -> None:
    index = PrefixIndex(max_keys=100)
    with pytest.raises(ValueError, match="16 bytes"):
        index.apply("a", 1, 1, stored=[b"short"], removed=[], cleared=True)
    with pytest.raises(ValueError, match="16 bytes"):
        index.look_up(b"short")
    assert index.check_integrity() == []
