"""`Transport` over plain sockets.

A read is stopped by hanging up, and bytes are only ever copied by our own loop: so nothing is late here, and
`quarantined` is always empty. It also serves as the oracle: the conformance suite asks both transports the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import structlog

from baton.errors import BatonError, Reason
from baton.kv.arena import Arena
from baton.kv.handle import Handle
from baton.transfer.port import Peer, ReadReport, Transport
from baton.transfer.quarantine import Quarantine
from baton.transfer.screen import collisions, judge, refusal, report
from baton.transfer.tcp.client import Connections, address
from baton.transfer.tcp.server import Server
from baton.transfer.tcp.wire import MAX_RANGES, OK, WireError, ask, receive, receive_into

VERIFY_HERE_BYTES = 2 << 20
"""A block up to this size is summed on the loop, while it is in the cache; a larger one by a thread."""

HANDSHAKE_S = 10.0
"""A handshake outlives those who wait for it, each until its own deadline, but not for longer than this."""

log = structlog.get_logger(__name__)


class TcpTransport(Transport):
    """READ over TCP. `host` is where it listens, `advertise` the name under which peers reach it."""

    name = "tcp"

    def __init__(self, host: str = "127.0.0.1", port: int = 0, *, advertise: str | None = None) -> None:
        self._host = host
        self._port = port
        self._advertise = advertise or host
        self._server: Server | None = None
        self._peers: dict[str, Connections] = {}
        self._warming: dict[Connections, asyncio.Task[None]] = {}
        self._none_late = Quarantine()

    async def start(self, arena: Arena, owner: str, epoch: int, *, slot_bytes: int | None = None) -> None:
        self._arena = arena
        self._slot_bytes = slot_bytes
        try:
            family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
            listener = socket.create_server((self._host, self._port), family=family, backlog=128)
        except OSError as error:
            raise BatonError(Reason.KV_TRANSFER_FAILED, f"tcp cannot listen on {self._host}: {error}") from error
        listener.setblocking(False)
        self._port = listener.getsockname()[1]
        self._verifier = ThreadPoolExecutor(1, thread_name_prefix="baton-verify")
        self._server = Server(listener, arena, owner, epoch)

    def metadata(self) -> bytes:
        return f"{self._advertise}:{self._port}".encode()

    async def pair(self, peer: Peer, deadline: float) -> None:
        if self._server is None:
            raise BatonError(Reason.KV_TRANSFER_FAILED, "tcp cannot be used: it is not started")
        address(peer)
        known = self._peers.get(peer.owner)
        if known is None or known.peer != peer or known.closed:
            if known is not None:
                self._drop(known)
            known = self._peers[peer.owner] = Connections(peer)
        task = self._warm(known)
        await asyncio.wait({task}, timeout=max(0.0, deadline - time.monotonic()))
        if not task.done():
            raise BatonError(Reason.KV_TRANSFER_TIMEOUT, f"tcp: {peer.owner} did not answer in time")
        if task.cancelled():
            raise BatonError(
                Reason.KV_TRANSFER_FAILED, f"tcp: {peer.owner} was dropped for a newer epoch, or we closed"
            )
        task.result()

    async def read(
        self, handles: Sequence[Handle], into: Sequence[int], deadline: float, *, verify: bool = True
    ) -> ReadReport:
        started = time.perf_counter()
        reasons: list[Reason | None] = [Reason.KV_TRANSFER_TIMEOUT] * len(handles)
        wanted = self._screen(handles, into, reasons)
        left = deadline - time.monotonic()
        if wanted and left > 0:
            peers = [self._peers[owner] for owner in wanted]
            try:
                async with asyncio.timeout(left):
                    await asyncio.gather(
                        *(
                            self._fetch(known, positions, handles, into, reasons, verify)
                            for known, positions in zip(peers, wanted.values(), strict=True)
                        )
                    )
            except TimeoutError:
                for known in peers:  # what swallowed one read may swallow the next
                    known.distrust()
        return report(handles, into, reasons, time.perf_counter() - started)

    def quarantined(self) -> frozenset[int]:
        return frozenset()

    @contextlib.contextmanager
    def lease(self) -> Iterator[None]:
        yield  # the kernel and our loop serve readers at any time

    async def close(self) -> None:
        server, self._server = self._server, None
        if server is None:
            return
        for known in self._peers.values():
            self._drop(known)
        self._peers.clear()
        await server.close()
        self._verifier.shutdown(wait=False)

    def _warm(self, known: Connections) -> asyncio.Task[None]:
        """The one handshake under way with that peer."""
        task = self._warming.get(known)
        if task is None:
            task = self._warming[known] = asyncio.create_task(self._handshake(known), name="tcp-transfer-pair")
            task.add_done_callback(lambda done: self._warmed(known, done))
        return task

    async def _handshake(self, known: Connections) -> None:
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                await known.warm()
        except TimeoutError:
            raise BatonError(Reason.KV_TRANSFER_TIMEOUT, f"tcp: {known.peer.owner} does not answer") from None

    def _warmed(self, known: Connections, task: asyncio.Task[None]) -> None:
        del self._warming[known]
        if not task.cancelled() and task.exception() is not None:
            log.warning("tcp pairing failed", peer=known.peer.owner, error=str(task.exception()))

    def _drop(self, known: Connections) -> None:
        known.close()
        task = self._warming.get(known)
        if task is not None:
            task.cancel()

    def _screen(
        self, handles: Sequence[Handle], into: Sequence[int], reasons: list[Reason | None]
    ) -> dict[str, list[int]]:
        """Refuse what cannot be right; positions of the rest by owner."""
        spoilt = collisions(handles, into)
        wanted: dict[str, list[int]] = {}
        for i, (handle, offset) in enumerate(zip(handles, into, strict=True)):
            known = self._peers.get(handle.owner)
            peer = known.peer if known is not None else None
            reason = refusal(handle, offset, peer, self._arena.size, self._slot_bytes, self._none_late)
            if reason is None and i in spoilt:
                reason = Reason.KV_BAD_HANDLE
            if reason is not None:
                reasons[i] = reason
            else:
                wanted.setdefault(handle.owner, []).append(i)
        return wanted

    async def _fetch(
        self,
        known: Connections,
        positions: list[int],
        handles: Sequence[Handle],
        into: Sequence[int],
        reasons: list[Reason | None],
        verify: bool,
    ) -> None:
        """Read those blocks of one peer, noting each one's fate in `reasons`."""
        checks: list[asyncio.Future[None]] = []
        todo = iter(positions)
        try:
            async with known.borrow() as sock:
                while batch := _take(todo, handles):
                    await self._ask(sock, batch, handles, into, reasons, verify, checks)
            await asyncio.gather(*checks)
        except (OSError, WireError) as error:
            log.warning("tcp read failed", peer=known.peer.owner, error=str(error))
            known.distrust()
            await asyncio.gather(*checks)
            self._fail(positions, reasons, Reason.KV_TRANSFER_FAILED)
        except BatonError as error:
            self._fail(positions, reasons, error.reason)
        finally:
            for check in checks:
                check.cancel()

    @staticmethod
    def _fail(positions: Sequence[int], reasons: list[Reason | None], reason: Reason) -> None:
        for i in positions:
            if reasons[i] is Reason.KV_TRANSFER_TIMEOUT:
                reasons[i] = reason

    async def _ask(
        self,
        sock: socket.socket,
        batch: Sequence[int],
        handles: Sequence[Handle],
        into: Sequence[int],
        reasons: list[Reason | None],
        verify: bool,
        checks: list[asyncio.Future[None]],
    ) -> None:
        loop = asyncio.get_running_loop()
        ranges = [(s.offset, s.length) for i in batch for s in handles[i].segments]
        await loop.sock_sendall(sock, ask(ranges))
        status = iter(await receive(sock, len(ranges)))
        for i in batch:
            at = into[i]
            complete = True
            for segment in handles[i].segments:
                if next(status) == OK:
                    await receive_into(sock, self._arena.view(at, segment.length))
                else:
                    complete = False
                at += segment.length
            if not complete:
                reasons[i] = Reason.KV_BAD_HANDLE
            elif not verify:
                reasons[i] = None
            elif handles[i].length <= VERIFY_HERE_BYTES:
                reasons[i] = judge(self._arena, handles[i], into[i])
            else:
                checks.append(asyncio.ensure_future(self._check(handles[i], into[i], reasons, i)))

    async def _check(self, handle: Handle, offset: int, reasons: list[Reason | None], position: int) -> None:
        loop = asyncio.get_running_loop()
        reasons[position] = await loop.run_in_executor(self._verifier, judge, self._arena, handle, offset)


def _take(todo: Iterator[int], handles: Sequence[Handle]) -> list[int]:
    """The next positions whose segments fit in one ask. Blocks have few segments: far fewer than MAX_RANGES."""
    segments = 0
    batch: list[int] = []
    for i in todo:
        batch.append(i)
        segments += len(handles[i].segments)
        if segments >= MAX_RANGES // 2:
            break
    return batch
