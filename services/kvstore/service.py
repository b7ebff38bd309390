"""The store's gRPC face: Lookup, Offer, Watch, Stats, Clear, Pair, CheckIntegrity."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from contextlib import aclosing

import grpc

from baton.errors import BatonError, Reason
from baton.rpc.codec import handle_from_pb, handle_to_pb, peer_from_pb, peer_to_pb
from baton.rpc.errors import failure
from baton.rpc.tasks import Background
from baton.transfer.port import Peer
from baton.transfer.transports import Transports
from baton.v1 import kv_pb2, kvstore_pb2, kvstore_pb2_grpc, worker_pb2
from services.kvstore.events import Change, Events
from services.kvstore.host import HostTier
from services.kvstore.metrics import KvStoreMetrics
from services.kvstore.offers import Offers

MAX_LOOKUPS = 1024
"""Held look-ups at the same time; each one pins blocks."""
PAIR_S = 5.0
WARM_S = 2.0
"""How long after `Pair` we go on making progress: the caller's own half of the wire-up needs it."""


class KvStoreService(kvstore_pb2_grpc.KvStoreServiceServicer):
    """One store: its tiers and its peer description. Streams write through their context, because a generator that is
    cancelled at a `yield` runs its `finally` only when it is collected, and until then a pin would stay."""

    def __init__(
        self,
        peer: Peer,
        machine: str,
        host: HostTier,
        transports: Transports,
        offers: Offers,
        events: Events,
        background: Background,
        metrics: KvStoreMetrics,
    ) -> None:
        self._peer = peer
        self._machine = machine
        self._host = host
        self._transports = transports
        self._offers = offers
        self._events = events
        self._background = background
        self._metrics = metrics
        self._draining = False
        self._lookups = 0
        self._no_lookups = asyncio.Event()
        self._no_lookups.set()
        self._hits = 0
        self._misses = 0
        self._evicted: Counter[str] = Counter()
        self._refused: Counter[str] = Counter()
        self._closing = asyncio.Event()
        host.on_evicted = self._evicted_for_room
        self._gauges()

    async def Lookup(  # type: ignore[override]
        self,
        request: kvstore_pb2.LookupRequest,
        context: grpc.aio.ServicerContext[kvstore_pb2.LookupRequest, kvstore_pb2.LookupReply],
    ) -> None:
        """One reply with the pinned handles; then the call is held until the caller ends it. A miss ends at once."""
        self._check_serving()
        if self._lookups >= MAX_LOOKUPS:
            raise BatonError(Reason.NO_CAPACITY, f"{self._lookups} look-ups are held")
        pinned = self._host.pin(request.keys, request.fingerprint)
        self._lookups += 1
        self._no_lookups.clear()
        try:
            self._count_lookup(len(pinned), len(request.keys))
            with self._transports.lease():
                handles = [handle_to_pb(entry.handle) for entry in pinned]
                await context.write(kvstore_pb2.LookupReply(handles=handles, peer=self._own_peer()))
                if pinned:
                    await self._closing.wait()
        finally:
            self._lookups -= 1
            if not self._lookups:
                self._no_lookups.set()
            self._host.unpin(pinned)

    async def Offer(self, request: kvstore_pb2.OfferRequest, context: object) -> kvstore_pb2.OfferReply:
        """READ what is offered. Answers when the caller's blocks are no longer needed."""
        self._check_serving()
        outcome = await self._offers.take(
            peer_from_pb(request.peer), [handle_from_pb(h) for h in request.handles], request.deadline_s
        )
        refused = {reason.name: count for reason, count in outcome.refused.items() if count}
        self._refused.update(refused)
        return kvstore_pb2.OfferReply(stored=outcome.stored, known=outcome.known, refused=refused)

    async def Watch(  # type: ignore[override]
        self,
        request: worker_pb2.WatchRequest,
        context: grpc.aio.ServicerContext[worker_pb2.WatchRequest, kvstore_pb2.StoreUpdate],
    ) -> None:
        """A snapshot, then changes."""
        async with aclosing(self._events.watch()) as changes:
            async for number, change in changes:
                cache = kv_pb2.CacheEvent(
                    seq=number,
                    stored=change.stored,
                    removed=change.removed,
                    cleared=change.cleared,
                    tier=self._host.name,
                )
                await context.write(kvstore_pb2.StoreUpdate(epoch=self._peer.epoch, cache=cache))

    async def Stats(self, request: kvstore_pb2.StatsRequest, context: object) -> kvstore_pb2.StatsReply:
        """What is held and what became of what was asked and offered."""
        stats = self._host.stats()
        tier = kvstore_pb2.Tier(
            name=stats.name,
            capacity_bytes=stats.capacity_bytes,
            used_bytes=stats.used_bytes,
            blocks=stats.blocks,
            pinned=stats.pinned,
        )
        return kvstore_pb2.StatsReply(
            tiers=[tier], hits=self._hits, misses=self._misses, evicted=self._evicted, refused=self._refused
        )

    async def Clear(self, request: kvstore_pb2.ClearRequest, context: object) -> kvstore_pb2.ClearReply:
        """Forget every block, or those of one layout."""
        shape = self._host.shape
        if request.fingerprint and (shape is None or shape.fingerprint != request.fingerprint):
            return kvstore_pb2.ClearReply(dropped=0)
        keys = self._host.clear()
        self._gone("cleared", len(keys))
        self._events.publish(Change(cleared=True))
        return kvstore_pb2.ClearReply(dropped=len(keys))

    async def Pair(self, request: worker_pb2.PairRequest, context: object) -> worker_pb2.PairReply:
        """Make the caller readable here, and ourselves ready for the caller's half."""
        shape = self._host.shape
        if request.fingerprint and shape is not None and shape.fingerprint != request.fingerprint:
            mismatch = BatonError(Reason.KV_LAYOUT_MISMATCH, f"blocks here are {shape.fingerprint}")
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
        findings = self._host.check_integrity()
        pinned = self._host.stats().pinned
        if pinned and not self._lookups:
            findings.append(f"kvstore: {pinned} blocks are pinned and no look-up is held")
        if self._host.quarantined:
            findings.append(f"kvstore: {self._host.quarantined} slots wait for late reads")
        if self._lookups or self._offers.open:
            findings.append(f"kvstore: {self._lookups} look-ups and {self._offers.open} offers are open")
        return worker_pb2.CheckIntegrityReply(findings=findings)

    def _evicted_for_room(self, keys: list[bytes]) -> None:
        self._gone("capacity", len(keys))
        self._events.publish(Change(removed=tuple(keys)))

    async def drain(self, within_s: float) -> None:
        """Take nothing new and wait until no look-up is held and no offer open, at most `within_s`."""
        self._draining = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, within_s)):
                await self._no_lookups.wait()
                await self._offers.idle()

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

    def _count_lookup(self, hits: int, asked: int) -> None:
        self._hits += hits
        self._misses += asked - hits
        self._metrics.lookups.labels("hit").inc(hits)
        self._metrics.lookups.labels("miss").inc(asked - hits)

    def _gone(self, reason: str, count: int) -> None:
        self._evicted[reason] += count
        self._metrics.evicted.labels(reason).inc(count)

    def _gauges(self) -> None:
        host, metrics = self._host, self._metrics
        metrics.used_bytes.labels(host.name).set_function(lambda: host.stats().used_bytes)
        metrics.capacity_bytes.labels(host.name).set_function(lambda: host.stats().capacity_bytes)
        metrics.blocks.labels(host.name).set_function(lambda: host.stats().blocks)
        metrics.pinned.labels(host.name).set_function(lambda: host.stats().pinned)
        metrics.quarantined.set_function(lambda: host.quarantined)
