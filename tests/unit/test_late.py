"""When reads that nobody waits for any more cost the engine, and when they do not."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from baton.engine.late import QUARANTINE_CAP, LateReads
from baton.errors import BatonError
from baton.transfer.port import ReadReport

BLOCKS = 40
MANY = list(range(int(QUARANTINE_CAP * BLOCKS) + 1))


class Pool:
    """What became of it."""

    def __init__(self) -> None:
        self.back: list[int] = []
        self.given_up: list[BatonError] = []
        self.late = LateReads(self.settle, self.given_up.append, BLOCKS)

    def settle(self, slots: Sequence[int]) -> None:
        self.back += slots


async def test_a_client_that_leaves_in_the_middle_of_a_large_read_costs_nobody_the_engine() -> None:
    pool, read = Pool(), asyncio.get_running_loop().create_future()
    pool.late.abandon(asyncio.ensure_future(read), MANY)  # type: ignore[arg-type]
    assert (pool.given_up, pool.late.slots) == ([], set(MANY))
    read.set_result(ReadReport((), 0, 0.0))
    await asyncio.sleep(0.01)
    assert (pool.given_up, pool.back, pool.late.slots) == ([], MANY, set())


async def test_too_many_slots_of_reads_that_are_late_do() -> None:
    pool, read = Pool(), asyncio.get_running_loop().create_future()
    settled: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    pool.late.abandon(asyncio.ensure_future(read), MANY)  # type: ignore[arg-type]
    read.set_result(ReadReport((), 0, 0.0, MANY, settled))
    await asyncio.sleep(0.01)
    assert len(pool.given_up) == 1
    settled.set_result(None)
    await asyncio.sleep(0.01)
    assert (pool.back, pool.late.slots) == (MANY, set())
