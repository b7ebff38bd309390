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
from concurrent.futures import Future, ThreadPoolExecutor

import structlog

from baton.errors import BatonError, Reason
from baton.kv.arena import Arena
from baton.kv.handle import Handle
from baton.transfer.nixl.agent import Agent, AgentError
from baton.transfer.nixl.batch import Batch, Chunk
from baton.transfer.nixl.driver import Driver, Link
from baton.transfer.nixl.pairing import Pairing, WarmUp, agent_name, settle_ready
from baton.transfer.port import Peer, ReadReport, Transport
from baton.transfer.quarantine import Quarantine
from baton.transfer.screen import collisions, judge, refusal, report

CHUNK_BYTES = 4 << 20
"""Bytes of one NIXL request, at least one block."""
HERE_BYTES = 16 << 20
"""A batch up to this size is read on the event loop, a chunk (0.3-0.5 ms) at a time, where the kernel copies at once:
the hops to the driver's thread and back cost a tenth of a 16 MiB read. Larger ones have the thread to themselves."""
SCRATCH_BYTES = 4096
BASE = struct.Struct("<Q")

log = structlog.get_logger(__name__)


class NixlTransport(Transport):
    """READ through NIXL. Needs the library; `start` says so when it is missing."""

    name = "nixl"

    def __init__(self, host: str = "127.0.0.1") -> None:
        self._host = host
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
            agent = Agent(agent_name(owner, epoch), self._host)
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
        reasons: list[Reason | None] = [Reason.KV_TRANSFER_TIMEOUT] * len(handles)
        chunks = self._plan(handles, into, reasons)
        left = deadline - time.monotonic()
        if not chunks or left <= 0:
            return report(handles, into, reasons, time.perf_counter() - started)
        in_flight = None
        if sum([chunk.size for chunk in chunks]) <= HERE_BYTES:
            chunks, in_flight = await self._read_here(driver, chunks, handles, into, reasons, deadline, verify)
        if not chunks:
            return report(handles, into, reasons, time.perf_counter() - started)
        verifier = self._verifier if verify else None
        batch = Batch(self._arena, handles, into, reasons, chunks, verifier, self._late_settled)
        if in_flight is not None:
            driver.watch(chunks[0], in_flight)
        driver.submit(chunks if in_flight is None else chunks[1:])
        late = await self._wait(batch, deadline - time.monotonic())
        return self._report(batch, late, time.perf_counter() - started)

    async def _read_here(
        self,
        driver: Driver,
        chunks: list[Chunk],
        handles: Sequence[Handle],
        into: Sequence[int],
        reasons: list[Reason | None],
        deadline: float,
        verify: bool,
    ) -> tuple[list[Chunk], int | None]:
        """Read on the loop, chunk by chunk; others get to run after each chunk's worth of bytes.

        What is left for the driver, and the request of the first of these if it is in flight: a read that needs the
        peer, or an agent that is busy, is the driver's business. Nothing is in flight when this is cancelled.
        """
        checks: list[tuple[Future[None], Chunk]] = []

        def judge_all(chunk: Chunk) -> None:
            for i in chunk.members:
                reasons[i] = judge(self._arena, handles[i], into[i])

        left: list[Chunk] = []
        request: int | None = 0
        for position, chunk in enumerate(chunks):
            self._inline += chunk.size
            if self._inline > CHUNK_BYTES:
                self._inline = chunk.size
                await asyncio.sleep(0)
                if time.monotonic() >= deadline:
                    break
            try:
                request = driver.post_now(chunk.link, chunk.local, chunk.remote)
            except AgentError:
                request = 0
                for i in chunk.members:
                    reasons[i] = Reason.KV_TRANSFER_FAILED
                continue
            if request != 0:
                left = chunks[position:]
                break
            if not verify:
                for i in chunk.members:
                    reasons[i] = None
            elif position + 1 < len(chunks):
                checks.append((self._verifier.submit(judge_all, chunk), chunk))  # while the next one is read
            else:
                judge_all(chunk)
        for check, chunk in reversed(checks):
            if check.cancel():  # its thread is behind: the cores are busy
                judge_all(chunk)
                continue
            if not request and not check.done():
                await asyncio.wrap_future(check)
            check.result()  # with a read in flight it waits here, a moment: nothing may be cancelled before `watch`
        return left, request or None

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
        warm = WarmUp(known, self._scratch)

        def introduce() -> None:
            if driver.knows(name):
                link.broken = "reads from before it failed are still in flight"
            else:
                try:
                    driver.adopt(link, self._agent.add(described[BASE.size :]))
                except AgentError as error:
                    link.broken = str(error)
            driver.submit([warm])

        driver.call(introduce)
        self._pairs[peer.owner] = known
        return known

    def _drop(self, driver: Driver, known: Pairing, *, forget: bool = True) -> None:
        if forget:
            del self._pairs[known.peer.owner]
        settle_ready(known.ready, "dropped for a newer epoch, or closed")
        driver.call(lambda: driver.drop(known.link))

    def _plan(self, handles: Sequence[Handle], into: Sequence[int], reasons: list[Reason | None]) -> list[Chunk]:
        """Refuse what cannot be right (in `reasons`), cut the rest into chunks."""
        spoilt = collisions(handles, into) if len(into) > 1 else ()
        chunks: list[Chunk] = []
        filling: dict[Pairing, Chunk] = {}
        arena = self._arena
        for i, handle in enumerate(handles):
            offset = into[i]
            known = self._pairs.get(handle.owner)
            peer = known.peer if known is not None else None
            reason = refusal(handle, offset, peer, arena.size, self._slot_bytes, self._quarantine)
            if reason is None and i in spoilt:
                reason = Reason.KV_BAD_HANDLE
            if reason is None and known is not None and (known.link.broken is not None or not known.ready.done()):
                reason = Reason.KV_TRANSFER_FAILED
            if reason is not None or known is None:
                reasons[i] = reason
                continue
            chunk = filling.get(known)
            if chunk is None or chunk.size + handle.length > CHUNK_BYTES:
                chunk = filling[known] = Chunk(known.link)
                chunks.append(chunk)
            chunk.add(i, handle, arena.address + offset, known.base)
        return chunks

    async def _wait(self, batch: Batch, left: float) -> Sequence[Chunk]:
        """Until the batch is done or its time is over: the chunks that are late then. Cancelled, it quarantines too."""
        try:
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

    def _report(self, batch: Batch, late: Sequence[Chunk], seconds: float) -> ReadReport:
        done = report(batch.handles, batch.into, batch.reasons, seconds)
        if not late:
            return done
        batch.settled = asyncio.get_running_loop().create_future()
        offsets = [batch.into[i] for chunk in late for i in chunk.members]
        return ReadReport(done.blocks, done.bytes, seconds, offsets, batch.settled)

    def _late_settled(self, chunk: Chunk) -> None:
        batch = chunk.batch
        for i in chunk.members:
            self._quarantine.release(batch.into[i])
        batch.owed -= 1
        if batch.owed == 0 and batch.settled is not None:
            batch.settled.set_result(None)
