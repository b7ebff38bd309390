"""The staging pool: sealed whole blocks in host memory that we own, between vLLM's KV cache and everybody else.

A *room* is what one reservation holds: a slot for each whole block of its prompt. Its first `ready` blocks are sealed
(prefix hits, verified loads, or saved from vLLM); the rest is open. vLLM's processes read and write a room's slots as
long as a request of it may still run there: the room is given back when the reservation is released *and* each of
those requests has ended on every rank.

Output has no place in a room. A running request gets a *spare* slot for the next block that it fills; when vLLM has
filled it, it is sealed and belongs to the cache, as a prompt's blocks do when their room is given back.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from baton.kv.arena import Arena
from baton.kv.handle import Handle, Segment, checksum
from baton.kv.holds import Holds
from baton.kv.layout import LayoutFingerprint
from baton.kv.pool import BlockPool, PoolFull

SPARE_SHARE = 0.125
"""With less of the pool to be had, no slot is spared for output: prompts go first."""


@dataclass(eq=False)
class Room:
    """`keys` name the prompt's whole blocks and `slots` are their places (fewer when late reads took some away)."""

    keys: list[bytes]
    slots: list[int]
    ready: int
    running: set[int] = field(default_factory=set)
    """Jobs that vLLM may still run."""
    spares: dict[int, int] = field(default_factory=dict)
    """By job: the slot that its next block of output goes to."""
    output: list[bytes] = field(default_factory=list)
    """Keys of the output blocks that its jobs have filled."""
    released: bool = False


