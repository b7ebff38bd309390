"""Which slot holds what: the bookkeeping of the tiers below the host, without any I/O.

A slot is unscanned, free, being written, or holds a block. A block that is dropped while somebody reads its slot is
condemned: in no index, and its slot is free only when the last reader has done, because a read that is late may still
be under way.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from services.kvstore.eviction import Arc, Watermarks
from services.kvstore.quotas import Quotas
from services.kvstore.tier import Facts


@dataclass(frozen=True)
class Room:
    """A slot to write one block into."""

    slot: int
    generation: int
    tenant: str


@dataclass
class SlotEntry:
    """One block in a slot. `used` is `time.monotonic()` of its last use."""

    key: bytes
    slot: int
    generation: int
    facts: Facts
    digest: int
    readers: int = 0
    condemned: bool = False
    used: float = field(default_factory=time.monotonic)


class SlotTable:
    """`total` slots, none of them known before `scanned`. Generations rise from `generation` on."""

    def __init__(
        self, total: int, slot_bytes: int, watermarks: Watermarks, quotas: Mapping[str, int], generation: int
    ) -> None:
        self.total = total
        self.index: dict[bytes, SlotEntry] = {}
        self._watermarks = watermarks
        self._quotas = Quotas(quotas)
        self._quotas.resize(slot_bytes)
        self._generation = generation
        self._unscanned = total
        self._free: list[int] = []
        self._writing: dict[int, Room] = {}
        self._condemned: list[SlotEntry] = []
        self._evictable = Arc(total)

    @property
    def used(self) -> int:
        """Slots that are not free, unscanned ones aside."""
        return self.total - self._unscanned - len(self._free)

    @property
    def unscanned(self) -> int:
        """Slots of which nothing is known yet."""
        return self._unscanned

    @property
    def busy(self) -> int:
        """Slots that somebody reads or writes now."""
        return len(self._writing) + len(self._condemned) + self.reading

    @property
    def reading(self) -> int:
        """Blocks that somebody reads now and that can be found."""
        return len(self.index) - len(self._evictable)

    def scanned(self, slot: int, entry: SlotEntry | None) -> bool:
        """The next slot's content is known: a whole block, or nothing. Whether it is a block that was not here."""
        self._unscanned -= 1
        other = self.index.get(entry.key) if entry else None
        if entry is None or (other is not None and (other.readers or other.generation >= entry.generation)):
            self._free.append(slot)
            return False
        if other is not None:
            self.drop(entry.key)
        self._quotas.take(entry.facts.tenant)
        self._add(entry)
        return other is None

    def reserve(self, tenant: str) -> tuple[Room | None, list[bytes], str]:
        """A slot to write to, what went for it, and why. None when readers, the quota or the scan leave no room."""
        gone: list[bytes] = []
        reason = "capacity"
        if surplus := self._quotas.surplus(tenant, 1):
            reason = "quota"
            gone += self._evict(surplus, (key for key in self._quotas.oldest(tenant) if key in self._evictable))
            if self._quotas.surplus(tenant, 1):
                return None, gone, reason
        if not self._unscanned:  # until then the free ones are a part of those there are
            surplus = self._watermarks.surplus(self.used + 1, self.total)
            gone += self._evict(surplus, iter(self._evictable.victim, None))
        if not self._free:
            return None, gone, reason
        self._generation += 1
        room = Room(self._free.pop(), self._generation, tenant)
        self._writing[room.slot] = room
        self._quotas.take(tenant)
        return room, gone, reason

    def seal(self, room: Room, key: bytes, facts: Facts, digest: int) -> None:
        """The block is written whole. A key that came in meanwhile keeps its place, this slot is free."""
        if key in self.index:
            self.cancel(room)
            return
        del self._writing[room.slot]
        self._add(SlotEntry(key, room.slot, room.generation, facts, digest))

    def cancel(self, room: Room) -> None:
        """Nothing whole is there, and nobody writes to it any more."""
        del self._writing[room.slot]
        self._release(room.slot, room.tenant)

    def read(self, key: bytes) -> SlotEntry | None:
        """The block, kept in place until `done`; None when it is not here, or its time is over."""
        entry = self.index.get(key)
        if entry is None or entry.facts.expired():
            return None
        self.hold(entry)
        return entry

    def hold(self, entry: SlotEntry) -> None:
        """One more who reads its slot."""
        if not entry.readers:
            self._evictable.hold(entry.key)
        entry.readers += 1
        entry.used = time.monotonic()

    def done(self, entry: SlotEntry) -> None:
        """One reader less."""
        entry.readers -= 1
        if entry.readers:
            return
        if entry.condemned:
            self._condemned.remove(entry)
            self._release(entry.slot, entry.facts.tenant)
        else:
            self._evictable.release([entry.key], used=True)
            self._quotas.use(entry.facts.tenant, entry.key)

    def drop(self, key: bytes) -> None:
        """Forget the block; its slot is free when nobody reads it."""
        entry = self.index.pop(key)
        self._evictable.forget(key)
        self._quotas.remove(entry.facts.tenant, key)
        if entry.readers:
            entry.condemned = True
            self._condemned.append(entry)
        else:
            self._release(entry.slot, entry.facts.tenant)

    def check(self) -> list[str]:
        """Findings, in words; empty when every slot is accounted for."""
        held = [*self.index.values(), *self._condemned]
        places = [*self._free, *self._writing, *(entry.slot for entry in held)]
        found = []
        if len(set(places)) != len(places) or len(places) + self._unscanned != self.total:
            found.append(f"{len(places)} places, {self._unscanned} unscanned, for {self.total} slots")
        idle = {key for key, entry in self.index.items() if not entry.readers}
        if len(idle) != len(self._evictable) or any(key not in self._evictable for key in idle):
            found.append(f"nobody reads {len(idle)} blocks, {len(self._evictable)} are evictable")
        tenants = [entry.facts.tenant for entry in held] + [room.tenant for room in self._writing.values()]
        return found + self._quotas.check(tenants)

    def _add(self, entry: SlotEntry) -> None:
        self.index[entry.key] = entry
        self._evictable.add(entry.key)
        self._quotas.add(entry.facts.tenant, entry.key)

    def _evict(self, count: int, victims: Iterable[bytes]) -> list[bytes]:
        gone: list[bytes] = []
        if count > 0:
            for key in victims:
                self._evictable.evict(key)
                self.drop(key)
                gone.append(key)
                if len(gone) >= count:
                    break
        return gone

    def _release(self, slot: int, tenant: str) -> None:
        self._quotas.give(tenant)
        self._free.append(slot)
