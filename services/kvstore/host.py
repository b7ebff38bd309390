"""The host tier: one registered arena, cut into slots of one block size.

A slot is free, being filled, holds a sealed block, or is quarantined because a late read may still write to it. Every
filling takes a new generation, so a handle to an earlier block of the slot cannot verify. The shape is fixed by the
first offer and free again once everything was cleared.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from baton.errors import BatonError, Reason
from baton.kv.arena import Arena
from baton.kv.handle import Handle, Segment, checksum
from services.kvstore.eviction import Arc, Watermarks
from services.kvstore.host_check import findings
from services.kvstore.quotas import Quotas
from services.kvstore.slots import Entry, Slot
from services.kvstore.tier import BlockShape, Facts, Placed, Tier, TierStats, Verdict, slots_for


class HostTier(Tier):
    """The tier that readers READ from."""

    name = "host"

    def __init__(
        self, arena: Arena, owner: str, epoch: int, watermarks: Watermarks, quotas: Mapping[str, int] | None = None
    ) -> None:
        super().__init__()
        self.keep: Callable[[bytes], bool] = lambda key: False
        """Asked before a block is evicted: true when whoever answers has pinned it, to copy it elsewhere first."""
        self.shape_changed = asyncio.Event()
        """Set when `shape`, or that of the whole store, may have changed; whoever waits for it clears it."""
        self._arena = arena
        self._owner = owner
        self._epoch = epoch
        self._watermarks = watermarks
        self._quotas = Quotas(quotas or {})
        self._shape: BlockShape | None = None
        self._total = 0
        self._free: list[int] = []
        self._filling: dict[int, Slot] = {}
        self._entries: dict[bytes, Entry] = {}
        self._condemned: list[Entry] = []
        self._quarantined: dict[int, Slot] = {}
        self._evictable = Arc(0)
        self._generation = 0

    @property
    def shape(self) -> BlockShape | None:
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
        if self._shape != shape:
            self._unfix_when_empty()
        if self._shape is not None:
            if self._shape != shape:
                raise BatonError(Reason.KV_LAYOUT_MISMATCH, f"this store holds {self._shape}, offered is {shape}")
            return
        total = slots_for(shape, shape.block_bytes, self._arena.size, "arena")
        self._shape = shape
        self._total = total
        self._free = list(range(total - 1, -1, -1))
        self._evictable = Arc(total)
        self._quotas.resize(shape.block_bytes)
        self.shape_changed.set()

    def reserve(self, count: int, tenant: str = "") -> list[Slot]:
        """Up to `count` slots to fill, fewer when pins or the tenant's quota leave no more. Each ends in `commit`,
        `cancel` or `quarantine`."""
        if surplus := self._quotas.surplus(tenant, count):
            own = (key for key in self._quotas.oldest(tenant) if key in self._evictable)
            self._evict(surplus, own, "quota")
            count -= min(count, self._quotas.surplus(tenant, count))
        used = self._total - len(self._free)
        self._evict(self._watermarks.surplus(used + count, self._total), iter(self._evictable.victim, None), "capacity")
        taken = []
        for _ in range(min(count, len(self._free))):
            self._generation += 1
            number = self._free.pop()
            slot = self._filling[number] = Slot(number, number * self._block_bytes, self._generation, tenant)
            self._quotas.take(tenant)
            taken.append(slot)
        return taken

    def at_quota(self, tenant: str) -> bool:
        """Whether the tenant's quota leaves no room for one more block."""
        return self._quotas.surplus(tenant, 1) > 0

    def view(self, slot: Slot) -> memoryview:
        """The slot's bytes, writable."""
        return self._arena.view(slot.offset, self._block_bytes)

    def sum(self, slot: Slot, key: bytes) -> int:
        """The checksum under which `commit` seals what lies in `slot`. Any thread; nobody writes there any more."""
        return checksum(key, self._epoch, slot.generation, self.view(slot))

    def intact(self, entry: Entry) -> bool:
        """Whether a pinned block still matches its checksum. Any thread."""
        return self.sum(entry.slot, entry.handle.key) == entry.handle.checksum

    def commit(self, slot: Slot, key: bytes, digest: int, facts: Facts = Facts()) -> bool:  # noqa: B008
        """Seal: the block can be found from now on; whether it can. A key that came in meanwhile keeps its place, what
        was cleared meanwhile has none; this slot is free then.

        Of a prompt commit the end first: what came in last goes last.
        """
        if slot.cleared or key in self._entries:
            self.cancel(slot)
            return not slot.cleared
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
        self._entries[key] = Entry(slot, handle, facts)
        self._evictable.add(key)
        self._quotas.add(slot.tenant, key)
        return True

    def cancel(self, slot: Slot) -> None:
        """Nothing came into `slot`, and nothing can any more."""
        del self._filling[slot.number]
        self._release(slot)

    def quarantine(self, slot: Slot, settled: asyncio.Future[None]) -> None:
        """A late read may write to `slot` until `settled` is done: untouchable until then."""
        del self._filling[slot.number]
        self._quarantined[slot.number] = slot
        settled.add_done_callback(lambda _: self._settle(slot))

    def pin(self, keys: Sequence[bytes], fingerprint: str) -> list[Entry]:
        """The longest prefix of `keys` that is here, kept in place until `unpin`."""
        found: list[Entry] = []
        if self._shape is not None and self._shape.fingerprint == fingerprint:
            now = time.time()
            for key in keys:
                entry = self._entries.get(key)
                if entry is None or entry.facts.expired(now):
                    break
                self.hold(entry)
                found.append(entry)
        return found

    def hold(self, entry: Entry) -> None:
        """One more pin on a block."""
        if not entry.pins:
            self._evictable.hold(entry.handle.key)
        entry.pins += 1

    def entry(self, key: bytes) -> Entry | None:
        """The sealed block of that key."""
        return self._entries.get(key)

    def unpin(self, entries: Sequence[Entry], used: bool = True) -> None:
        """Let go of what `pin` returned, once. `used` when somebody wanted the bytes, not only a copy for a tier."""
        freed = []
        for entry in entries:
            entry.pins -= 1
            if entry.pins == 0 and entry.condemned:
                self._condemned.remove(entry)
                self._release(entry.slot)
            elif entry.pins == 0:
                freed.append(entry.handle.key)
            if used:
                entry.used = time.monotonic()
        self._evictable.release(freed, used)
        if used:
            for entry in reversed(entries):
                self._quotas.use(entry.slot.tenant, entry.handle.key)
        self._unfix_when_empty()

    def touch(self, keys: Sequence[bytes]) -> None:
        """Somebody offered what is here already: recently used."""
        self._evictable.use(keys)
        for key in reversed(keys):
            if entry := self._entries.get(key):
                entry.used = time.monotonic()
                self._quotas.use(entry.slot.tenant, key)

    def keys(self) -> list[bytes]:
        return list(self._entries)

    def holds(self, key: bytes) -> bool:
        return key in self._entries

    def placed(self, key: bytes) -> Placed | None:
        entry = self._entries.get(key)
        return Placed(entry.facts, entry.pins, time.monotonic() - entry.used) if entry else None

    async def store(self, key: bytes, payload: memoryview, facts: Facts) -> bool:
        if key in self._entries:
            return True
        if len(payload) != self._block_bytes or not (slots := self.reserve(1, facts.tenant)):
            return False
        self.view(slots[0])[:] = payload
        return self.commit(slots[0], key, self.sum(slots[0], key), facts)

    async def load(self, key: bytes, into: memoryview) -> bool:
        if await self.verify(key) is Verdict.BAD or key not in self._entries:
            return False
        into[:] = self.view(self._entries[key].slot)
        return True

    async def verify(self, key: bytes) -> Verdict:
        entry = self._entries.get(key)
        if entry is None:
            return Verdict.SOUND
        good = await asyncio.to_thread(self.intact, entry)
        if good or self._entries.get(key) is not entry:
            return Verdict.SOUND  # or it left meanwhile, and its slot may hold anything
        self._drop(key)
        self.on_gone([key], "corrupt")
        return Verdict.BAD

    def drop(self, keys: Iterable[bytes]) -> list[bytes]:
        gone = [key for key in keys if key in self._entries]
        for key in gone:
            self._drop(key)
        self._unfix_when_empty()
        return gone

    def clear(self, tenant: str = "") -> list[bytes]:
        for slot in self._filling.values():
            slot.cleared |= not tenant or slot.tenant == tenant
        return self.drop([key for key, entry in self._entries.items() if not tenant or entry.facts.tenant == tenant])

    def stats(self) -> TierStats:
        pinned = len(self._entries) - len(self._evictable) + len(self._condemned)
        used = (self._total - len(self._free)) * self._block_bytes
        speed = self.speed
        blocks = len(self._entries)
        return TierStats(self.name, self._arena.size, used, blocks, pinned, speed.bytes_s, speed.latency_s)

    def check_integrity(self) -> list[str]:
        in_use = [*self._filling.values(), *self._quarantined.values()]
        in_use += [e.slot for e in (*self._entries.values(), *self._condemned)]
        found = self._quotas.check([slot.tenant for slot in in_use])
        places = [*self._free, *(slot.number for slot in in_use)]
        return found + findings(places, self._total, self._entries, self._condemned, self._evictable, self.intact)

    @property
    def _block_bytes(self) -> int:
        return self._shape.block_bytes if self._shape is not None else 0

    def _evict(self, count: int, victims: Iterable[bytes], reason: str) -> None:
        gone: list[bytes] = []
        if count > 0:
            for key in victims:
                if not self.keep(key):
                    self._evictable.evict(key)
                    self._drop(key)
                    gone.append(key)
                if len(gone) >= count:
                    break
        if gone:
            self.on_gone(gone, reason)

    def _drop(self, key: bytes) -> None:
        entry = self._entries.pop(key)
        self._evictable.forget(key)
        self._quotas.remove(entry.slot.tenant, key)
        if entry.pins:
            entry.condemned = True
            self._condemned.append(entry)
        else:
            self._release(entry.slot)

    def _settle(self, slot: Slot) -> None:
        del self._quarantined[slot.number]
        self._release(slot)
        self._unfix_when_empty()

    def _release(self, slot: Slot) -> None:
        self._quotas.give(slot.tenant)
        self._free.append(slot.number)

    def _unfix_when_empty(self) -> None:
        """With every slot free the store may take another shape. Generations go on rising."""
        if self._shape is not None and len(self._free) == self._total:
            self._shape = None
            self._total = 0
            self._free = []
            self.shape_changed.set()
