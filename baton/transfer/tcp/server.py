"""The owner's side of the scatter-read protocol: answers asks from the arena. Idle connections cost nothing."""

from __future__ import annotations

import asyncio
import contextlib
import socket

import structlog

from baton.kv.arena import Arena
from baton.transfer.tcp.wire import (
    BAD_VERSION,
    COUNT,
    HELLO,
    MAGIC,
    MAX_OWNER,
    MAX_RANGES,
    OK,
    OUT_OF_RANGE,
    PIECE,
    RANGE,
    STALE,
    VERSION,
    WELCOME,
    WireError,
    keep_alive,
    receive,
)

MAX_CONNECTIONS = 256
STALL_S = 10.0
"""A reader that takes no byte, or does not finish a message, for so long is hung up on."""

log = structlog.get_logger(__name__)


class Server:
    """Serves `arena` as `owner` in `epoch` on a listening socket, until `close`."""

    def __init__(self, listener: socket.socket, arena: Arena, owner: str, epoch: int) -> None:
        self._listener = listener
        self._arena = arena
        self._owner = owner
        self._epoch = epoch
        self._connections: set[asyncio.Task[None]] = set()
        self._accepting = asyncio.create_task(self._accept(), name="tcp-transfer-accept")

    async def close(self) -> None:
        """Stop accepting and hang up on everybody."""
        tasks = [self._accepting, *self._connections]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._listener.close()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(self._listener)
            except OSError as error:  # out of descriptors, or the caller vanished: neither ends the service
                log.warning("tcp transfer accept failed", error=str(error))
                await asyncio.sleep(0.1)
                continue
            if len(self._connections) >= MAX_CONNECTIONS:
                log.warning("tcp transfer connection refused", limit=MAX_CONNECTIONS)
                sock.close()
                continue
            task = asyncio.create_task(self._serve(sock), name="tcp-transfer-serve")
            self._connections.add(task)
            task.add_done_callback(self._connections.discard)

    async def _serve(self, sock: socket.socket) -> None:
        with contextlib.closing(sock):
            try:
                sock.setblocking(False)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                keep_alive(sock)
                async with asyncio.timeout(STALL_S):
                    welcome = await self._greet(sock)
                while welcome:
                    first = await receive(sock, 1)  # a paired reader may be silent for hours
                    async with asyncio.timeout(STALL_S):
                        (count,) = COUNT.unpack(first + await receive(sock, COUNT.size - 1))
                        if not 0 < count <= MAX_RANGES:
                            raise WireError(f"{count} ranges asked")
                        asked = await receive(sock, count * RANGE.size)
                    await self._answer(sock, list(RANGE.iter_unpack(asked)))
            except WireError as error:
                log.debug("tcp transfer connection ended", why=str(error))
            except (OSError, TimeoutError) as error:
                log.info("tcp transfer connection broke", error=repr(error))
            except Exception as error:
                log.error("tcp transfer connection failed", error=repr(error), exc_info=True)

    async def _greet(self, sock: socket.socket) -> bool:
        magic, version, epoch, size = HELLO.unpack(await receive(sock, HELLO.size))
        if magic != MAGIC or size > MAX_OWNER:
            raise WireError("not our protocol")
        owner = await receive(sock, size)
        status = OK
        if version != VERSION:
            status = BAD_VERSION
        elif owner != self._owner.encode() or epoch != self._epoch:
            status = STALE
        answer = WELCOME.pack(MAGIC, status, self._epoch, self._arena.size)
        await asyncio.get_running_loop().sock_sendall(sock, answer)
        return status == OK

    async def _answer(self, sock: socket.socket, ranges: list[tuple[int, int]]) -> None:
        loop = asyncio.get_running_loop()
        status = bytes(OK if offset + length <= self._arena.size else OUT_OF_RANGE for offset, length in ranges)
        async with asyncio.timeout(STALL_S):
            await loop.sock_sendall(sock, status)
        for (offset, length), state in zip(ranges, status, strict=True):
            if state != OK:
                continue
            for at in range(offset, offset + length, PIECE):
                piece = self._arena.view(at, min(PIECE, offset + length - at))
                async with asyncio.timeout(STALL_S):
                    await loop.sock_sendall(sock, piece)
                await asyncio.sleep(0)
