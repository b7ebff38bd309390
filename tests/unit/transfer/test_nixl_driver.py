"""Reads large enough for the driver's thread, here made so by small limits, and both paths at once."""

from __future__ import annotations

import asyncio
import time

import pytest

from baton.errors import Reason
from baton.kv.arena import Arena
from baton.transfer.nixl import transport as nixl
from baton.transfer.port import Transport
from tests.unit.transfer.harness import (
    BLOCK,
    BLOCKS,
    HANG_S,
    NEEDS_NIXL,
    NIXL,
    NIXL_OVER_TCP,
    Remote,
    Way,
    out_of_quarantine,
)

SLOTS = [block * BLOCK for block in range(BLOCKS)]

pytestmark = [
    *NEEDS_NIXL,
    pytest.mark.parametrize("way", [pytest.param(w, id=w.name) for w in (NIXL, NIXL_OVER_TCP)]),
]


def soon() -> float:
    return time.monotonic() + HANG_S


@pytest.fixture(autouse=True)
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """One block is read on the loop; anything more goes to the thread, two blocks a request."""
    monkeypatch.setattr(nixl, "HERE_BYTES", BLOCK)
    monkeypatch.setattr(nixl, "CHUNK_BYTES", 2 * BLOCK)


async def test_many_chunks(remote: Remote, reader: Transport, arena: Arena) -> None:
    await reader.pair(remote.peer, soon())
    await remote.tell("flip 7")
    for verify in (True, False):
        report = await reader.read(remote.handles(), SLOTS, soon(), verify=verify)
        bad = [i for i, block in enumerate(report.blocks) if block.reason is not None]
        assert bad == ([7] if verify else [])
        for block in range(BLOCKS):
            if block != 7:
                assert bytes(arena.view(SLOTS[block], BLOCK)) == remote.content(block)


async def test_large_and_small_reads_at_once(remote: Remote, reader: Transport, arena: Arena) -> None:
    await reader.pair(remote.peer, soon())

    async def read(first: int, count: int) -> None:
        for _ in range(20):
            handles = [remote.handle(b) for b in range(first, first + count)]
            report = await reader.read(handles, SLOTS[first : first + count], soon())
            assert report.verified_prefix() == count

    await asyncio.gather(read(0, 8), read(8, 1), read(9, 7), *(read(b, 1) for b in range(16, 24)))
    for block in range(BLOCKS):
        assert bytes(arena.view(SLOTS[block], BLOCK)) == remote.content(block)


async def test_cancelled_at_any_moment(remote: Remote, reader: Transport, arena: Arena) -> None:
    """What a cancelled read may still write to is in quarantine once the cancellation is seen; the rest is free."""
    await reader.pair(remote.peer, soon())
    for turn in range(40):
        task = asyncio.create_task(reader.read(remote.handles(), SLOTS, soon()))
        await asyncio.sleep(turn * 0.0002)
        task.cancel()
        await asyncio.wait({task})
        held = reader.quarantined()
        for slot in SLOTS:
            if slot not in held:
                arena.view(slot, BLOCK)[:] = b"\xa5" * BLOCK
        await out_of_quarantine(reader)
        for slot in SLOTS:
            if slot not in held:
                assert bytes(arena.view(slot, BLOCK)) == b"\xa5" * BLOCK
    assert (await reader.read(remote.handles(), SLOTS, soon())).verified_prefix() == BLOCKS


async def test_a_deadline_at_any_moment(remote: Remote, reader: Transport, arena: Arena) -> None:
    await reader.pair(remote.peer, soon())
    for turn in range(40):
        arena.buffer[:] = b"\xa5" * arena.size
        report = await reader.read(remote.handles(), SLOTS, time.monotonic() + turn * 0.0002)
        late = set(report.late)
        assert late == reader.quarantined()
        for block, read in enumerate(report.blocks):
            assert read.reason in (None, Reason.KV_TRANSFER_TIMEOUT)
            if read.reason is None:
                assert read.offset not in late
                assert bytes(arena.view(SLOTS[block], BLOCK)) == remote.content(block)
        if report.settled is not None:
            await asyncio.wait_for(report.settled, HANG_S)
        assert not reader.quarantined()


async def test_one_stopped_peer_does_not_hold_up_another(start_remote: object, reader: Transport, way: Way) -> None:
    stopped, alive = await asyncio.gather(start_remote("stopped"), start_remote("alive"))  # type: ignore[operator]
    await reader.pair(stopped.peer, soon())
    await reader.pair(alive.peer, soon())
    assert (await reader.read(stopped.handles(12), SLOTS[:12], soon())).verified_prefix() == 12  # in use, not just made
    stopped.stop()
    waiting = asyncio.create_task(reader.read(stopped.handles(12), SLOTS[:12], soon()))
    for _ in range(5):
        report = await reader.read(alive.handles(12), SLOTS[12:], soon())
        assert report.verified_prefix() == 12
    assert waiting.done() != way.needs_peer
    stopped.resume()
    assert (await waiting).verified_prefix() == 12
