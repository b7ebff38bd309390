"""The device tier: spare GPU memory below the host, in blocks of one shape.

Readers READ host memory, so a block comes back through the host like those of a disk, at the speed of the bus. Copies
run in one thread, with the deadline and the circuit of a disk's operations, so nobody waits for a device that hangs,
and one that fails is a miss and a count. The sum is taken of the host's bytes on the way in and checked on the way out.
`torch_device` is a name that torch knows; "cpu" serves the tests.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial

import torch

from baton.kv.handle import checksum
from services.kvstore.breaker import Breaker
from services.kvstore.eviction import Watermarks
from services.kvstore.medium_io import MediumIo, MediumUnavailable
from services.kvstore.table import SlotTable
from services.kvstore.table_tier import TableTier
from services.kvstore.tier import BlockShape, Facts, TierStats, slots_for


class DeviceTier(TableTier):
    """`capacity` bytes of a device's memory, taken at once. Raises RuntimeError (torch's) when they are not there."""

    name = "device"

    def __init__(
        self,
        torch_device: str,
        capacity: int,
        watermarks: Watermarks,
        quotas: Mapping[str, int] | None = None,
        deadline_s: float = 1.0,
        breaker: Breaker | None = None,
        count: Callable[[str, str, int], None] = lambda operation, outcome, number: None,
    ) -> None:
        super().__init__(MediumIo(breaker or Breaker(), 1, deadline_s), watermarks, quotas, count)
        self._arena = torch.empty(capacity, dtype=torch.uint8, device=torch_device)
        self._shape: BlockShape | None = None

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
        write = partial(self._copy_in, room.slot, shape, room.generation, key)
        try:
            outcome = await self._write_slot(shape.block_bytes, room, key, payload, facts, write)
        except MediumUnavailable as error:
            outcome = self._failed("store", error)
        self._count("store", outcome, 1)
        return outcome == "ok" and self.holds(key)

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
        state = self._io.breaker.state(time.monotonic())
        return TierStats(self.name, size, used, blocks, table.reading, speed.bytes_s, speed.latency_s, state)

    async def close(self) -> None:
        self._io.close()

    async def _load(self, key: bytes, into: memoryview) -> str:
        shape, table = self._shape, self._table
        entry = table.read(key)
        if entry is None or shape is None:
            return "missing"

        def read(buffer: memoryview) -> bool:
            return self._copy_out(entry.slot, shape, entry.generation, key, buffer) == entry.digest

        return await self._read_slot(shape.block_bytes, entry, into, read)

    def _copy_in(self, slot: int, shape: BlockShape, generation: int, key: bytes, payload: memoryview) -> int:
        with _errors():
            self._view(slot, shape).copy_(torch.frombuffer(payload, dtype=torch.uint8))
            if self._arena.is_cuda:
                torch.cuda.current_stream(self._arena.device).synchronize()
        return checksum(key, 0, generation, payload)

    def _copy_out(self, slot: int, shape: BlockShape, generation: int, key: bytes, into: memoryview) -> int:
        with _errors():
            torch.frombuffer(into, dtype=torch.uint8).copy_(self._view(slot, shape))
        return checksum(key, 0, generation, into)

    def _view(self, slot: int, shape: BlockShape) -> torch.Tensor:
        return self._arena[slot * shape.block_bytes : (slot + 1) * shape.block_bytes]

    def _new_table(self, slots: int, size: int) -> SlotTable:
        table = SlotTable(slots, size, self._watermarks, self._quotas, 0)
        for slot in range(slots):
            table.scanned(slot, None)
        return table


@contextlib.contextmanager
def _errors() -> Iterator[None]:
    """What torch says of a device that failed, as the error of any other medium."""
    try:
        yield
    except RuntimeError as error:
        raise OSError(f"the device: {error}") from error
