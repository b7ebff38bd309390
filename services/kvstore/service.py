"""The store's gRPC face: Lookup, Offer, Watch, Prefetch, Stats, Clear, List, Verify, Pair, CheckIntegrity."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import asdict
from itertools import islice

import grpc

from baton.errors import BatonError, Reason
from baton.rpc.codec import handle_from_pb, handle_to_pb, peer_from_pb, peer_to_pb
from baton.rpc.errors import failure
from baton.rpc.tasks import Background
from baton.transfer.port import Peer
from baton.transfer.transports import Transports
from baton.v1 import kv_pb2, kvstore_pb2, kvstore_pb2_grpc, worker_pb2
from services.kvstore.events import Change
from services.kvstore.metrics import KvStoreMetrics
from services.kvstore.offers import Offers
from services.kvstore.promotion import Hold
from services.kvstore.slots import Entry
from services.kvstore.store import Store
from services.kvstore.tier import TierStats

MAX_LOOKUPS = 1024
"""Held look-ups at the same time; each one pins blocks."""
PAIR_S = 5.0
WARM_S = 2.0
"""How long after `Pair` we go on making progress: the caller's own half of the wire-up needs it."""
LIST_PAGE = 256
VERIFY_EVERY_S = 0.1
ALIVE_S = 0.5
"""A `Watch` stream says something at least this often."""
FORGOTTEN_S = 30.0
"""`Clear` waits so long for the disk; callers wait longer."""

LookupContext = grpc.aio.ServicerContext[kvstore_pb2.LookupRequest, kvstore_pb2.LookupReply]


