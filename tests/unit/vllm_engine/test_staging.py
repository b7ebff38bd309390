"""The staging pool: rooms are given back once, when nobody can touch them any more."""

from __future__ import annotations

import pytest

from baton.engine.vllm.staging import Staging
from baton.kv.arena import Arena
from baton.kv.layout import LayoutFingerprint
from baton.kv.pool import PoolFull

LAYOUT = LayoutFingerprint("m", layers=1, kv_heads=1, head_dim=4, block_size=32, dtype="float32")
SLOTS = 6


class Pool:
    """Six slots, and the changes that were told."""

    def __init__(self) -> None:
        self.arena = Arena.create(SLOTS * LAYOUT.block_bytes)
        self.stored: list[bytes] = []
        self.removed: list[bytes] = []
        self.staging = Staging(self.arena, LAYOUT, "me", 3, self._changed)

    def _changed(self, stored: list[bytes], removed: list[bytes]) -> None:
        self.stored += stored
        self.removed += removed

    def write(self, slot: int, byte: int) -> None:
        self.arena.view(slot * LAYOUT.block_bytes, LAYOUT.block_bytes)[:] = bytes([byte]) * LAYOUT.block_bytes


@pytest.fixture
def pool() -> Pool:
    return Pool()


def keys(*names: int) -> list[bytes]:
    return [bytes([name]) * 16 for name in names]


def test_sealed_blocks_are_found_again_up_to_what_is_allowed(pool: Pool) -> None:
    staging = pool.staging
    room = staging.take(keys(1, 2, 3), 3)
    assert room.ready == 0
    staging.seal(room, 2)
    assert pool.stored == keys(1, 2)
    staging.release(room)
    assert staging.findings() == []
    again = staging.take(keys(1, 2, 3), 1)
    assert (again.ready, again.slots[0]) == (1, room.slots[0])
    staging.release(again)
    assert staging.clear() == 2
    assert sorted(pool.removed) == keys(1, 2)


def test_a_room_waits_for_what_vllm_still_runs(pool: Pool) -> None:
    staging = pool.staging
    room = staging.take(keys(1, 2, 3, 4), 0)
    room.running.update((7, 8))
    staging.ended(room, 7)
    staging.release(room)
    assert staging.ending
    assert staging.findings() == ["1 released rooms wait for vLLM to end their requests"]
    with pytest.raises(PoolFull):
        staging.take(keys(5, 6, 7), 0)
    staging.ended(room, 8)
    assert not staging.ending
    staging.ended(room, 8)
    assert staging.findings() == []
    staging.release(staging.take(keys(5, 6, 7), 0))


def test_a_full_pool_takes_nothing(pool: Pool) -> None:
    first = pool.staging.take(keys(1, 2, 3), 0)
    pool.staging.seal(first, 3)
    with pytest.raises(PoolFull):
        pool.staging.take(keys(1, 2, 3, 4, 5, 6, 7), 3)
    pool.staging.release(first)
    assert pool.staging.findings() == []


def test_a_changed_block_is_no_hit(pool: Pool) -> None:
    room = pool.staging.take(keys(1, 2), 0)
    pool.write(room.slots[1], 5)
    pool.staging.seal(room, 2)
    pool.staging.release(room)
    pool.write(room.slots[1], 6)
    again = pool.staging.take(keys(1, 2), 2)
    assert (again.ready, pool.staging.corrupted) == (1, 1)
    assert pool.removed == keys(2)
    pool.staging.release(again)
    assert pool.staging.findings() == []


def test_late_slots_are_exchanged_and_the_room_ends_where_there_are_no_others(pool: Pool) -> None:
    staging = pool.staging
    room = staging.take(keys(1, 2, 3, 4), 0)
    late = room.slots[1]
    staging.swap(room, [1])
    assert late not in room.slots
    assert len(room.slots) == 4
    two = room.slots[0], room.slots[2]
    staging.swap(room, [0, 2])
    assert len(room.slots) == 2, "one other was left"
    staging.release(room)
    assert staging.pool.quarantined == 3
    staging.settle([late, *two])
    assert staging.pool.available == SLOTS
    assert staging.findings() == []


def test_every_late_slot_is_kept_apart_when_there_are_no_others(pool: Pool) -> None:
    """Reads may still write to each of them: none may go to another request."""
    staging = pool.staging
    room = staging.take(keys(*range(1, SLOTS + 1)), 0)
    late = room.slots[1:]
    staging.swap(room, range(1, SLOTS))
    assert len(room.slots) == 1
    staging.release(room)
    assert staging.pool.quarantined == len(late)
    other = staging.take(keys(99), 0)
    assert set(other.slots).isdisjoint(late)
    staging.release(other)
    staging.settle(late)
    assert staging.pool.available == SLOTS
    assert staging.findings() == []


def test_a_hold_keeps_blocks(pool: Pool) -> None:
    staging = pool.staging
    room = staging.take(keys(1, 2), 0)
    staging.seal(room, 2)
    staging.release(room)
    number, handles = staging.hold(keys(9, 2))
    assert [handle.key for handle in handles] == keys(2)
    assert staging.clear() == 1
    assert staging.findings() == [f"1 blocks are held for a reader (hold {number})"]
    staging.unhold(number)
    assert staging.findings() == []


def test_output_goes_to_a_spare_slot_and_from_there_to_the_cache(pool: Pool) -> None:
    staging = pool.staging
    room = staging.take(keys(1, 2), 0)
    room.running.add(7)
    staging.seal(room, 2)
    slot = staging.spare(room, 7)
    assert slot is not None
    assert slot not in room.slots
    assert staging.findings() == []
    pool.write(slot, 9)
    staging.seal_output(room, 7, keys(3)[0])
    assert pool.stored == keys(1, 2, 3)
    staging.release(room)
    staging.ended(room, 7)
    again = staging.take(keys(1, 2, 3, 4), 4)
    assert (again.ready, again.slots[2]) == (3, slot)
    staging.release(again)
    assert staging.findings() == []


def test_a_spare_slot_that_was_not_filled_comes_back_when_vllm_has_ended_the_job(pool: Pool) -> None:
    staging = pool.staging
    room = staging.take(keys(1, 2), 0)
    room.running.update((7, 8))
    spared = {staging.spare(room, 7), staging.spare(room, 8)}
    staging.release(room)
    assert staging.pool.available == SLOTS - 4
    staging.ended(room, 8)
    taken = staging.take(keys(4, 5, 6), 0)
    assert len(spared & set(taken.slots)) == 1, "of the job that has ended"
    staging.release(taken)
    staging.ended(room, 7)
    assert staging.pool.available == SLOTS
    assert staging.findings() == []


def test_prompts_go_before_output(pool: Pool) -> None:
    room = pool.staging.take(keys(1, 2, 3, 4, 5, 6), 0)
    room.running.add(7)
    assert pool.staging.spare(room, 7) is None
    assert pool.staging.findings() == []
    pool.staging.release(room)
    pool.staging.ended(room, 7)
    assert pool.staging.pool.available == SLOTS


def test_the_end_of_a_conversation_is_evicted_before_its_beginning(pool: Pool) -> None:
    staging = pool.staging
    room = staging.take(keys(1), 0)
    room.running.add(7)
    staging.seal(room, 1)
    for name in (2, 3, 4):
        staging.spare(room, 7)
        staging.seal_output(room, 7, keys(name)[0])
    staging.ended(room, 7)
    staging.release(room)
    other = staging.take(keys(*range(10, 14)), 0)
    assert pool.removed == keys(4, 3)
    staging.release(other)
    assert staging.findings() == []
