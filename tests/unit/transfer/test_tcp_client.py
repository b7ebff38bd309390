"""The reader's connections: those that died while they were idle cost no read, or one at most."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest_asyncio

from baton.errors import Reason
from baton.kv.arena import Arena
from baton.kv.handle import Handle, Segment, checksum
from baton.transfer.port import Peer
from baton.transfer.tcp.transport import TcpTransport
from tests.faults.proxy import Proxy, proxy

SIZE = 1 << 16
BLOCK = 1 << 12
EPOCH = 42
HANG_S = 10.0


@dataclass
class Pair:
    """A reader that reaches its owner through a proxy."""

    reader: TcpTransport
    wire: Proxy
    handle: Handle

    async def read(self, *, timeout_s: float = HANG_S) -> Reason | None:
        """What became of one block."""
        report = await self.reader.read([self.handle], [0], time.monotonic() + timeout_s)
        return report.blocks[0].reason

    async def read_many(self) -> set[Reason | None]:
        """As many blocks at once as there may be connections, and more."""
        return set(await asyncio.gather(*(self._read_to(BLOCK * i) for i in range(8))))

    async def _read_to(self, offset: int) -> Reason | None:
        report = await self.reader.read([self.handle], [offset], time.monotonic() + HANG_S)
        return report.blocks[0].reason


@pytest_asyncio.fixture
async def pair() -> AsyncIterator[Pair]:
    owner, reader = TcpTransport(), TcpTransport()
    theirs = Arena.create(SIZE)
    theirs.buffer[:] = bytes(range(256)) * (SIZE // 256)
    await owner.start(theirs, "owner", EPOCH)
    await reader.start(Arena.create(SIZE), "reader", 7)
    async with proxy(owner.metadata().decode()) as wire:
        peer = Peer("owner", EPOCH, SIZE, {"tcp": wire.address.encode()})
        await reader.pair(peer, time.monotonic() + HANG_S)
        digest = checksum(b"k" * 16, EPOCH, 1, theirs.view(0, BLOCK))
        handle = Handle(b"k" * 16, "f", "owner", EPOCH, 1, 32, (Segment(0, 0, BLOCK),), digest)
        yield Pair(reader, wire, handle)
        await reader.close()
        await owner.close()


async def test_connections_that_were_cut_while_idle_are_replaced(pair: Pair) -> None:
    assert await pair.read_many() == {None}
    before = pair.wire.connections
    assert before > 1
    pair.wire.cut()
    await _noticed()
    assert await pair.read_many() == {None}
    assert pair.wire.connections > before


async def test_connections_that_swallow_everything_cost_one_read(pair: Pair) -> None:
    """The first read ends at its deadline; none of the others that were idle is tried after it."""
    assert await pair.read_many() == {None}
    pair.wire.mute()
    assert await pair.read(timeout_s=0.3) is Reason.KV_TRANSFER_TIMEOUT
    for _ in range(8):
        assert await pair.read() is None


async def _noticed() -> None:
    """The kernel has told of the cut."""
    await asyncio.sleep(0.1)
