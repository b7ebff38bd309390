"""The device tier: spare GPU memory below the host, in blocks of one shape.

Readers READ host memory, so a block comes back through the host like those of a disk, at the speed of the bus. Copies
run in one thread, each waited for there, so the event loop never waits for the device. The sum is taken of the host's
bytes on the way in and checked on the way out. `torch_device` is a name that torch knows; "cpu" serves the tests.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from baton.kv.handle import checksum
from services.kvstore.eviction import Watermarks
from services.kvstore.table import SlotTable
from services.kvstore.table_tier import TableTier
from services.kvstore.tier import BlockShape, Facts, TierStats, Verdict, slots_for

T = TypeVar("T")


class DeviceTier(TableTier):
    """`capacity` bytes of a device's memory, taken at once. Raises RuntimeError (torch's) when they are not there."""

    name = "device"

    def __init__(
        self,
        torch_device: str,
        capacity: int,
        watermarks: Watermarks,
        quotas: Mapping[str, int] | None = None,
        count: Callable[[str, str, int], None] = lambda operation, outcome, number: None,
    ) -> None:
        super().__init__()
        self._arena = torch.empty(capacity, dtype=torch.uint8, device=torch_device)
        self._thread = ThreadPoolExecutor(1, "baton-device")
        self._watermarks = watermarks
        self._quotas = dict(quotas or {})
        self._count = count
        self._shape: BlockShape | None = None
        self._table = self._new_table(0, 1)

    @property
    def shape(self) -> BlockShape | None:
        return self._shape

    def fix(self, shape: BlockShape) -> None:
        if shape == self._shape:
            return
        slots = slots_for(shape, shape.block_bytes, self._arena.numel(), "device tier")
        gone = self.keys()
        self._shape = shape
        self._table = self._new_table(slots, shape.block_bytes)
        if gone:
            self.on_gone(gone, "layout")

    async def store(self, key: bytes, payload: memoryview, facts: Facts) -> bool:
        if self.holds(key):
            return True
        shape, table = self._shape, self._table
        if shape is None or len(payload) != shape.block_bytes:
            return False
        room, gone, reason = table.reserve(facts.tenant)
        if gone:
            self.on_gone(gone, reason)
        if room is None:
            self._count("store", "no_room", 1)
            return False
        copy = bytes(payload)
        work = self._submit(lambda: self._copy_in(room.slot, shape, room.generation, key, copy))
        try:
            digest = await asyncio.shield(work)
        except BaseException:
            work.add_done_callback(lambda _: table.cancel(room))  # not before the thread has done with the slot
            raise
        sealed = table.seal(room, key, facts, digest)
        self._count("store", "ok" if sealed else "cleared", 1)
        return sealed and self.holds(key)

    async def load(self, key: bytes, into: memoryview) -> bool:
        payload = await self._read(key)
        if payload is not None:
            into[:] = payload
        return payload is not None

    async def verify(self, key: bytes) -> Verdict:
        if not self.holds(key) or await self._read(key) is not None or self.holds(key):
            return Verdict.SOUND
        return Verdict.BAD

    def drop(self, keys: Iterable[bytes]) -> list[bytes]:
        gone = [key for key in keys if self.holds(key)]
        for key in gone:
            self._table.drop(key)
        return gone

    def clear(self, tenant: str = "") -> list[bytes]:
        return self._table.clear(tenant)

    def stats(self) -> TierStats:
        table, speed = self._table, self.speed
        used = table.used * (self._shape.block_bytes if self._shape else 0)
        size, blocks = self._arena.numel(), len(table.index)
        return TierStats(self.name, size, used, blocks, table.reading, speed.bytes_s, speed.latency_s)

    def check_integrity(self) -> list[str]:
        found = [f"device: {finding}" for finding in self._table.check()]
        if self._table.busy:
            found.append(f"device: {self._table.busy} slots are being read or written")
        return found

    async def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _read(self, key: bytes) -> bytes | None:
        shape, table = self._shape, self._table
        entry = table.read(key)
        if entry is None or shape is None:
            return None
        began = time.monotonic()
        work = self._submit(lambda: self._copy_out(entry.slot, shape))
        work.add_done_callback(lambda _: table.done(entry))
        payload = await asyncio.shield(work)
        if checksum(key, 0, entry.generation, payload) != entry.digest:
            self._count("load", "corrupt", 1)
            if table.index.get(key) is entry:
                table.drop(key)
                self.on_gone([key], "corrupt")
            return None
        self.speed.alone(len(payload), time.monotonic() - began)
        self._count("load", "ok", 1)
        return payload

    def _submit(self, work: Callable[[], T]) -> asyncio.Future[T]:
        return asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _copy_in(self, slot: int, shape: BlockShape, generation: int, key: bytes, payload: bytes) -> int:
        source = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        self._view(slot, shape).copy_(source)
        if self._arena.is_cuda:
            torch.cuda.current_stream(self._arena.device).synchronize()
        return checksum(key, 0, generation, payload)

    def _copy_out(self, slot: int, shape: BlockShape) -> bytes:
        return self._view(slot, shape).cpu().numpy().tobytes()

    def _view(self, slot: int, shape: BlockShape) -> torch.Tensor:
        return self._arena[slot * shape.block_bytes : (slot + 1) * shape.block_bytes]

    def _new_table(self, slots: int, size: int) -> SlotTable:
        table = SlotTable(slots, size, self._watermarks, self._quotas, 0)
        for slot in range(slots):
            table.scanned(slot, None)
        return table
