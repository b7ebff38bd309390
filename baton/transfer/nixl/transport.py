"""`Transport` over NIXL.

The metadata a peer gets is the arena's address and NIXL's own metadata. An agent's name carries the epoch, so a
restarted process is a new agent and what was said of the old one cannot be taken for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import structlog

from baton.errors import BatonError, Reason
from baton.kv.arena import Arena
from baton.kv.handle import Handle
from baton.transfer.nixl.agent import Agent, AgentError
from baton.transfer.nixl.batch import Batch, Chunk
from baton.transfer.nixl.driver import Driver, Link, Transfer
from baton.transfer.port import Peer, ReadReport, Transport
from baton.transfer.quarantine import Quarantine
from baton.transfer.screen import collisions, refusal, report

CHUNK_BYTES = 4 << 20
"""Bytes of one NIXL request. A batch of at most one chunk is read on the event loop: 0.3 ms at 15 GB/s."""
WARM_BYTES = 64
SCRATCH_BYTES = 4096
BASE = struct.Struct("<Q")

log = structlog.get_logger(__name__)


def agent_name(owner: str, epoch: int) -> str:
    """What NIXL calls that process."""
    return f"{owner}@{epoch:016x}"


@dataclass(eq=False)
class Pairing:
    """A peer, its link, and the future of its first read: done when it can be read from, failed with a BatonError."""

    peer: Peer
    link: Link
    base: int
    ready: asyncio.Future[None]


class WarmUp(Transfer):
    """The first read from a peer, into scratch: it connects the two, and shows that bytes come."""

    __slots__ = ("_loop", "_ready")

    def __init__(self, link: Link, scratch: Arena, base: int, ready: asyncio.Future[None], size: int) -> None:
        super().__init__(link, [(scratch.address, size, 0)], [(base, size, 0)])
        self._ready = ready
        self._loop = ready.get_loop()

    def begin(self) -> bool:
        return True

    def settle(self, error: str | None) -> None:
        self._loop.call_soon_threadsafe(settle_ready, self._ready, error)

    def late(self) -> bool:
        return False


def settle_ready(ready: asyncio.Future[None], error: str | None) -> None:
    """End the wait for a pairing."""
    if ready.done():
        return
    if error is None:
        ready.set_result(None)
    else:
        ready.set_exception(BatonError(Reason.KV_TRANSFER_FAILED, f"nixl: {error}"))
        ready.exception()  # whoever waits sees it; nobody may be waiting


class NixlTransport(Transport):
    """READ through NIXL. Needs the library; `start` says so when it is missing."""

    name = "nixl"

    def __init__(self) -> None:
        self._pairs: dict[str, Pairing] = {}
        self._quarantine = Quarantine()
        self._inline = 0
        self._driver: Driver | None = None
        self._metadata = b""

    async def start(self, arena: Arena, owner: str, epoch: int, *, slot_bytes: int | None = None) -> None:
        self._arena = arena
        self._scratch = Arena.create(SCRATCH_BYTES, "baton-scratch")
        self._slot_bytes = slot_bytes

        def begin() -> Agent:
            agent = Agent(agent_name(owner, epoch))
            agent.register(arena.address, arena.size)
            agent.register(self._scratch.address, self._scratch.size)
            return agent

        try:
            self._agent = await asyncio.to_thread(begin)
            self._metadata = BASE.pack(arena.address) + self._agent.metadata()
        except AgentError as error:
            raise BatonError(Reason.KV_TRANSFER_FAILED, f"nixl cannot be used here: {error}") from error
        self._verifier = ThreadPoolExecutor(1, thread_name_prefix="baton-verify")
        self._driver = Driver(self._agent)

    def metadata(self) -> bytes:
        return self._metadata

    async def pair(self, peer: Peer, deadline: float) -> None:
        driver = self._running()
        known = self._pairs.get(peer.owner)
        if known is not None and (known.peer.epoch != peer.epoch or known.link.broken is not None):
            self._drop(driver, known)
            known = None
        if known is None:
            known = self._open(driver, peer)
        try:
            async with asyncio.timeout(deadline - time.monotonic()):
                await asyncio.shield(known.ready)
        except TimeoutError:
            raise BatonError(Reason.KV_TRANSFER_TIMEOUT, f"nixl: {peer.owner} did not answer in time") from None

    async def read(
        self, handles: Sequence[Handle], into: Sequence[int], deadline: float, *, verify: bool = True
    ) -> ReadReport:
        started = time.perf_counter()
        driver = self._driver
        if driver is None or driver.failure is not None:
            return report(handles, into, [Reason.KV_TRANSFER_FAILED] * len(handles), 0.0)
        batch = Batch(self._arena, handles, into, self._verifier if verify else None, self._late_settled)
        total = self._plan(batch)
        left = deadline - time.monotonic()
        if batch.chunks and left > 0:
            small = total <= CHUNK_BYTES
            for chunk in batch.chunks:
                if not (small and driver.try_post(chunk)):
                    driver.submit(chunk)
            late = await self._wait(batch, left, total if small else 0)
            if late:
                return self._late_report(batch, late, time.perf_counter() - started)
        return report(handles, into, batch.reasons, time.perf_counter() - started)

    def quarantined(self) -> frozenset[int]:
        return self._quarantine.offsets()

    @contextlib.contextmanager
    def lease(self) -> Iterator[None]:
        driver = self._running()
        driver.lease(+1)
        try:
            yield
        finally:
            driver.lease(-1)

    async def close(self) -> None:
        driver, self._driver = self._driver, None
        if driver is None:
            return
        for known in self._pairs.values():
            self._drop(driver, known, forget=False)
        self._pairs.clear()
        await asyncio.to_thread(driver.close)
        self._verifier.shutdown(wait=False)

    def _running(self) -> Driver:
        if self._driver is None or self._driver.failure is not None:
            why = "it is not started" if self._driver is None else self._driver.failure
            raise BatonError(Reason.KV_TRANSFER_FAILED, f"nixl cannot be used: {why}")
        return self._driver

    def _open(self, driver: Driver, peer: Peer) -> Pairing:
        described = peer.metadata.get(self.name, b"")
        if len(described) <= BASE.size or peer.arena_bytes <= 0:
            raise BatonError(Reason.KV_TRANSFER_FAILED, f"{peer.owner} told nothing that nixl could use")
        name = agent_name(peer.owner, peer.epoch)
        (base,) = BASE.unpack_from(described)
        link = Link(name)
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        known = Pairing(peer, link, base, ready)
        warm = WarmUp(link, self._scratch, base, ready, min(WARM_BYTES, peer.arena_bytes))

        def introduce() -> None:
            if driver.knows(name):
                link.broken = "reads from before it failed are still in flight"
            else:
                try:
                    driver.adopt(link, self._agent.add(described[BASE.size :]))
                except AgentError as error:
                    link.broken = str(error)
            driver.submit(warm)

        driver.call(introduce)
        self._pairs[peer.owner] = known
        return known

    def _drop(self, driver: Driver, known: Pairing, *, forget: bool = True) -> None:
        if forget:
            del self._pairs[known.peer.owner]
        settle_ready(known.ready, "dropped for a newer epoch, or closed")
        driver.call(lambda: driver.drop(known.link))

    def _plan(self, batch: Batch) -> int:
        """Refuse what cannot be right, cut the rest into chunks. Bytes to read."""
        spoilt = collisions(batch.handles, batch.into) if len(batch.into) > 1 else ()
        members: dict[str, list[int]] = {}
        filled: dict[str, int] = {}
        total = 0
        for i, (handle, offset) in enumerate(zip(batch.handles, batch.into, strict=True)):
            known = self._pairs.get(handle.owner)
            peer = known.peer if known is not None else None
            reason = refusal(handle, offset, peer, self._arena.size, self._slot_bytes, self._quarantine)
            if reason is None and i in spoilt:
                reason = Reason.KV_BAD_HANDLE
            if reason is None and known is not None and (known.link.broken is not None or not known.ready.done()):
                reason = Reason.KV_TRANSFER_FAILED
            if reason is not None or known is None:
                batch.reasons[i] = reason
                continue
            length = handle.length
            chunk = members.setdefault(handle.owner, [])
            if chunk and filled[handle.owner] + length > CHUNK_BYTES:
                batch.add(known.link, known.base, chunk)
                chunk = members[handle.owner] = []
            filled[handle.owner] = length + (filled[handle.owner] if chunk else 0)
            chunk.append(i)
            total += length
        for owner, chunk in members.items():
            batch.add(self._pairs[owner].link, self._pairs[owner].base, chunk)
        return total

    async def _wait(self, batch: Batch, left: float, inline: int) -> Sequence[Chunk]:
        """Until the batch is done or its time is over; the chunks that are late then. Cancelled: quarantines, raises.

        `inline` bytes were read on the loop: others get to run after each chunk's worth of them.
        """
        self._inline += inline
        try:
            if self._inline >= CHUNK_BYTES:
                self._inline = 0
                await asyncio.sleep(0)
            if not batch.done.done():
                async with asyncio.timeout(left):
                    await batch.done
        except TimeoutError:
            return self._abandon(batch)
        except asyncio.CancelledError:
            self._abandon(batch)
            raise
        return ()

    def _abandon(self, batch: Batch) -> list[Chunk]:
        """Give up on the batch: what is posted becomes late, the rest is dropped."""
        late = batch.abandon()
        batch.owed = len(late)
        for chunk in late:
            for i in chunk.members:
                self._quarantine.add(batch.into[i], batch.handles[i].length)
        if late:
            log.warning("nixl read late", peer=late[0].link.name, blocks=sum(len(c.members) for c in late))
        return late

    def _late_report(self, batch: Batch, late: Sequence[Chunk], seconds: float) -> ReadReport:
        done = report(batch.handles, batch.into, batch.reasons, seconds)
        settled: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        batch.settled = settled
        offsets = [batch.into[i] for chunk in late for i in chunk.members]
        return ReadReport(done.blocks, done.bytes, seconds, offsets, settled)

    def _late_settled(self, chunk: Chunk) -> None:
        batch = chunk.batch
        for i in chunk.members:
            self._quarantine.release(batch.into[i])
        batch.owed -= 1
        if batch.owed == 0 and batch.settled is not None:
            batch.settled.set_result(None)
