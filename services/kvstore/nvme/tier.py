"""The NVMe tier: blocks in the slots of one slab file. Whatever the disk does wrong is a miss and a count, no error.

Reading a slot checks its header and its payload's sum in the thread that read it; what does not match is dropped there
and then. Writing seals a slot only when all of it has been handed to the device. What was on the disk when the process
started is found again by `scan`, in the background: the index fills while the tier serves.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping

import structlog

from services.kvstore.aligned import ALIGN
from services.kvstore.breaker import Breaker
from services.kvstore.eviction import Watermarks
from services.kvstore.medium_io import MediumIo, MediumUnavailable
from services.kvstore.nvme.disk import Disk
from services.kvstore.nvme.scan import Scanned, read_headers
from services.kvstore.nvme.slab import (
    MAX_TENANT_BYTES,
    Header,
    NoSuperblockError,
    Superblock,
    read_superblock,
    slot_bytes,
    write_superblock,
)
from services.kvstore.nvme.slot_io import Place, erase_slot, read_slot, write_slot
from services.kvstore.table import SlotEntry, SlotTable
from services.kvstore.table_tier import TableTier
from services.kvstore.tier import BlockShape, Facts, TierStats, slots_for

THREADS = 4
SCAN_CHUNK = 64
"""Headers in one operation of the scan."""
ERASE_CHUNK = 64
"""Headers that one operation overwrites: each takes a write of its own, because payloads lie between them."""

_log = structlog.get_logger()


class NvmeTier(TableTier):
    """Call `open` before anything else."""

    name = "nvme"
    head = ALIGN

    def __init__(
        self,
        disk: Disk,
        watermarks: Watermarks,
        quotas: Mapping[str, int] | None = None,
        deadline_s: float = 1.0,
        breaker: Breaker | None = None,
        count: Callable[[str, str, int], None] = lambda operation, outcome, number: None,
    ) -> None:
        super().__init__(MediumIo(breaker or Breaker(), THREADS, deadline_s), watermarks, quotas, count)
        self._disk = disk
        self._superblock: Superblock | None = None
        self._opened: Superblock | None = None
        """What the slab said when it was opened: what is not scanned yet may hold blocks of its era."""
        self._saved: Superblock | None = None
        """What the disk says; None: nobody knows."""
        self._saving = asyncio.Lock()
        self._saves = 0
        """Writes of the superblock that have not returned; a late one may still land over a newer one."""
        self._writing: set[bytes] = set()

    @property
    def shape(self) -> BlockShape | None:
        return self._superblock.shape if self._superblock else None

    @property
    def occupied(self) -> bool:
        unknown = self._table.unscanned > 0 and self._superblock is self._opened
        return unknown or bool(self._table.index)

    async def open(self) -> None:
        """Read what the slab says of itself. What can never be served again, all of it or what lies behind the end of a
        slab that became smaller, is counted and said, and the slab is as an empty one."""
        try:
            self._saved = read_superblock(await self._io.run(ALIGN, self._read_first))
        except (MediumUnavailable, NoSuperblockError) as error:
            self._found(error.outcome, str(error), 1)
            return
        shape, (slots, before) = self._saved.shape, self._slots(self._saved.shape)
        if not slots:
            self._found("too_small", f"a block has {shape.block_bytes} bytes, the slab now {self._disk.size}", 1)
            return
        self._superblock = self._opened = self._saved
        self._table = self._new_table(slots, slot_bytes(shape))
        if before > slots:
            self._found("cut_off", f"the slab had {self._disk.was} bytes and has {self._disk.size}", before - slots)

    def _found(self, outcome: str, why: str, number: int) -> None:
        """What `open` found that is not served: the slab, or so many slots of it."""
        self._count("open", outcome, number)
        if outcome != "empty":
            _log.warning("what the slab held is not served", outcome=outcome, why=why, number=number)

    async def scan(self) -> Scanned:
        """Find what an earlier process left, header by header. Ends early when the shape changes meanwhile."""
        found, table = Scanned(), self._table
        while table.unscanned and table is self._table and (superblock := self._superblock):
            first = table.total - table.unscanned
            many = min(SCAN_CHUNK, table.unscanned)
            headers = await read_headers(self._io, self._disk, superblock, first, many, found)
            if table is not self._table:
                break
            readable = headers is not None
            if headers is None or superblock is not self._superblock:  # cleared meanwhile
                headers = [None] * many
            entries = [_entry(slot, header) for slot, header in enumerate(headers, first)]
            new = [e.key for slot, e in enumerate(entries, first) if table.scanned(slot, e, readable) and e is not None]
            found.blocks += len(new)
            if new:
                self.on_found(new)
        for outcome, number in found.counts().items():
            self._count("scan", outcome, number)
        return found

    def fix(self, shape: BlockShape) -> None:
        if shape == self.shape:
            return
        slots = slots_for(shape, slot_bytes(shape), max(0, self._disk.size - ALIGN), "disk tier")
        gone = self.keys()
        if self._table.unscanned or gone:
            left = {"blocks": len(gone), "unscanned": self._table.unscanned}
            _log.warning("blocks of another layout give way", layout=str(shape), before=str(self.shape), **left)
        self._superblock = Superblock(self._new_era(), shape)
        self._table = self._new_table(slots, slot_bytes(shape))
        for slot in range(slots):  # of another shape, so nothing in it counts
            self._table.scanned(slot, None)
        if gone:
            self.on_gone(gone, "layout")

    async def store(self, key: bytes, payload: memoryview, facts: Facts) -> bool:
        if self.holds(key):
            return True
        shape = self.shape
        fits = shape is not None and len(payload) == shape.block_bytes
        if not fits or key in self._writing or len(facts.tenant.encode()) > MAX_TENANT_BYTES:
            return False
        self._writing.add(key)
        try:
            outcome = await self._store(key, payload, facts)
        except MediumUnavailable as error:
            outcome = self._failed("store", error)
        finally:
            self._writing.discard(key)
        self._count("store", outcome, 1)
        return outcome == "ok"

    async def _store(self, key: bytes, payload: memoryview, facts: Facts) -> str:
        superblock, table = self._superblock, self._table
        assert superblock is not None, "there is a shape"
        room, gone, reason = table.reserve(facts.tenant)
        if gone:
            self.on_gone(gone, reason)
        if room is None:
            return "no_room" if reason == "capacity" else reason
        place = Place(superblock.shape, superblock.era, room.slot)
        try:
            await self._save_superblock()
        except BaseException:
            table.cancel(room)
            raise
        if superblock != self._superblock:
            table.cancel(room)
            return "cleared"

        def write(buffer: memoryview) -> int:
            return write_slot(self._disk, place, key, room.generation, facts, buffer)

        def valid() -> bool:
            return superblock == self._superblock  # else what it covers was cleared meanwhile

        return await self._write_slot(place.size, room, key, payload, facts, write, valid)

    async def _load(self, key: bytes, into: memoryview) -> str:
        superblock, table = self._superblock, self._table
        entry = table.read(key)
        if entry is None or superblock is None:
            return "missing"
        place = Place(superblock.shape, superblock.era, entry.slot)

        def read(buffer: memoryview) -> bool:
            return read_slot(self._disk, place, key, entry.generation, entry.digest, buffer)

        return await self._read_slot(place.size, entry, into, read)

    def drop(self, keys: Iterable[bytes]) -> list[bytes]:
        here = {key: self._table.index[key] for key in keys if key in self._table.index}
        for key, entry in here.items():
            self._table.drop(key, erase=not entry.facts.expired())  # else the scan drops it by itself
        return list(here)

    def clear(self, tenant: str = "") -> list[bytes]:
        gone = self._table.clear(tenant, erase=bool(tenant))
        if self._superblock is not None and not tenant:
            self._superblock = Superblock(self._new_era(), self._superblock.shape)
        return gone

    @property
    def dirty(self) -> bool:
        return (self.shape is not None and self._superblock != self._saved) or self._saves > 0 or self._table.unerased

    async def flush(self) -> None:
        try:
            await self._save_superblock()
            while (superblock := self._superblock) and (slots := self._table.take_unerased(ERASE_CHUNK)):
                await self._overwrite(self._table, [Place(superblock.shape, superblock.era, slot) for slot in slots])
        except MediumUnavailable as error:
            self._count("flush", self._failed("flush", error), 1)
            raise OSError(f"the disk tier: {error}") from error

    async def _overwrite(self, table: SlotTable, places: list[Place]) -> None:
        done = False

        def erase(buffer: memoryview) -> None:
            nonlocal done
            for place in places:
                erase_slot(self._disk, place, buffer)
            done = True

        slots = [place.slot for place in places]
        await self._io.run(ALIGN, erase, ended=lambda: table.erased(slots, done))

    def stats(self) -> TierStats:
        table, shape, speed = self._table, self.shape, self.speed
        used = table.used * slot_bytes(shape) if shape else 0
        size, blocks = self._disk.size, len(table.index)
        state = self._state()
        return TierStats(self.name, size, used, blocks, table.reading, speed.bytes_s, speed.latency_s, state)

    async def close(self) -> None:
        if self.dirty:
            _log.error("cleared blocks may come back with a restart", tier=self.name)
        self._io.close()
        if not self._io.late:
            self._disk.close()

    def _state(self) -> str:
        if (state := self._io.breaker.state(time.monotonic())) != "ok":
            return state
        table, buffered = self._table, "" if self._disk.direct else " (buffered: no O_DIRECT here)"
        return f"scanning, {1 - table.unscanned / table.total:.0%} done" if table.unscanned else f"ok{buffered}"

    def _slots(self, shape: BlockShape) -> tuple[int, int]:
        """How many there are, and how many there were in the slab as it was found."""
        now, before = (max(0, size - ALIGN) // slot_bytes(shape) for size in (self._disk.size, self._disk.was))
        return now, before

    def _new_table(self, slots: int, size: int) -> SlotTable:
        return SlotTable(slots, size, self._watermarks, self._quotas, time.time_ns())

    def _new_era(self) -> int:
        """Larger than every one that this slab may have seen."""
        return max(time.time_ns(), self._superblock.era + 1 if self._superblock else 0)

    def _read_first(self, buffer: memoryview) -> bytes:
        self._disk.read(0, buffer)
        return bytes(buffer)

    async def _save_superblock(self) -> None:
        """Have the disk say what this tier is now. Raises MediumUnavailable."""
        async with self._saving:
            if (superblock := self._superblock) is None or superblock == self._saved:
                return
            saved: Superblock | None = None

            def write(buffer: memoryview) -> None:
                write_superblock(superblock, buffer)
                self._disk.write(0, buffer)

            def in_time(buffer: memoryview, result: None) -> None:
                nonlocal saved
                saved = superblock

            def ended() -> None:
                self._saves -= 1
                self._saved = saved

            self._saves += 1
            await self._io.run(ALIGN, write, after=in_time, ended=ended)


def _entry(slot: int, header: Header | None) -> SlotEntry | None:
    """A block that a scan has found."""
    if header is None:
        return None
    return SlotEntry(header.key, slot, header.generation, header.facts, header.digest)
