"""The reader's side of the scatter-read protocol: a few connections to one peer, one ask on each at a time."""

from __future__ import annotations

import asyncio
import contextlib
import select
import socket
from collections.abc import AsyncIterator

from baton.errors import BatonError, Reason
from baton.transfer.port import Peer
from baton.transfer.tcp.wire import BAD_VERSION, MAGIC, OK, WELCOME, WireError, hello, keep_alive, receive

CONNECTIONS = 4
"""To one peer. More reads at once wait for one to be free, each until its own deadline."""


def address(peer: Peer) -> tuple[str, int]:
    """Host and port in the peer's metadata. Raises BatonError when there is none to be understood."""
    host, _, port = peer.metadata.get("tcp", b"").decode(errors="replace").rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise BatonError(Reason.KV_TRANSFER_FAILED, f"{peer.owner} told no address that tcp could use")
    return host, int(port)


async def connect(peer: Peer) -> socket.socket:
    """A connection to `peer` that is known to be in that epoch. The caller bounds the time.

    Raises BatonError(KV_STALE_EPOCH) when someone else answers, BatonError(KV_TRANSFER_FAILED) when nobody does.
    """
    host, port = address(peer)
    loop = asyncio.get_running_loop()
    sock: socket.socket | None = None
    try:
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        family, kind, proto, _, where = found[0]
        sock = socket.socket(family, kind, proto)
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        keep_alive(sock)
        await loop.sock_connect(sock, where)
        await loop.sock_sendall(sock, hello(peer.owner, peer.epoch))
        magic, status, epoch, arena_bytes = WELCOME.unpack(await receive(sock, WELCOME.size))
        if magic != MAGIC or status == BAD_VERSION:
            raise WireError("it does not speak this version of our protocol")
        if status != OK or epoch != peer.epoch:
            raise BatonError(Reason.KV_STALE_EPOCH, f"{peer.owner} at {host}:{port} is not in epoch {peer.epoch:#x}")
        if arena_bytes != peer.arena_bytes:
            raise WireError(f"its arena has {arena_bytes} bytes, not {peer.arena_bytes}")
    except (OSError, WireError) as error:
        if sock is not None:
            sock.close()
        raise BatonError(Reason.KV_TRANSFER_FAILED, f"tcp: {peer.owner} at {host}:{port}: {error}") from error
    except BaseException:
        if sock is not None:
            sock.close()
        raise
    return sock


class Connections:
    """Up to CONNECTIONS sockets to one peer."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self.closed = False
        self._idle: list[socket.socket] = []
        self._busy: set[socket.socket] = set()
        self._free = asyncio.Semaphore(CONNECTIONS)

    async def warm(self) -> None:
        """Have one connection ready. Raises as `connect`."""
        async with self.borrow():
            pass

    @contextlib.asynccontextmanager
    async def borrow(self) -> AsyncIterator[socket.socket]:
        """A connection with nothing under way. Whoever leaves with an exception (cancelled included) has it hung up."""
        async with self._free:
            sock = self._take_idle() or await connect(self.peer)
            self._busy.add(sock)
            try:
                yield sock
            except BaseException:
                sock.close()
                raise
            finally:
                self._busy.discard(sock)
            if self.closed:
                sock.close()
            else:
                self._idle.append(sock)

    def _take_idle(self) -> socket.socket | None:
        """An idle connection that is alive: one that has ended, or broken, has something to read."""
        while self._idle:
            sock = self._idle.pop()
            news = select.poll()
            news.register(sock, select.POLLIN)
            if not news.poll(0):
                return sock
            sock.close()
        return None

    def distrust(self) -> None:
        """Hang up what is idle, so that the next use connects anew: one connection broke, the peer may be gone."""
        for sock in self._idle:
            sock.close()
        self._idle.clear()

    def close(self) -> None:
        """Hang up. Reads under way see a broken connection."""
        self.closed = True
        self.distrust()
        for sock in self._busy:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
