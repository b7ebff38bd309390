"""The host tier: a state machine against a model, with late reads, pins, eviction and clearing in any order."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from baton.errors import BatonError, Reason
from baton.kv.arena import Arena
from baton.kv.handle import checksum
from services.kvstore.eviction import Watermarks
from services.kvstore.host import HostTier
from services.kvstore.slots import Entry, Slot
from services.kvstore.tier import BlockShape, Facts

BLOCK = 256
SLOTS = 8
SHAPE = BlockShape("fp", BLOCK, 32)
KEYS = st.integers(0, 11).map(lambda n: n.to_bytes(16, "big"))


def make_tier(slots: int = SLOTS, high: float = 1.0, low: float = 0.75) -> tuple[HostTier, list[bytes]]:
    evicted: list[bytes] = []
    tier = HostTier(Arena.create(slots * BLOCK), "store", 7, Watermarks(high, low))
    tier.on_gone = lambda keys, reason: evicted.extend(keys)
    tier.fix(SHAPE)
    return tier, evicted


def payload(key: bytes) -> bytes:
    return (key * BLOCK)[:BLOCK]


def fill(tier: HostTier, slot: Slot, key: bytes) -> None:
    tier.view(slot)[:] = payload(key)
    tier.commit(slot, key, tier.sum(slot, key))


def verifies(tier: HostTier, entry: Entry) -> bool:
    handle = entry.handle
    return checksum(handle.key, handle.epoch, handle.generation, tier.view(entry.slot)) == handle.checksum


class HostMachine(RuleBasedStateMachine):
    """Every slot is in one place, pins keep bytes in place, generations rise."""

    filling = Bundle("filling")
    pins = Bundle("pins")
    late = Bundle("late")

    @initialize()
    def start(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.tier, self.evicted = make_tier()
        self.here: set[bytes] = set()
        self.filling_now: set[int] = set()
        self.cleared: set[int] = set()
        """Generations of slots that were being filled when everything was cleared."""
        self.pinned: list[Entry] = []
        self.waiting = 0
        self.generation = 0

    def teardown(self) -> None:
        if hasattr(self, "loop"):
            self.loop.close()

    def _see_evictions(self) -> None:
        assert not set(self.evicted) & {e.handle.key for e in self.pinned if not e.condemned}
        self.here -= set(self.evicted)
        self.evicted.clear()

    @rule(target=filling, count=st.integers(1, 4))
    def reserve(self, count: int) -> object:
        self.tier.fix(SHAPE)
        slots = self.tier.reserve(count)
        self._see_evictions()
        assert len(slots) <= count
        for slot in slots:
            assert slot.generation > self.generation
            self.generation = slot.generation
            self.tier.view(slot)[:] = b"\xee" * BLOCK
            self.filling_now.add(slot.generation)
        return multiple(*slots)

    @rule(slot=consumes(filling), key=KEYS)
    def commit(self, slot: Slot, key: bytes) -> None:
        fill(self.tier, slot, key)
        if slot.generation not in self.cleared:
            self.here.add(key)
        self.filling_now.remove(slot.generation)

    @rule(slot=consumes(filling))
    def cancel(self, slot: Slot) -> None:
        self.tier.cancel(slot)
        self.filling_now.remove(slot.generation)

    @rule(target=late, slot=consumes(filling))
    def read_is_late(self, slot: Slot) -> tuple[asyncio.Future[None], Slot]:
        settled: asyncio.Future[None] = self.loop.create_future()
        self.tier.quarantine(slot, settled)
        self.filling_now.remove(slot.generation)
        self.waiting += 1
        return settled, slot

    @rule(item=consumes(late))
    def late_read_ends(self, item: tuple[asyncio.Future[None], Slot]) -> None:
        settled, slot = item
        # the peer's bytes arrive at the last moment: nobody else may have the slot
        offset = slot.offset
        assert all(entry.slot.offset != offset for entry in self.pinned)
        self.tier._arena.view(offset, BLOCK)[:] = b"\xdd" * BLOCK
        settled.set_result(None)
        self.loop.run_until_complete(asyncio.sleep(0))
        self.waiting -= 1

    @rule(target=pins, keys=st.lists(KEYS, max_size=4, unique=True))
    def pin(self, keys: list[bytes]) -> list[Entry]:
        found = self.tier.pin(keys, "fp")
        depth = next((i for i, key in enumerate(keys) if key not in self.here), len(keys))
        assert [e.handle.key for e in found] == keys[:depth]
        self.pinned += found
        return found

    @rule(entries=consumes(pins))
    def unpin(self, entries: list[Entry]) -> None:
        for entry in entries:
            self.pinned.remove(entry)
        self.tier.unpin(entries)

    @rule()
    def clear(self) -> None:
        assert set(self.tier.clear()) == self.here
        self.here.clear()
        self.cleared |= self.filling_now

    @invariant()
    def sound(self) -> None:
        if not hasattr(self, "tier"):
            return
        assert self.tier.check_integrity() == []
        assert set(self.tier.keys()) == self.here
        assert self.tier.quarantined == self.waiting
        for entry in self.pinned:
            assert verifies(self.tier, entry)
            assert bytes(self.tier.view(entry.slot)) == payload(entry.handle.key)
        assert self.tier.stats().pinned == len({id(e) for e in self.pinned})


HostMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestHost = HostMachine.TestCase


def keys(count: int) -> list[bytes]:
    return [n.to_bytes(16, "big") for n in range(count)]


def load(tier: HostTier, names: list[bytes]) -> None:
    for key in names:
        (slot,) = tier.reserve(1)
        fill(tier, slot, key)


def test_eviction_goes_from_the_high_to_the_low_mark_oldest_first() -> None:
    tier, evicted = make_tier(slots=10, high=0.9, low=0.5)
    load(tier, keys(9))
    assert evicted == []
    load(tier, [b"n" * 16])
    assert evicted == keys(5)
    assert tier.stats().blocks == 5


def test_of_one_prompt_the_end_goes_first() -> None:
    tier, evicted = make_tier(slots=4, high=1.0, low=0.75)
    load(tier, keys(4))
    tier.unpin(tier.pin(keys(4), "fp"))
    load(tier, [b"n" * 16])
    assert evicted == [keys(4)[3], keys(4)[2]]


def test_pins_survive_any_pressure() -> None:
    tier, evicted = make_tier(slots=4)
    load(tier, keys(3))
    held = tier.pin(keys(3), "fp")
    assert len(tier.reserve(4)) == 1
    assert evicted == []
    tier.unpin(held)


def test_cleared_while_pinned_stays_readable_and_is_freed_by_the_last_pin() -> None:
    tier, _ = make_tier(slots=2)
    load(tier, keys(2))
    first, second = tier.pin(keys(2), "fp"), tier.pin(keys(1), "fp")
    assert set(tier.clear()) == set(keys(2))
    assert tier.pin(keys(2), "fp") == []
    assert tier.reserve(2) == []
    assert all(verifies(tier, entry) for entry in first)
    tier.unpin(first)
    assert tier.shape is not None
    tier.unpin(second)
    assert tier.shape is None
    assert tier.check_integrity() == []


def test_another_shape_is_refused_until_everything_is_gone() -> None:
    tier, _ = make_tier()
    other = BlockShape("other", 2 * BLOCK, 32)
    load(tier, keys(1))
    with pytest.raises(BatonError) as refused:
        tier.fix(other)
    assert refused.value.reason is Reason.KV_LAYOUT_MISMATCH
    assert tier.pin(keys(1), "other") == []
    tier.clear()
    tier.fix(other)
    assert tier.slots == SLOTS // 2


def test_a_block_larger_than_the_arena_is_refused() -> None:
    tier = HostTier(Arena.create(BLOCK), "store", 7, Watermarks(1, 1))
    with pytest.raises(BatonError) as refused:
        tier.fix(BlockShape("fp", BLOCK + 1, 32))
    assert refused.value.reason is Reason.NO_CAPACITY


def test_a_key_that_came_twice_takes_one_slot() -> None:
    tier, _ = make_tier()
    first, second = tier.reserve(2)
    fill(tier, first, keys(1)[0])
    fill(tier, second, keys(1)[0])
    assert tier.stats().used_bytes == BLOCK
    assert tier.check_integrity() == []


def test_the_check_finds_a_flipped_byte_and_a_lost_slot() -> None:
    tier, _ = make_tier()
    load(tier, keys(1))
    tier._arena.buffer[tier.pin(keys(1), "fp")[0].slot.offset] ^= 1
    assert any("checksum" in finding for finding in tier.check_integrity())
    tier._free.pop()
    assert any("places" in finding for finding in tier.check_integrity())


async def test_store_and_load_copy_whole_blocks() -> None:
    tier, _ = make_tier(slots=2)
    key, other = keys(2)
    assert await tier.store(key, memoryview(payload(key)), Facts())
    assert await tier.store(key, memoryview(payload(key)), Facts())
    assert not await tier.store(other, memoryview(b"short"), Facts())
    into = bytearray(BLOCK)
    assert await tier.load(key, memoryview(into))
    assert bytes(into) == payload(key)
    assert not await tier.load(other, memoryview(into))
    held = tier.pin([key], "fp")
    tier.reserve(1)
    assert not await tier.store(other, memoryview(payload(other)), Facts())
    tier.unpin(held)
