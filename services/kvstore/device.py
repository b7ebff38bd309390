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

import structlog
import torch

from baton.kv.handle import checksum
from services.kvstore.eviction import Watermarks
from services.kvstore.nvme.breaker import Breaker
from services.kvstore.nvme.io import DiskIo, DiskUnavailable
from services.kvstore.table import SlotTable
from services.kvstore.table_tier import TableTier
from services.kvstore.tier import BlockShape, Facts, TierStats, Verdict, slots_for, verdict

_log = structlog.get_logger()


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
        super().__init__()
        self._arena = torch.empty(capacity, dtype=torch.uint8, device=torch_device)
        self._io = DiskIo(breaker or Breaker(), 1, deadline_s)
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
        sealed = False

        def copy(buffer: memoryview) -> None:
            buffer[:] = payload

        def seal(buffer: memoryview, digest: int) -> None:
            nonlocal sealed
            if not room.cleared:
                sealed = True
                table.seal(room, key, facts, digest)

        def free() -> None:
            if not sealed:
                table.cancel(room)

        def write(buffer: memoryview) -> int:
            return self._copy_in(room.slot, shape, room.generation, key, buffer)

        try:
            await self._io.run(shape.block_bytes, write, before=copy, after=seal, ended=free)
            outcome = "ok" if sealed else "cleared"
        except DiskUnavailable as error:
            outcome = error.outcome
        self._count("store", outcome, 1)
        return sealed and self.holds(key)

    async def load(self, key: bytes, into: memoryview) -> bool:
        return await self._load(key, into) == "ok"

    async def verify(self, key: bytes) -> Verdict:
        if (shape := self._shape) is None:
            return Verdict.SOUND
        return verdict(await self._load(key, memoryview(bytearray(shape.block_bytes))))

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

    def check_integrity(self) -> list[str]:
        found = [f"device: {finding}" for finding in self._table.check()]
        if self._io.late:
            found.append(f"device: {self._io.late} operations have not returned")
        if self._table.busy:
            found.append(f"device: {self._table.busy} slots are being read or written")
        return found

    async def close(self) -> None:
        self._io.close()

    async def _load(self, key: bytes, into: memoryview) -> str:
        shape, table = self._shape, self._table
        entry = table.read(key)
        if entry is None or shape is None:
            return "missing"

        def read(buffer: memoryview) -> float | None:
            began = time.monotonic()
            good = self._copy_out(entry.slot, shape, entry.generation, key, buffer) == entry.digest
            return time.monotonic() - began if good else None

        def copy(buffer: memoryview, seconds: float | None) -> None:
            if seconds is not None:
                into[:] = buffer

        try:
            seconds = await self._io.run(shape.block_bytes, read, after=copy, ended=lambda: table.done(entry))
            outcome = "corrupt" if seconds is None else "ok"
        except DiskUnavailable as error:
            seconds, outcome = None, error.outcome
        if outcome == "corrupt" and table.index.get(key) is entry:
            table.drop(key)
            self.on_gone([key], "corrupt")
        if seconds is not None:
            self.speed.alone(shape.block_bytes, seconds)
        self._count("load", outcome, 1)
        return outcome

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
        _log.warning("device tier", error=str(error))
        raise OSError(f"the device: {error}") from error
