"""Taking in what workers offer: the store READs it, verifies it, and seals it under its own epoch.

A read runs as a task of the store's, not of the call: when the caller goes away, the read still ends within its
deadline and its slots end in exactly one of sealed, free or quarantined. Key, generation and checksum are verified,
so what arrived whole is right whoever has left since.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from baton.errors import BatonError, Reason
from baton.kv.handle import Handle
from baton.kv.keys import BLOCK_SIZE, KEY_BYTES
from baton.rpc.tasks import Background
from baton.transfer.port import Peer, ReadReport
from baton.transfer.transports import Transports
from services.kvstore.metrics import KvStoreMetrics
from services.kvstore.slots import Slot
from services.kvstore.store import Store
from services.kvstore.tier import BlockShape, Facts

MAX_OFFER_S = 30.0
"""The longest that one offer may take, whatever the caller allows."""
MAX_BLOCKS = 4096
"""Blocks in one offer."""
MAX_TENANT_BYTES = 255
"""What a tenant's name may take in UTF-8: it is written beside each block."""


@dataclass
class Outcome:
    """What became of an offer's blocks, by number."""

    stored: int = 0
    known: int = 0
    refused: Counter[Reason] = field(default_factory=Counter)


class Offers:
    """`at_once` offers read at the same time, `waiting` more wait; others are refused: write-behind can come again."""

    def __init__(
        self,
        store: Store,
        transports: Transports,
        background: Background,
        metrics: KvStoreMetrics,
        at_once: int = 2,
        waiting: int = 64,
    ) -> None:
        self._store = store
        self._host = store.host
        self._transports = transports
        self._background = background
        self._metrics = metrics
        self._reading = asyncio.Semaphore(at_once)
        self._limit = at_once + waiting
        self._open = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._coming: set[bytes] = set()

    @property
    def open(self) -> int:
        """Offers that wait or read now."""
        return self._open

    async def idle(self) -> None:
        """Wait until no offer is open."""
        await self._idle.wait()

    async def take(
        self, peer: Peer, handles: Sequence[Handle], deadline_s: float, tenant: str = "", ttl_s: float = 0.0
    ) -> Outcome:
        """Store what can be stored of `handles`, all `peer`'s, within `deadline_s`, as the tenant's, for `ttl_s`.

        Raises BatonError for an offer that is wrong as a whole: INVALID_REQUEST, KV_LAYOUT_MISMATCH, NO_CAPACITY.
        """
        check(peer, handles, tenant)
        deadline = time.monotonic() + min(deadline_s if deadline_s > 0 else MAX_OFFER_S, MAX_OFFER_S)
        if self._open >= self._limit:
            raise BatonError(Reason.NO_CAPACITY, f"{self._open} offers are open already")
        done = asyncio.get_running_loop().create_future()
        self._open += 1
        self._idle.clear()
        facts = self._store.facts(tenant, ttl_s)
        self._background.spawn(self._run(peer, handles, facts, deadline, done), f"offer of {peer.owner}")
        outcome: Outcome = await done
        return outcome

    async def _run(
        self, peer: Peer, handles: Sequence[Handle], facts: Facts, deadline: float, done: asyncio.Future[Outcome]
    ) -> None:
        try:
            outcome = await self._take(peer, handles, facts, deadline)
            self._count(outcome)
            if not done.done():
                done.set_result(outcome)
        except (BatonError, TimeoutError) as error:
            known = (
                error if isinstance(error, BatonError) else BatonError(Reason.DEADLINE_EXCEEDED, "offers are waiting")
            )
            self._metrics.refused.labels(known.reason.name).inc(len(handles))
            if not done.done():
                done.set_exception(known)
        except Exception as error:
            if not done.done():
                done.set_exception(BatonError(Reason.INTERNAL, f"storing failed: {error}"))
            raise
        finally:
            self._open -= 1
            if not self._open:
                self._idle.set()
            done.cancel()

    async def _take(self, peer: Peer, handles: Sequence[Handle], facts: Facts, deadline: float) -> Outcome:
        outcome = Outcome()
        async with asyncio.timeout_at(asyncio.get_running_loop().time() + deadline - time.monotonic()):
            await self._reading.acquire()
        try:
            self._store.fix(BlockShape(handles[0].fingerprint, handles[0].length, handles[0].tokens))
            missing = self._missing(handles, outcome)
            slots = self._host.reserve(len(missing), facts.tenant)
            why = Reason.QUOTA_EXCEEDED if self._host.at_quota(facts.tenant) else Reason.NO_CAPACITY
            outcome.refused[why] += len(missing) - len(slots)
            wanted = missing[: len(slots)]
            coming = {handle.key for handle in wanted}
            self._coming |= coming
            try:
                await self._fill(peer, wanted, slots, facts, deadline, outcome)
            finally:
                self._coming -= coming
        finally:
            self._reading.release()
        return outcome

    def _missing(self, handles: Sequence[Handle], outcome: Outcome) -> list[Handle]:
        """Which blocks are to be read; the others are here, on their way, or not of this store's shape."""
        shape = self._host.shape
        assert shape is not None
        missing: dict[bytes, Handle] = {}
        known = []
        for handle in handles:
            if (handle.length, handle.tokens) != (shape.block_bytes, shape.tokens):
                outcome.refused[Reason.KV_BAD_HANDLE] += 1
            elif self._host.holds(handle.key):
                known.append(handle.key)
            elif handle.key in self._coming or handle.key in missing:
                outcome.known += 1
            else:
                missing[handle.key] = handle
        outcome.known += len(known)
        self._store.known(known)
        return list(missing.values())

    async def _fill(
        self, peer: Peer, handles: list[Handle], slots: list[Slot], facts: Facts, deadline: float, outcome: Outcome
    ) -> None:
        """READ `handles` into `slots`, seal what verified. On every exit each slot is sealed, free or quarantined."""
        left = {slot.offset: slot for slot in slots}
        try:
            if not slots:
                return
            await self._transports.pair(peer, deadline)
            report = await self._transports.read(handles, [slot.offset for slot in slots], deadline)
            self._metrics.read_seconds.observe(report.seconds)
            self._set_late_aside(report, left)
            good = []
            for block in report.blocks:
                if block.reason is None:
                    good.append((left[block.offset], block.handle.key))
                else:
                    outcome.refused[block.reason] += 1
            sums = await asyncio.to_thread(lambda: [self._host.sum(slot, key) for slot, key in good])
            here = []
            for (slot, key), digest in reversed(list(zip(good, sums, strict=True))):  # of a prompt the end goes first
                del left[slot.offset]
                if self._host.commit(slot, key, digest, facts):
                    here.append(key)
            outcome.stored += len(here)
            outcome.refused[Reason.ABORTED] += len(good) - len(here)
            if here:
                self._store.stored(here[::-1], facts)
            if good:
                self._note_speed(len(good), handles[0].length, report.seconds)
        except BatonError as error:
            outcome.refused[error.reason] += len(slots)
        finally:
            self._give_back(left)

    def _note_speed(self, blocks: int, block_bytes: int, seconds: float) -> None:
        """Reading from a worker takes the way that a worker's reading from here will take."""
        if blocks == 1:
            self._host.speed.alone(block_bytes, seconds)
        else:
            self._host.speed.batch(blocks * block_bytes, seconds)

    def _set_late_aside(self, report: ReadReport, left: dict[int, Slot]) -> None:
        for offset in report.late:
            settled = report.settled
            assert settled is not None, "late reads without a way to know their end"
            self._host.quarantine(left.pop(offset), settled)

    def _give_back(self, left: dict[int, Slot]) -> None:
        """Only a read that was cancelled (the store is closing) can leave bytes on their way here: never free those."""
        on_their_way = self._transports.quarantined() if left else frozenset()
        for offset, slot in left.items():
            if offset in on_their_way:
                self._host.quarantine(slot, asyncio.get_running_loop().create_future())
            else:
                self._host.cancel(slot)

    def _count(self, outcome: Outcome) -> None:
        shape = self._host.shape
        self._metrics.stored.inc(outcome.stored)
        self._metrics.stored_bytes.inc(outcome.stored * (shape.block_bytes if shape else 0))
        self._metrics.known.inc(outcome.known)
        for reason, count in outcome.refused.items():
            self._metrics.refused.labels(reason.name).inc(count)


