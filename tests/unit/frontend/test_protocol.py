"""The HTTP beneath the routes: heads have bounds, and what is no HTTP gets an answer like any other."""

from __future__ import annotations

import asyncio
import json

import psutil
import pytest

from baton.model.card import Model
from services.frontend.protocol import MAX_HEAD_BYTES
from services.frontend.reader import LARGE_BYTES
from services.frontend.server import listen
from tests.unit.frontend.peers import HANG_S, ScriptedWorker, Stack, running, until
from tests.unit.frontend.test_failures import TEXT, post, says, stream_text

pytestmark = pytest.mark.timeout(120)


async def connect(stack: Stack) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = stack.url.removeprefix("http://").partition(":")
    return await asyncio.open_connection(host, int(port))


async def answer(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """Status and body of a response after which the connection ends."""
    async with asyncio.timeout(HANG_S):
        whole = await reader.read()
    head, _, body = whole.partition(b"\r\n\r\n")
    assert b"\r\nx-request-id: " in head
    return int(head.split()[1]), body


@pytest.mark.parametrize("piece", [1 << 10, 1 << 20])
@pytest.mark.parametrize("many", [False, True], ids=["one header", "many headers"])
async def test_a_head_has_a_bound(model: Model, piece: int, many: bool) -> None:
    async with running(model, ScriptedWorker("a", says(model))) as stack:
        reader, writer = await connect(stack)
        head = b"GET /health HTTP/1.1\r\nhost: x\r\n" + (
            b"x-filler: y\r\n" * 100_000 if many else b"x: " + b"y" * 1_000_000
        )
        with_end = head + b"\r\n\r\n"
        for start in range(0, len(with_end), piece):
            writer.write(with_end[start : start + piece])
            if reader.at_eof():
                break
            try:
                await writer.drain()
            except ConnectionError:
                break
        try:
            status, body = await answer(reader)
            assert (status, json.loads(body)["error"]["type"]) == (431, "invalid_request_error")
        except ConnectionError:  # it closed while we still wrote: the answer may be lost
            pass
        await until(lambda: not stack.connections())
        writer.transport.abort()
        assert (await stream_text(stack))[0] == TEXT


async def test_what_fits_is_read_in_whatever_pieces(model: Model) -> None:
    body = json.dumps({"model": model.name, "prompt": "hi", "max_tokens": 99, "ignored": "x" * 200_000}).encode()
    lines = ["POST /v1/completions HTTP/1.1", "host: x", f"content-length: {len(body)}", "connection: close"]
    head = "\r\n".join([*lines, "x-filler: " + "y" * (MAX_HEAD_BYTES - 200), "", ""]).encode()
    assert MAX_HEAD_BYTES - 200 < len(head) < MAX_HEAD_BYTES
    async with running(model, ScriptedWorker("a", says(model))) as stack:
        for pieces in ([head + body], [head, body], [head[:100], head[100:] + body]):
            reader, writer = await connect(stack)
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0.02)
            status, answered = await answer(reader)
            assert (status, json.loads(answered)["choices"][0]["text"]) == (200, TEXT)
            writer.close()


async def test_a_head_that_does_not_come_is_cut_off(model: Model) -> None:
    async with running(model, ScriptedWorker("a", says(model)), client_stall_s=0.3) as stack:
        silent, half = await connect(stack), await connect(stack)
        half[1].write(b"GET /health HTTP/1.1\r\nhost: x\r\nx-half: ")
        # One that has asked before may be idle for longer; once it begins to ask it has as long as the others.
        kept = await connect(stack)
        kept[1].write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        assert b"ok" in await kept[0].readuntil(b"}")
        for reader, writer in (silent, half):
            async with asyncio.timeout(HANG_S):
                with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
                    await reader.readexactly(1)
            writer.close()
        assert stack.count("slow_clients") == 2
        await asyncio.sleep(0.5)
        kept[1].write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        assert b"ok" in await kept[0].readuntil(b"}")
        kept[1].write(b"GET /hea")
        await until(lambda: stack.count("slow_clients") == 3)
        kept[1].close()
        assert (await stream_text(stack))[0] == TEXT


@pytest.mark.parametrize(
    "sent", [b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"HELLO\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n"]
)
async def test_what_is_no_http_is_told_in_json(model: Model, sent: bytes) -> None:
    async with running(model, ScriptedWorker("a", says(model))) as stack:
        reader, writer = await connect(stack)
        writer.write(sent)
        status, body = await answer(reader)
        assert (status, json.loads(body)["error"]["message"]) == (400, "Invalid HTTP request received.")
        writer.close()


async def test_the_process_for_large_bodies_does_not_listen(model: Model) -> None:
    """It would keep the port open when the frontend leaves, and accept nobody."""
    sock = listen("127.0.0.1", 0)
    assert not sock.get_inheritable()
    sock.close()
    async with running(model, ScriptedWorker("a", says(model))) as stack:
        reader, writer = await post(stack, ignored="x" * LARGE_BYTES)
        async with asyncio.timeout(HANG_S):
            await reader.read(1)
        writer.transport.abort()
        children = [c for c in psutil.Process().children() if "services.frontend.large" in " ".join(c.cmdline())]
        assert children
        assert not [c for child in children for c in child.net_connections() if c.status == psutil.CONN_LISTEN]
