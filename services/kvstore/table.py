"""Which slot holds what: the bookkeeping of the tiers below the host, without any I/O.

A slot is unscanned, free, being written, or holds a block. A block that is dropped while somebody reads its slot is
condemned: in no index, and its slot is free only when the last reader has done, because a read that is late may still
be under way.

A free slot may still carry the block that lay there: nothing here finds it, but where slots outlive the process a
restart would. So the table remembers whose it is, and `clear` of a tenant with `erase` takes such slots too: nobody is
given them before `erased`.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from services.kvstore.eviction import Arc, Watermarks
from services.kvstore.quotas import Quotas
from services.kvstore.tier import Facts


@dataclass
class Room:
    """A slot to write one block into. What was cleared meanwhile is not sealed; `erase`: nor may a restart find it."""

    slot: int
    generation: int
    tenant: str
    cleared: bool = False
    erase: bool = False


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
    erase: bool = False
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
        self._carries: dict[int, str | None] = {}
        """Free slots that may still carry a block, and whose it is; None: nobody knows."""
        self._erase: list[int] = []
        self._erasing: set[int] = set()
        self._unwanted: set[str] = set()
        """Tenants that were cleared while slots were unscanned: what is found of theirs is from before."""
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
        return len(self._writing) + len(self._condemned) + len(self._erasing) + self.reading

    @property
    def reading(self) -> int:
        """Blocks that somebody reads now and that can be found."""
        return len(self.index) - len(self._evictable)

    @property
    def unerased(self) -> bool:
        """Whether a slot carries, or may yet carry, what was cleared with `erase`. Any thread: whoever scrapes asks."""
        if self._erase or self._erasing or self._unwanted:
            return True
        rooms, entries = tuple(self._writing.values()), tuple(self._condemned)
        return any(room.erase for room in rooms) or any(entry.erase for entry in entries)

    def scanned(self, slot: int, entry: SlotEntry | None, readable: bool = True) -> bool:
        """The next slot's content is known: a whole block, or nothing, or it is not `readable` and nobody knows.
        Whether it is a block that was not here."""
        self._unscanned -= 1
        tenant = entry.facts.tenant if entry else None
        unwanted = tenant in self._unwanted if readable else bool(self._unwanted)
        if not self._unscanned:
            self._unwanted.clear()
        other = self.index.get(entry.key) if entry else None
        if unwanted:
            self._erase.append(slot)
            return False
        if entry is None or (other is not None and (other.readers or other.generation >= entry.generation)):
            self._free.append(slot)
            if entry or not readable:
                self._carries[slot] = tenant
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
        self._carries.pop(room.slot, None)
        self._writing[room.slot] = room
        self._quotas.take(tenant)
        return room, gone, reason

    def seal(self, room: Room, key: bytes, facts: Facts, digest: int) -> bool:
        """The block is written whole; whether it is here now. A key that came in meanwhile keeps its place, what
        was cleared meanwhile has none."""
        if room.cleared or key in self.index:
            self.cancel(room)
            return not room.cleared
        del self._writing[room.slot]
        self._add(SlotEntry(key, room.slot, room.generation, facts, digest))
        return True

    def cancel(self, room: Room) -> None:
        """Nothing that counts is there, and nobody writes to it any more."""
        del self._writing[room.slot]
        self._release(room.slot, room.tenant, room.erase)

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
            self._release(entry.slot, entry.facts.tenant, entry.erase)
        else:
            self._evictable.release([entry.key], used=True)
            self._quotas.use(entry.facts.tenant, entry.key)

    def drop(self, key: bytes, erase: bool = False) -> None:
        """Forget the block; its slot is free when nobody reads it (and, with `erase`, when it is `erased`)."""
        entry = self.index.pop(key)
        entry.erase = erase
        self._evictable.forget(key)
        self._quotas.remove(entry.facts.tenant, key)
        if entry.readers:
            entry.condemned = True
            self._condemned.append(entry)
        else:
            self._release(entry.slot, entry.facts.tenant, erase)

    def clear(self, tenant: str = "", erase: bool = False) -> list[bytes]:
        """Forget every block, or one tenant's, and what is being written of them; the keys that were here. With
        `erase` (of a tenant) every slot that carries such a block goes to `take_unerased` before it is free; without,
        what lies in slots that hold no block does not count any more."""
        gone = [key for key, entry in self.index.items() if not tenant or entry.facts.tenant == tenant]
        for key in gone:
            self.drop(key, erase)
        for room in self._writing.values():
            if not tenant or room.tenant == tenant:
                room.cleared, room.erase = True, erase
        for entry in self._condemned:
            if not tenant or entry.facts.tenant == tenant:
                entry.erase = erase
        if not erase:
            self._free += self._erase
            self._erase.clear()
            self._carries.clear()
            self._unwanted.clear()
            return gone
        carry = {slot for slot, whose in self._carries.items() if whose in (tenant, None)}
        for slot in carry:
            del self._carries[slot]
        self._free = [slot for slot in self._free if slot not in carry]
        self._erase += sorted(carry)
        if self._unscanned:
            self._unwanted.add(tenant)
        return gone

    def take_unerased(self, count: int) -> list[int]:
        """Up to `count` slots whose blocks are to be overwritten, now; each one ends in `erased`."""
        slots, self._erase = self._erase[:count], self._erase[count:]
        self._erasing.update(slots)
        return slots

    def erased(self, slots: Iterable[int], done: bool) -> None:
        """Nobody writes to these any more; unless it is `done` they are to be taken again."""
        self._erasing.difference_update(slots)
        (self._free if done else self._erase).extend(slots)

    def check(self) -> list[str]:
        """Findings, in words; empty when every slot is accounted for."""
        held = [*self.index.values(), *self._condemned]
        places = [*self._free, *self._erase, *self._erasing, *self._writing, *(entry.slot for entry in held)]
        found = []
        if len(set(places)) != len(places) or len(places) + self._unscanned != self.total:
            found.append(f"{len(places)} places, {self._unscanned} unscanned, for {self.total} slots")
        idle = {key for key, entry in self.index.items() if not entry.readers}
        if len(idle) != len(self._evictable) or any(key not in self._evictable for key in idle):
            found.append(f"nobody reads {len(idle)} blocks, {len(self._evictable)} are evictable")
        if not self._carries.keys() <= set(self._free):
            found.append("a slot that is not free counts as left behind")
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

    def _release(self, slot: int, tenant: str, erase: bool) -> None:
        self._quotas.give(tenant)
        if erase:
            self._erase.append(slot)
        else:
            self._free.append(slot)
            self._carries[slot] = tenant
