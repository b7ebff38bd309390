"""What the owner's side of the scatter-read protocol does with peers that do not keep to it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from baton.kv.arena import Arena
from baton.transfer.tcp import server as serving
from baton.transfer.tcp.transport import TcpTransport
from baton.transfer.tcp.wire import (
    BAD_VERSION,
    COUNT,
    HELLO,
    MAGIC,
    MAX_RANGES,
    OK,
    OUT_OF_RANGE,
    RANGE,
    STALE,
    VERSION,
    WELCOME,
    ask,
    hello,
)

SIZE = 1 << 16
EPOCH = 42
HANG_S = 10.0

Wire = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@pytest_asyncio.fixture
async def owner(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[TcpTransport]:
    monkeypatch.setattr(serving, "STALL_S", 0.3)
    monkeypatch.setattr(serving, "MAX_CONNECTIONS", 8)
    arena = Arena.create(SIZE)
    arena.buffer[:] = bytes(range(256)) * (SIZE // 256)
    transport = TcpTransport()
    await transport.start(arena, "owner", EPOCH)
    yield transport
    await transport.close()


async def wire(owner: TcpTransport, greeting: bytes) -> Wire:
    host, port = owner.metadata().decode().split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(greeting)
    return reader, writer


async def welcomed(owner: TcpTransport) -> Wire:
    reader, writer = await wire(owner, hello("owner", EPOCH))
    answer = WELCOME.unpack(await reader.readexactly(WELCOME.size))
    assert answer == (MAGIC, OK, EPOCH, SIZE)
    return reader, writer


async def hangs_up(reader: asyncio.StreamReader) -> bool:
    """Whether the connection ends without another byte; a reset is an end, too (it had not read all we sent)."""
    with contextlib.suppress(ConnectionResetError):
        return await asyncio.wait_for(reader.read(), HANG_S) == b""
    return True


@pytest.mark.parametrize(
    ("greeting", "status"),
    [
        (hello("owner", EPOCH + 1), STALE),
        (hello("somebody", EPOCH), STALE),
        (HELLO.pack(MAGIC, VERSION + 1, EPOCH, 5) + b"owner", BAD_VERSION),
    ],
)
async def test_the_wrong_greeting_is_answered_and_hung_up_on(owner: TcpTransport, greeting: bytes, status: int) -> None:
    reader, writer = await wire(owner, greeting)
    assert WELCOME.unpack(await reader.readexactly(WELCOME.size))[1] == status
    assert await hangs_up(reader)
    writer.close()


@pytest.mark.parametrize("greeting", [b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", HELLO.pack(MAGIC, VERSION, EPOCH, 60000)])
async def test_nonsense_is_hung_up_on(owner: TcpTransport, greeting: bytes) -> None:
    reader, writer = await wire(owner, greeting)
    assert await hangs_up(reader)
    writer.close()


async def test_half_a_greeting_is_hung_up_on(owner: TcpTransport) -> None:
    reader, writer = await wire(owner, hello("owner", EPOCH)[:7])
    assert await hangs_up(reader)
    writer.close()


async def test_ranges_are_checked_by_the_owner(owner: TcpTransport) -> None:
    reader, writer = await welcomed(owner)
    writer.write(ask([(0, 16), (SIZE - 8, 16), ((1 << 64) - 8, 16), (8, (1 << 64) - 1), (SIZE - 16, 16)]))
    status = await reader.readexactly(5)
    assert list(status) == [OK, OUT_OF_RANGE, OUT_OF_RANGE, OUT_OF_RANGE, OK]
    assert await reader.readexactly(32) == bytes(range(16)) + bytes(range(240, 256))
    writer.write(ask([(1, 2)]))
    assert await reader.readexactly(3) == b"\0\x01\x02"  # and the connection lives on
    writer.close()


@pytest.mark.parametrize("count", [0, MAX_RANGES + 1, (1 << 32) - 1])
async def test_too_many_ranges_are_hung_up_on(owner: TcpTransport, count: int) -> None:
    reader, writer = await welcomed(owner)
    writer.write(COUNT.pack(count))
    assert await hangs_up(reader)
    writer.close()


async def test_half_an_ask_is_hung_up_on_but_silence_is_not(owner: TcpTransport) -> None:
    silent, keeps = await welcomed(owner)
    reader, writer = await welcomed(owner)
    writer.write(COUNT.pack(2) + RANGE.pack(0, 8))
    assert await hangs_up(reader)
    writer.close()
    await asyncio.sleep(0.4)  # longer than STALL_S
    keeps.write(ask([(0, 1)]))
    assert await silent.readexactly(2) == b"\0\0"
    keeps.close()


async def test_a_reader_that_takes_nothing_is_hung_up_on(owner: TcpTransport) -> None:
    reader, writer = await welcomed(owner)
    writer.transport.pause_reading()  # type: ignore[attr-defined]
    writer.write(ask([(0, SIZE)] * MAX_RANGES))
    await asyncio.sleep(1.0)
    writer.transport.resume_reading()  # type: ignore[attr-defined]
    got = 0
    with contextlib.suppress(ConnectionResetError):
        while piece := await asyncio.wait_for(reader.read(1 << 20), HANG_S):
            got += len(piece)
    assert got < MAX_RANGES * SIZE
    writer.close()


async def test_connections_are_bounded(owner: TcpTransport) -> None:
    held = [await welcomed(owner) for _ in range(8)]
    reader, extra = await wire(owner, hello("owner", EPOCH))
    assert await hangs_up(reader)
    extra.close()
    held.pop()[1].close()
    for _ in range(50):
        await asyncio.sleep(0.02)
        reader, writer = await wire(owner, hello("owner", EPOCH))
        try:
            if await asyncio.wait_for(reader.read(WELCOME.size), HANG_S):
                break
        except ConnectionResetError:
            continue
    else:
        pytest.fail("a freed connection was not given again")
    writer.close()
    for _, other in held:
        other.close()
