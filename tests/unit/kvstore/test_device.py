"""The device tier on a device that fails or stands still: a miss and a count by its deadline, as with a disk. Torch's
CPU device stands in for a GPU."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncIterator

import pytest
import torch

from services.kvstore.breaker import Breaker
from services.kvstore.device import DeviceTier
from services.kvstore.eviction import Watermarks
from services.kvstore.tier import BlockShape, Facts, Verdict

BLOCK = 4096
HANG_S = 30.0
KEY, OTHER = b"k" * 16, b"o" * 16
PAYLOAD = bytes(range(256)) * (BLOCK // 256)


class Gpu(DeviceTier):
    """`fail` makes copies raise what torch raises; `go` holds them up."""

    def __init__(self) -> None:
        self.fail = False
        self.go = threading.Event()
        self.go.set()
        self.counts: Counter[tuple[str, str]] = Counter()
        super().__init__("cpu", 8 * BLOCK, Watermarks(1.0, 0.75), {}, 0.2, Breaker(3, 0.05), self._hear)
        self.fix(BlockShape("fp", BLOCK, 32))

    def _hear(self, operation: str, outcome: str, number: int) -> None:
        self.counts[operation, outcome] += number

    def _view(self, slot: int, shape: BlockShape) -> torch.Tensor:
        self.go.wait(HANG_S)
        if self.fail:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return super()._view(slot, shape)

    async def get(self, key: bytes) -> bytes | None:
        """The block; None is a miss."""
        into = bytearray(BLOCK)
        async with asyncio.timeout(HANG_S):
            return bytes(into) if await self.load(key, memoryview(into)) else None


@pytest.fixture
async def gpu() -> AsyncIterator[Gpu]:
    made = Gpu()
    assert await made.store(KEY, memoryview(PAYLOAD), Facts())
    yield made
    made.go.set()
    async with asyncio.timeout(HANG_S):
        while made.check_integrity():  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    await made.close()


async def until_read(gpu: Gpu) -> None:
    async with asyncio.timeout(HANG_S):
        while await gpu.get(KEY) != PAYLOAD:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def test_an_error_is_a_counted_miss_and_three_open_the_circuit(gpu: Gpu) -> None:
    gpu.fail = True
    assert not await gpu.store(OTHER, memoryview(PAYLOAD), Facts())
    assert [await gpu.get(KEY) for _ in range(3)] == [None] * 3
    assert (gpu.counts["store", "error"], gpu.counts["load", "error"], gpu.counts["load", "open"]) == (1, 2, 1)
    assert gpu.stats().state.startswith("open")
    assert await gpu.verify(KEY) is Verdict.UNREADABLE
    assert gpu.holds(KEY)
    gpu.fail = False
    await until_read(gpu)
    assert gpu.stats().state == "ok"


async def test_a_copy_that_hangs_is_a_miss_at_its_deadline(gpu: Gpu) -> None:
    gpu.go.clear()
    assert await gpu.get(KEY) is None
    assert not await gpu.store(OTHER, memoryview(PAYLOAD), Facts())
    assert (gpu.counts["load", "late"], gpu.counts["store", "late"]) == (1, 1)
    assert gpu.check_integrity(), "the slot is nobody else's until the copy has returned"
    gpu.go.set()
    await until_read(gpu)
    assert not gpu.holds(OTHER)
    gpu._table.index[KEY].digest ^= 1
    assert await gpu.verify(KEY) is Verdict.BAD
    assert not gpu.holds(KEY)
