"""The host tier: one registered arena, cut into slots of one block size.

A slot is free, being filled, holds a sealed block, or is quarantined because a late read may still write to it. Every
filling takes a new generation, so a handle to an earlier block of the slot cannot verify. The shape is fixed by the
first offer and free again once everything was cleared.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from baton.errors import BatonError, Reason
from baton.kv.arena import Arena
from baton.kv.handle import Handle, Segment, checksum
from services.kvstore.eviction import LeastRecentlyUsed, Watermarks
from services.kvstore.tier import BlockShape, Tier, TierStats

SUMS_CHECKED = 64
"""How many blocks' checksums `check_integrity` recomputes, drawn at random: all would stop the loop for too long."""


@dataclass(frozen=True)
class Slot:
    """Room for one block that is being filled: where, and under which generation."""

    number: int
    offset: int
    generation: int


@dataclass
class Entry:
    """One sealed block. `handle` names it to readers, `pins` counts who holds it; a condemned one is in no index."""

    slot: Slot
    handle: Handle
    pins: int = 0
    condemned: bool = False


class HostTier(Tier):
    """`on_evicted(keys)` is called with those that had to make room; set it before the first offer."""

    name = "host"

    def __init__(self, arena: Arena, owner: str, epoch: int, watermarks: Watermarks) -> None:
        self.on_evicted: Callable[[list[bytes]], None] = lambda keys: None
        self.shape_changed = asyncio.Event()
        """Set when `shape` changed; whoever waits for it clears it."""
        self._arena = arena
        self._owner = owner
        self._epoch = epoch
        self._watermarks = watermarks
        self._shape: BlockShape | None = None
        self._total = 0
        self._free: list[int] = []
        self._filling: dict[int, Slot] = {}
        self._entries: dict[bytes, Entry] = {}
        self._condemned: list[Entry] = []
        self._quarantined: set[int] = set()
        self._evictable = LeastRecentlyUsed()
        self._generation = 0

    @property
    def shape(self) -> BlockShape | None:
        """What blocks look like here; None until the first offer."""
        return self._shape

    @property
    def quarantined(self) -> int:
        """Slots that late reads may still write to."""
        return len(self._quarantined)

    @property
    def slots(self) -> int:
        """How many blocks fit."""
        return self._total

    def fix(self, shape: BlockShape) -> None:
        """Take blocks of `shape`. Raises BatonError: KV_LAYOUT_MISMATCH (others are here), NO_CAPACITY (none fits)."""
        if self._shape is not None:
            if self._shape != shape:
                raise BatonError(Reason.KV_LAYOUT_MISMATCH, f"this store holds {self._shape}, offered is {shape}")
            return
        total = self._arena.size // shape.block_bytes
        if total == 0:
            raise BatonError(
                Reason.NO_CAPACITY,
                f"a block of {shape.block_bytes} bytes is larger than the arena of {self._arena.size}",
            )
        self._shape = shape
        self._total = total
        self._free = list(range(total - 1, -1, -1))
        self.shape_changed.set()

    def reserve(self, count: int) -> list[Slot]:
        """Up to `count` slots to fill, fewer when pins leave no more. Each ends in `commit`, `cancel`, `quarantine`."""
        used = self._total - len(self._free)
        self._evict(self._watermarks.surplus(used + count, self._total))
        taken = []
        for _ in range(min(count, len(self._free))):
            self._generation += 1
            number = self._free.pop()
            slot = self._filling[number] = Slot(number, number * self._block_bytes, self._generation)
            taken.append(slot)
        return taken

    def view(self, slot: Slot) -> memoryview:
        """The slot's bytes, writable."""
        return self._arena.view(slot.offset, self._block_bytes)

    def sum(self, slot: Slot, key: bytes) -> int:
        """The checksum under which `commit` seals what lies in `slot`. Any thread; nobody writes there any more."""
        return checksum(key, self._epoch, slot.generation, self.view(slot))

    def commit(self, slot: Slot, key: bytes, digest: int) -> None:
        """Seal: the block can be found from now on. A key that came in meanwhile keeps its place, this slot is free."""
        if key in self._entries:
            self.cancel(slot)
            return
        del self._filling[slot.number]
        shape = self._shape
        assert shape is not None
        handle = Handle(
            key=key,
            fingerprint=shape.fingerprint,
            owner=self._owner,
            epoch=self._epoch,
            generation=slot.generation,
            tokens=shape.tokens,
            segments=(Segment(0, slot.offset, shape.block_bytes),),
            checksum=digest,
        )
        self._entries[key] = Entry(slot, handle)
        self._evictable.touch([key])

    def cancel(self, slot: Slot) -> None:
        """Nothing came into `slot`, and nothing can any more."""
        del self._filling[slot.number]
        self._free.append(slot.number)

    def quarantine(self, slot: Slot, settled: asyncio.Future[None]) -> None:
        """A late read may write to `slot` until `settled` is done: untouchable until then."""
        del self._filling[slot.number]
        self._quarantined.add(slot.number)
        settled.add_done_callback(lambda _: self._settle(slot.number))

    def pin(self, keys: Sequence[bytes], fingerprint: str) -> list[Entry]:
        """The longest prefix of `keys` that is here, kept in place until `unpin`."""
        found: list[Entry] = []
        if self._shape is not None and self._shape.fingerprint == fingerprint:
            for key in keys:
                entry = self._entries.get(key)
                if entry is None:
                    break
                entry.pins += 1
                self._evictable.remove(key)
                found.append(entry)
        return found

    def unpin(self, entries: Sequence[Entry]) -> None:
        """Let go of what `pin` returned, once."""
        freed = []
        for entry in entries:
            entry.pins -= 1
            if entry.pins == 0 and entry.condemned:
                self._condemned.remove(entry)
                self._free.append(entry.slot.number)
            elif entry.pins == 0:
                freed.append(entry.handle.key)
        self._evictable.touch(freed)
        self._unfix_when_empty()

    def touch(self, keys: Sequence[bytes]) -> None:
        """Somebody offered what is here already: recently used."""
        self._evictable.touch([key for key in keys if key in self._evictable])

    def keys(self) -> list[bytes]:
        """Every key that can be found."""
        return list(self._entries)

    def holds(self, key: bytes) -> bool:
        return key in self._entries

    async def store(self, key: bytes, payload: memoryview) -> bool:
        if key in self._entries:
            return True
        if len(payload) != self._block_bytes or not (slots := self.reserve(1)):
            return False
        self.view(slots[0])[:] = payload
        self.commit(slots[0], key, self.sum(slots[0], key))
        return True

    async def load(self, key: bytes, into: memoryview) -> bool:
        entry = self._entries.get(key)
        if entry is None:
            return False
        into[:] = self.view(entry.slot)
        return True

    def clear(self) -> list[bytes]:
        keys = list(self._entries)
        for key in keys:
            self._drop(key)
        self._unfix_when_empty()
        return keys

    def stats(self) -> TierStats:
        pinned = len(self._entries) - len(self._evictable) + len(self._condemned)
        used = self._total - len(self._free)
        return TierStats(self.name, self._arena.size, used * self._block_bytes, len(self._entries), pinned)

    def check_integrity(self) -> list[str]:
        findings = []
        slots = [
            *self._free,
            *self._filling,
            *self._quarantined,
            *(e.slot.number for e in (*self._entries.values(), *self._condemned)),
        ]
        if sorted(slots) != list(range(self._total)):
            findings.append(f"host: {len(slots)} places for {self._total} slots, {len(set(slots))} different ones")
        unpinned = {key for key, entry in self._entries.items() if entry.pins == 0}
        if len(unpinned) != len(self._evictable) or any(key not in self._evictable for key in unpinned):
            findings.append(f"host: {len(unpinned)} blocks are unpinned, {len(self._evictable)} are evictable")
        findings += [f"host: a key leads to block {k.hex()}" for k, e in self._entries.items() if e.handle.key != k]
        findings += [
            f"host: condemned block {e.handle.key.hex()} is held by nobody" for e in self._condemned if not e.pins
        ]
        findings += [
            f"host: block {key.hex()} does not match its checksum"
            for key, entry in random.sample(list(self._entries.items()), min(SUMS_CHECKED, len(self._entries)))
            if self.sum(entry.slot, key) != entry.handle.checksum
        ]
        return findings

    @property
    def _block_bytes(self) -> int:
        return self._shape.block_bytes if self._shape is not None else 0

    def _evict(self, count: int) -> None:
        gone: list[bytes] = []
        while len(gone) < count and (key := self._evictable.victim()) is not None:
            self._drop(key)
            gone.append(key)
        if gone:
            self.on_evicted(gone)

    def _drop(self, key: bytes) -> None:
        entry = self._entries.pop(key)
        self._evictable.remove(key)
        if entry.pins:
            entry.condemned = True
            self._condemned.append(entry)
        else:
            self._free.append(entry.slot.number)

    def _settle(self, number: int) -> None:
        self._quarantined.remove(number)
        self._free.append(number)
        self._unfix_when_empty()

    def _unfix_when_empty(self) -> None:
        """With every slot free the store may take another shape. Generations go on rising."""
        if self._shape is not None and len(self._free) == self._total:
            self._shape = None
            self._total = 0
            self._free = []
            self.shape_changed.set()