class KvStoreService(kvstore_pb2_grpc.KvStoreServiceServicer):
    """One store: its tiers and its peer description. Streams write through their context, because a generator that is
    cancelled at a `yield` runs its `finally` only when it is collected, and until then a pin would stay."""

    def __init__(
        self,
        peer: Peer,
        machine: str,
        store: Store,
        transports: Transports,
        offers: Offers,
        background: Background,
        metrics: KvStoreMetrics,
    ) -> None:
        self._peer = peer
        self._machine = machine
        self._store = store
        self._host = store.host
        self._transports = transports
        self._offers = offers
        self._background = background
        self._metrics = metrics
        self._draining = False
        self._lookups = 0
        self._no_lookups = asyncio.Event()
        self._no_lookups.set()
        self._verifying = False
        self._hits = 0
        self._misses = 0
        self._refused: Counter[str] = Counter()
        self._closing = asyncio.Event()
        for tier in store.tiers:
            metrics.watch(tier)
        metrics.quarantined.set_function(lambda: self._host.quarantined)

    async def Lookup(self, request: kvstore_pb2.LookupRequest, context: LookupContext) -> None:  # type: ignore[override]
        """The pinned handles of what can be read, then of what comes up within the deadline; then the call is held
        until the caller ends it. A miss ends at once."""
        self._check_serving()
        if self._lookups >= MAX_LOOKUPS:
            raise BatonError(Reason.NO_CAPACITY, f"{self._lookups} look-ups are held")
        hold = Hold(self._host)
        self._lookups += 1
        self._no_lookups.clear()
        try:
            with self._transports.lease():
                if await self._answer(request, context, hold):
                    await self._closing.wait()
        finally:
            self._lookups -= 1
            if not self._lookups:
                self._no_lookups.set()
            hold.close()

    async def _answer(self, request: kvstore_pb2.LookupRequest, context: LookupContext, hold: Hold) -> int:
        """Send every handle that there is to send; how many."""
        deadline = time.monotonic() + request.deadline_s
        keys = list(request.keys)
        found = self._store.pin(hold, keys, request.fingerprint)
        rest, many = keys[len(found) :], 0
        if request.deadline_s > 0 and rest:
            many = self._store.bring(rest, request.fingerprint, hold)
        self._count_hits(len(found))
        if not many:
            self._count_misses(len(rest))
        handles = [handle_to_pb(entry.handle) for entry in found]
        await context.write(kvstore_pb2.LookupReply(handles=handles, peer=self._own_peer(), complete=not many))
        if many:
            sent = await self._send_coming(rest[:many], deadline, context, hold)
            self._count_misses(len(rest) - sent)
            hold.keep(keys[: len(found) + sent])
        return len(hold)

    async def _send_coming(self, keys: Sequence[bytes], deadline: float, context: LookupContext, hold: Hold) -> int:
        """Send blocks as they come up, in order, until one does not; how many were sent."""
        sent = 0
        complete = False
        while not complete:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                    await self._store.promotions.wait(keys[sent])
            ready: list[Entry] = []
            for key in keys[sent:]:
                if (entry := hold.get(key)) is None:
                    break
                ready.append(entry)
            sent += len(ready)
            complete = not ready or sent == len(keys)
            self._count_hits(len(ready))
            handles = [handle_to_pb(entry.handle) for entry in ready]
            await context.write(kvstore_pb2.LookupReply(handles=handles, peer=self._own_peer(), complete=complete))
        return sent

    async def Offer(self, request: kvstore_pb2.OfferRequest, context: object) -> kvstore_pb2.OfferReply:
        """READ what is offered. Answers when the caller's blocks are no longer needed."""
        self._check_serving()
        handles = [handle_from_pb(h) for h in request.handles]
        outcome = await self._offers.take(
            peer_from_pb(request.peer), handles, request.deadline_s, request.tenant, request.ttl_s
        )
        refused = {reason.name: count for reason, count in outcome.refused.items() if count}
        self._refused.update(refused)
        return kvstore_pb2.OfferReply(stored=outcome.stored, known=outcome.known, refused=refused)

    async def Prefetch(self, request: kvstore_pb2.PrefetchRequest, context: object) -> kvstore_pb2.PrefetchReply:
        """Bring up what is below; answers at once."""
        self._check_serving()
        keys = list(request.keys)
        shape = self._host.shape
        same = shape is not None and shape.fingerprint == request.fingerprint
        readable = next((n for n, key in enumerate(keys) if not same or not self._host.holds(key)), len(keys))
        coming = self._store.bring(keys[readable:], request.fingerprint, None)
        return kvstore_pb2.PrefetchReply(readable=readable, coming=coming)

    async def Watch(  # type: ignore[override]
        self,
        request: worker_pb2.WatchRequest,
        context: grpc.aio.ServicerContext[worker_pb2.WatchRequest, kvstore_pb2.StoreUpdate],
    ) -> None:
        """A snapshot, then changes."""
        async with aclosing(self._store.events.watch()) as changes:
            async for number, change in changes:
                update = kvstore_pb2.StoreUpdate(epoch=self._peer.epoch, alive_s=ALIVE_S)
                if change.speeds or change.cleared:
                    update.tiers.extend(_tier_to_pb(stats) for stats in self._store.stats())
                if not (change.speeds or change.alive):
                    cache = kv_pb2.CacheEvent(
                        seq=number,
                        stored=change.stored,
                        removed=change.removed,
                        cleared=change.cleared,
                        tier=change.tier,
                    )
                    update.cache.CopyFrom(cache)
                await context.write(update)

    async def beat(self) -> None:
        """Tell every watcher that this loop is alive, for ever."""
        while True:
            await asyncio.sleep(ALIVE_S)
            self._store.events.publish(Change(alive=True))

    async def Stats(self, request: kvstore_pb2.StatsRequest, context: object) -> kvstore_pb2.StatsReply:
        """What is held and what became of what was asked and offered."""
        tiers = [_tier_to_pb(stats) for stats in self._store.stats()]
        evicted = self._store.evicted
        return kvstore_pb2.StatsReply(
            tiers=tiers, hits=self._hits, misses=self._misses, evicted=evicted, refused=self._refused
        )

    async def Clear(self, request: kvstore_pb2.ClearRequest, context: object) -> kvstore_pb2.ClearReply:
        """Forget every block, or those of one layout or tenant. Answers when no restart can bring them back, or that
        the store still sees to it."""
        dropped = self._store.clear(request.fingerprint, request.tenant)
        forgotten = await self._store.forgotten(FORGOTTEN_S)
        return kvstore_pb2.ClearReply(dropped=dropped, unfinished=not forgotten)

    async def List(  # type: ignore[override]
        self,
        request: kvstore_pb2.ListRequest,
        context: grpc.aio.ServicerContext[kvstore_pb2.ListRequest, kvstore_pb2.ListReply],
    ) -> None:
        """Every block, a page at a time."""
        listed = self._store.listed(request.tenant)
        while page := list(islice(listed, LIST_PAGE)):
            blocks = [
                kvstore_pb2.ListedBlock(
                    key=one.key, tenant=one.tenant, tiers=one.tiers, pins=one.pins, idle_s=one.idle_s, ttl_s=one.ttl_s
                )
                for one in page
            ]
            await context.write(kvstore_pb2.ListReply(blocks=blocks))

    async def Verify(  # type: ignore[override]
        self,
        request: kvstore_pb2.VerifyRequest,
        context: grpc.aio.ServicerContext[kvstore_pb2.VerifyRequest, kvstore_pb2.VerifyReply],
    ) -> None:
        """Read and check every block; one caller at a time."""
        if self._verifying:
            raise BatonError(Reason.NO_CAPACITY, "a verification is under way")
        self._verifying = True
        told = 0.0
        try:
            async with aclosing(self._store.verify()) as steps:
                async for step in steps:
                    if step.checked == step.total or time.monotonic() - told > VERIFY_EVERY_S:
                        told = time.monotonic()
                        await context.write(kvstore_pb2.VerifyReply(**asdict(step)))
        finally:
            self._verifying = False

    async def Pair(self, request: worker_pb2.PairRequest, context: object) -> worker_pb2.PairReply:
        """Make the caller readable here, and ourselves ready for the caller's half."""
        ours = self._store.fingerprint
        self._store.asked(request.fingerprint)
        if request.fingerprint and ours and ours != request.fingerprint:
            mismatch = BatonError(Reason.KV_LAYOUT_MISMATCH, f"blocks here are {ours}")
            return worker_pb2.PairReply(failure=failure(mismatch))
        with self._transports.lease():
            try:
                await self._transports.pair(peer_from_pb(request.peer), time.monotonic() + PAIR_S)
            except BatonError as error:
                return worker_pb2.PairReply(failure=failure(error))
        self._background.spawn(self._stay_warm(), "warm after pair")
        return worker_pb2.PairReply(peer=self._own_peer())

    async def CheckIntegrity(
        self, request: worker_pb2.CheckIntegrityRequest, context: object
    ) -> worker_pb2.CheckIntegrityReply:
        """Every slot, pin and open call of this process, in words."""
        findings = self._store.check_integrity()
        pinned = self._host.stats().pinned
        if pinned > self._store.writeback.pins and not self._lookups:
            findings.append(f"kvstore: {pinned} blocks are pinned and no look-up is held")
        if self._host.quarantined:
            findings.append(f"kvstore: {self._host.quarantined} slots wait for late reads")
        if self._lookups or self._offers.open:
            findings.append(f"kvstore: {self._lookups} look-ups and {self._offers.open} offers are open")
        moving = self._store.promotions.open, self._store.writeback.open
        if any(moving):
            findings.append(f"kvstore: {moving[0]} blocks are on their way up and {moving[1]} on their way down")
        return worker_pb2.CheckIntegrityReply(findings=findings)

    async def drain(self, within_s: float) -> None:
        """Take nothing new and wait until no look-up is held, no offer open and what was cleared forgotten, at most
        `within_s`."""
        self._draining = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, within_s)):
                await self._no_lookups.wait()
                await self._offers.idle()
                await self._store.forgotten(within_s)
        for tier in self._store.below:
            self._metrics.unforgotten.labels(tier.name).inc(tier.dirty)

    def close(self) -> None:
        """End every held look-up."""
        self._closing.set()

    def _check_serving(self) -> None:
        if self._draining:
            raise BatonError(Reason.DRAINING, f"{self._peer.owner} is draining")

    async def _stay_warm(self) -> None:
        with self._transports.lease():
            await asyncio.sleep(WARM_S)

    def _own_peer(self) -> kv_pb2.Peer:
        return peer_to_pb(self._peer, host=self._machine)

    def _count_hits(self, blocks: int) -> None:
        self._hits += blocks
        self._metrics.lookups.labels("hit").inc(blocks)

    def _count_misses(self, blocks: int) -> None:
        self._misses += blocks
        self._metrics.lookups.labels("miss").inc(blocks)


def _tier_to_pb(stats: TierStats) -> kvstore_pb2.Tier:
    return kvstore_pb2.Tier(
        name=stats.name,
        capacity_bytes=stats.capacity_bytes,
        used_bytes=stats.used_bytes,
        blocks=stats.blocks,
        pinned=stats.pinned,
        read_bytes_s=stats.read_bytes_s,
        read_latency_s=stats.read_latency_s,
        state=stats.state,
    )