def check(peer: Peer, handles: Sequence[Handle], tenant: str = "") -> None:
    """Refuse an offer that cannot be one process's full blocks of one layout. Raises BatonError INVALID_REQUEST."""
    if len(tenant.encode()) > MAX_TENANT_BYTES:
        text = f"a tenant's name has at most {MAX_TENANT_BYTES} bytes"
        raise BatonError(Reason.INVALID_REQUEST, text, param="tenant")
    if not handles or len(handles) > MAX_BLOCKS:
        raise BatonError(Reason.INVALID_REQUEST, f"an offer has 1 to {MAX_BLOCKS} blocks, not {len(handles)}")
    first = handles[0]
    for handle in handles:
        if (handle.owner, handle.epoch) != (peer.owner, peer.epoch):
            raise BatonError(Reason.INVALID_REQUEST, f"{peer.owner} offers a block of {handle.owner}", param="handles")
        if len(handle.key) != KEY_BYTES:
            raise BatonError(
                Reason.INVALID_REQUEST, f"a key has {KEY_BYTES} bytes, not {len(handle.key)}", param="handles"
            )
        if handle.fingerprint != first.fingerprint or not handle.fingerprint:
            raise BatonError(Reason.INVALID_REQUEST, "an offer has blocks of one layout", param="handles")
        if handle.length <= 0 or handle.tokens <= 0 or handle.tokens % BLOCK_SIZE:
            raise BatonError(Reason.INVALID_REQUEST, "only full blocks can be offered", param="handles")
