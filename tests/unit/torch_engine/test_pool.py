"""The pool against a model of it: whatever the order of calls, every slot is in one place and nothing is forgotten."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from baton.kv.pool import BlockPool, PoolFull

SLOTS = 6
KEYS = [bytes([i]) * 16 for i in range(8)]


class PoolMachine(RuleBasedStateMachine):
    """Holders are lists of slots, as sequences are; `open_slots` are those that their one holder may still write."""

    @initialize()
    def start(self) -> None:
        self.pool = BlockPool(SLOTS)
        self.holders: list[list[int]] = []
        self.open_slots: set[int] = set()
        self.quarantined: set[int] = set()
        self.generations = [0] * SLOTS
        self.keys: set[bytes] = set()

    def holder(self, data: st.DataObject) -> list[int]:
        return data.draw(st.sampled_from([h for h in self.holders if h]))

    @rule(count=st.integers(0, SLOTS + 1))
    def take(self, count: int) -> None:
        """All or nothing, each slot in a new generation; only what nobody holds can be had."""
        held = {s for h in self.holders for s in h}
        possible = SLOTS - len(held) - len(self.quarantined)
        assert self.pool.available == possible
        if count > possible:
            with pytest.raises(PoolFull):
                self.pool.take(count)
            return
        taken = self.pool.take(count)
        assert len(set(taken)) == count
        assert not (set(taken) & (held | self.quarantined))
        for slot in taken:
            assert self.pool.slot(slot).generation > self.generations[slot]
            assert self.pool.slot(slot).tokens == 0
            assert self.pool.slot(slot).checksum == 0
            self.generations[slot] = self.pool.slot(slot).generation
        self.open_slots |= set(taken)
        self.holders.append(taken)

    @precondition(lambda self: any(self.holders))
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        """A choice shares sealed blocks."""
        shared = [s for s in self.holder(data) if s not in self.open_slots]
        self.pool.hold(shared)
        self.holders.append(shared)

    @rule(keys=st.lists(st.sampled_from(KEYS), max_size=4, unique=True))
    def hit(self, keys: list[bytes]) -> None:
        """A prefix that is found holds what its keys name."""
        found = self.pool.match(keys)
        assert [self.pool.slot(s).key for s in found] == keys[: len(found)]
        assert len(found) == len(keys) or keys[len(found)] not in self.pool.keys
        self.pool.hold(found)
        self.holders.append(found)

    @precondition(lambda self: self.open_slots)
    @rule(data=st.data(), key=st.sampled_from(KEYS), full=st.booleans())
    def seal(self, data: st.DataObject, key: bytes, full: bool) -> None:
        slot = data.draw(st.sampled_from(sorted(self.open_slots)))
        before = set(self.pool.keys)
        self.pool.seal(slot, key, 32 if full else 5, index_it=full)
        self.pool.set_checksum(slot, 99)
        self.open_slots.discard(slot)
        assert set(self.pool.keys) == (before | {key} if full else before)
        with pytest.raises(AssertionError):
            self.pool.seal(slot, key, 32, index_it=True)

    @precondition(lambda self: self.pool.keys)
    @rule(data=st.data())
    def distrust(self, data: st.DataObject) -> None:
        """Held or cached, it is not found again; who holds it keeps it."""
        key = data.draw(st.sampled_from(sorted(self.pool.keys)))
        (slot,) = self.pool.match([key])
        self.pool.distrust(slot)
        assert self.pool.match([key]) == []

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        holder = data.draw(st.sampled_from(self.holders))
        self.holders.remove(holder)
        self.pool.drop(reversed(holder))
        self.open_slots -= set(holder)

    @precondition(lambda self: self.open_slots)
    @rule(data=st.data())
    def quarantine(self, data: st.DataObject) -> None:
        """A late read: nobody gets the slot until it settles."""
        slot = data.draw(st.sampled_from(sorted(self.open_slots)))
        next(h for h in self.holders if slot in h).remove(slot)
        self.open_slots.discard(slot)
        self.quarantined.add(slot)
        self.pool.quarantine(slot)
        assert self.pool.quarantined == len(self.quarantined)

    @rule(slot=st.integers(0, SLOTS - 1))
    def settle(self, slot: int) -> None:
        """Twice, or for a slot that was never late, changes nothing more."""
        self.pool.settle(slot)
        self.quarantined.discard(slot)

    @rule()
    def clear(self) -> None:
        cached = self.pool.cached
        assert self.pool.clear() == cached
        assert self.pool.cached == 0

    @rule()
    def follow_changes(self) -> None:
        """Events alone rebuild the index."""
        stored, removed = self.pool.changes()
        assert not set(stored) & self.keys
        assert set(removed) <= self.keys
        self.keys |= set(stored)
        self.keys -= set(removed)
        assert self.keys == set(self.pool.keys)

    @invariant()
    def adds_up(self) -> None:
        if hasattr(self, "pool"):
            assert self.pool.check_integrity(Counter(s for h in self.holders for s in h)) == []

    def teardown(self) -> None:
        if not hasattr(self, "pool"):
            return
        for holder in self.holders:
            self.pool.drop(holder)
        for slot in self.quarantined:
            self.pool.settle(slot)
        assert self.pool.check_integrity(Counter()) == []
        assert self.pool.available == SLOTS


PoolMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestPool = PoolMachine.TestCase


def test_the_oldest_unheld_block_goes_first() -> None:
    pool = BlockPool(3)
    slots = pool.take(3)
    for slot, key in zip(slots, KEYS, strict=False):
        pool.seal(slot, key, 32, index_it=True)
    pool.drop(slots)
    pool.hold(pool.match([KEYS[0]]))
    pool.drop([slots[0]])  # used again: now the newest
    assert pool.take(1) == [slots[1]]
    assert set(pool.keys) == {KEYS[0], KEYS[2]}


def test_a_prefix_is_evicted_from_its_end() -> None:
    """Sequences drop their last block first, so what is left of a prefix can still be matched."""
    pool = BlockPool(4)
    slots = pool.take(4)
    for slot, key in zip(slots, KEYS, strict=False):
        pool.seal(slot, key, 32, index_it=True)
    pool.drop(reversed(slots))
    pool.take(1)
    assert pool.match(KEYS[:4]) == slots[:3]


@pytest.mark.parametrize("damage", ["leak", "double", "index"])
def test_the_leak_check_sees(damage: str) -> None:
    """A check that finds nothing proves nothing: it must see each kind of damage."""
    pool = BlockPool(3)
    slots = pool.take(2)
    pool.seal(slots[0], KEYS[0], 32, index_it=True)
    holders = Counter(slots)
    assert pool.check_integrity(holders) == []
    if damage == "leak":
        holders = Counter(slots[:1])
    elif damage == "double":
        pool._free.append(slots[1])
    else:
        pool.slot(slots[0]).key = KEYS[1]
    assert pool.check_integrity(holders) != []
