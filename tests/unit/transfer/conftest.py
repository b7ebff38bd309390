"""Remotes that end with their test, and a reader whose quarantine must be empty then."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
import pytest_asyncio

from baton.kv.arena import Arena
from baton.transfer.port import Transport
from tests.unit.transfer.harness import BLOCK, BLOCKS, Remote, Way, out_of_quarantine

Starter = Callable[..., Awaitable[Remote]]


@pytest_asyncio.fixture
async def start_remote(way: Way) -> AsyncIterator[Starter]:
    """Starts peers; all are dead after the test."""
    remotes: list[Remote] = []

    async def start(*args: object, **kwargs: object) -> Remote:
        remote = await Remote.start(way, *args, **kwargs)  # type: ignore[arg-type]
        remotes.append(remote)
        return remote

    yield start
    for remote in remotes:
        await remote.kill()


@pytest_asyncio.fixture
async def remote(start_remote: Starter) -> Remote:
    """One peer with an open lease."""
    return await start_remote()


@pytest.fixture
def arena() -> Arena:
    """The reader's memory: the peer's size, and filled with a byte that no block has throughout."""
    arena = Arena.create(BLOCKS * BLOCK)
    arena.buffer[:] = b"\xa5" * arena.size
    return arena


@pytest_asyncio.fixture
async def reader(
    way: Way, arena: Arena, start_remote: Starter, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Transport]:
    """The transport under test. Whatever a test did, in the end nothing may be left in quarantine."""
    transport = way.make(monkeypatch)
    await transport.start(arena, "decode-1", 1, slot_bytes=BLOCK)
    yield transport
    await out_of_quarantine(transport)
    await transport.close()