class Staging:
    """Blocks, rooms and holds. All in one thread: the worker's event loop."""

    def __init__(
        self,
        arena: Arena,
        layout: LayoutFingerprint,
        owner: str,
        epoch: int,
        changed: Callable[[list[bytes], list[bytes]], None],
    ) -> None:
        self._block_bytes = layout.block_bytes
        self.pool = BlockPool(arena.size // self._block_bytes)
        self.holds = Holds(self.pool)
        self.corrupted = 0
        self._arena = arena
        self._fingerprint = layout.digest()
        self._block_size = layout.block_size
        self._owner = owner
        self._epoch = epoch
        self._changed = changed
        self._rooms: set[Room] = set()
        self._last_hold = 0
        self._given_back = asyncio.Event()

    def take(self, keys: list[bytes], hits_at_most: int) -> Room:
        """A room for these blocks; prefix hits among the first `hits_at_most`. Raises PoolFull and takes nothing."""
        hits = self._sound(self.pool.match(keys[:hits_at_most]))
        self.pool.hold(hits)
        try:
            fresh = self.pool.take(len(keys) - len(hits))
        except PoolFull:
            self.pool.drop(reversed(hits))
            raise
        room = Room(keys, hits + fresh, len(hits))
        self._rooms.add(room)
        self._tell()
        return room

    def _sound(self, hits: list[int]) -> list[int]:
        """The prefix of `hits` whose bytes are still those that were sealed; the first other one is forgotten."""
        for i, slot in enumerate(hits):
            if self._checksum(slot) != self.pool.slot(slot).checksum:
                self.pool.distrust(slot)
                self.corrupted += 1
                return hits[:i]
        return hits

    def _checksum(self, slot: int) -> int:
        record = self.pool.slot(slot)
        payload = self._arena.view(slot * self._block_bytes, self._block_bytes)
        return checksum(record.key, self._epoch, record.generation, payload)

    def seal(self, room: Room, blocks: int) -> None:
        """The first `blocks` blocks of the room have their KV in place."""
        for number in range(room.ready, min(blocks, len(room.slots))):
            slot = room.slots[number]
            self.pool.seal(slot, room.keys[number], self._block_size, index_it=True)
            self.pool.set_checksum(slot, self._checksum(slot))
            room.ready = number + 1
        self._tell()

    def spare(self, room: Room, job: int) -> int | None:
        """A slot for the next block of output of a job that runs and has none; None when the pool is short."""
        if self.pool.available <= SPARE_SHARE * len(self.pool):
            return None
        (room.spares[job],) = self.pool.take(1)
        self._tell()
        return room.spares[job]

    def seal_output(self, room: Room, job: int, key: bytes) -> None:
        """The job's spare slot holds the block that `key` names."""
        slot = room.spares.pop(job)
        self.pool.seal(slot, key, self._block_size, index_it=True)
        self.pool.set_checksum(slot, self._checksum(slot))
        self.pool.drop([slot])
        room.output.append(key)
        self._tell()

    def clear(self) -> int:
        """Drop what nobody holds; how many blocks."""
        dropped = self.pool.clear()
        self._tell()
        return dropped

    def _tell(self) -> None:
        stored, removed = self.pool.changes()
        if stored or removed:
            self._changed(stored, removed)

    def swap(self, room: Room, blocks: Sequence[int]) -> None:
        """Quarantine the slots of these open blocks, and take others; where there are none the room ends earlier."""
        late = sorted(number for number in blocks if number < len(room.slots))
        for number in late:  # all of them, before anything is given back: a late read may still write to each
            self.pool.quarantine(room.slots[number])
        for number in late:
            try:
                (room.slots[number],) = self.pool.take(1)
            except PoolFull:
                self.pool.drop(slot for i, slot in enumerate(room.slots) if i > number and i not in late)
                del room.slots[number:]
                return

    def settle(self, slots: Sequence[int]) -> None:
        """Late reads into these slots are over."""
        for slot in slots:
            self.pool.settle(slot)

    def release(self, room: Room) -> None:
        """The reservation is gone; the slots follow when vLLM has ended what runs."""
        room.released = True
        self._give_back(room)

    def ended(self, room: Room, job: int) -> None:
        """vLLM touches nothing for that job any more."""
        room.running.discard(job)
        if job in room.spares:
            self.pool.drop([room.spares.pop(job)])
        self._give_back(room)

    def _give_back(self, room: Room) -> None:
        if room.released and not room.running and room in self._rooms:
            self._rooms.discard(room)
            output = self.pool.find(room.output)
            self.pool.hold(output)  # so that the end of a conversation goes before its beginning does
            self.pool.drop(reversed([*room.slots, *output]))
            self._given_back.set()

    def hold(self, keys: Sequence[bytes]) -> tuple[int, list[Handle]]:
        """Keep the blocks of those of `keys` that are here, until `unhold` of the number."""
        self._last_hold += 1
        return self._last_hold, [self.handle(slot) for slot in self.holds.take(self._last_hold, keys)]

    def unhold(self, number: int) -> None:
        """Let go."""
        self.holds.drop(number)

    def handle(self, slot: int) -> Handle:
        """Where a sealed block lies."""
        record = self.pool.slot(slot)
        return Handle(
            key=record.key,
            fingerprint=self._fingerprint,
            owner=self._owner,
            epoch=self._epoch,
            generation=record.generation,
            tokens=record.tokens,
            segments=(Segment(0, slot * self._block_bytes, self._block_bytes),),
            checksum=record.checksum,
        )

    @property
    def ending(self) -> bool:
        """Whether a released room waits for vLLM."""
        return any(room.released for room in self._rooms)

    async def all_ended(self) -> None:
        """Wait until none does."""
        while self.ending:
            self._given_back.clear()
            await self._given_back.wait()

    @property
    def pinned(self) -> int:
        """Slots that somebody holds."""
        return len(self.pool) - self.pool.available - self.pool.quarantined

    def findings(self) -> list[str]:
        """The leak check, in words."""
        holders = Counter(slot for room in self._rooms for slot in room.slots)
        holders.update(slot for room in self._rooms for slot in room.spares.values())
        holders.update(self.holds.slots)
        waits = sum(room.released for room in self._rooms)
        found = self.pool.check_integrity(holders) + self.holds.findings()
        return found + ([f"{waits} released rooms wait for vLLM to end their requests"] if waits else [])
