"""Write-behind: sealed blocks are offered to a store, which READs them while we hold them in place.

A prompt is offered when it has been prefilled, a conversation (prompt and output) when its stream ends, and while it
streams as its blocks fill, so that a resume finds them. One offer at a time, a few blocks each, from a bounded queue:
serving goes first, and what cannot be offered now is dropped with a reason. It can come again with the next turn.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import grpc
import structlog

from baton.errors import BatonError, Reason
from baton.rpc.codec import handle_to_pb
from baton.rpc.errors import from_rpc
from baton.v1 import kvstore_pb2, registry_pb2
from baton.worker.context import WorkerContext
from baton.worker.stores import CONNECT_S, Stores

MAX_QUEUED = 64
"""Conversations that wait."""
BLOCKS = 32
"""In one offer: what is held at a time."""
HELD_SHARE = 0.125
"""Of the pool, at most, whatever `BLOCKS` says."""
FREE_SHARE = 0.25
"""With less of the pool to be had, nothing is held for a store."""
OFFER_S = 2.0
OFFER_BLOCK_S = 0.1
"""An offer's deadline is OFFER_S and so much for each block."""
REMEMBERED = 16_384
REMEMBER_S = 10.0
"""A block that the store took is not offered again for so long: then the store learns that it is still wanted."""

_log = structlog.get_logger()


@dataclass(frozen=True)
class _Queued:
    keys: Sequence[bytes]
    tenant: str


class Offers:
    """What this worker offers. `offer` never waits; `run` is one task of the process."""

    def __init__(self, context: WorkerContext, stores: Stores, clock: Callable[[], float] = time.monotonic) -> None:
        self._context = context
        self._stores = stores
        self._clock = clock
        self._queue: asyncio.Queue[_Queued] = asyncio.Queue(MAX_QUEUED)
        self._taken: OrderedDict[bytes, float] = OrderedDict()
        """Keys that the store of `_epoch` has, and until when we believe it."""
        self._epoch = 0
        self._offering = False

    def findings(self) -> list[str]:
        """What waits to be offered or is being read, in words."""
        waiting = self._queue.qsize() + self._offering
        return [f"{waiting} conversations are to be offered to a store"] if waiting else []

    def offer(self, keys: Sequence[bytes], tenant: str) -> None:
        """These blocks, a prefix in order, are sealed here. Dropped when too many wait, or there is no store."""
        if not keys:
            return
        if self._stores.to_offer() is None:
            self._dropped("no_store", len(keys))
        elif self._queue.full():
            self._dropped("queue_full", len(keys))
        else:
            self._queue.put_nowait(_Queued(keys, tenant))

    async def run(self) -> None:
        """Offer for ever, one conversation after the other."""
        while True:
            queued = await self._queue.get()
            self._offering = True
            try:
                await self._offer_all(queued)
            finally:
                self._offering = False

    async def _offer_all(self, queued: _Queued) -> None:
        """What the store lacks, piece by piece."""
        fresh = self._unknown(queued.keys, self._stores.to_offer())
        most = max(1, min(BLOCKS, int(HELD_SHARE * self._context.spec.pool_blocks)))
        for start in range(0, len(fresh), most):
            if not await self._offer(fresh[start : start + most], queued.tenant):
                self._dropped("given_up", len(fresh) - start - most)
                return

    def _unknown(self, keys: Sequence[bytes], store: registry_pb2.KvStore | None) -> list[bytes]:
        """Those of `keys` that `store` is not known to hold; another process than the last holds nothing."""
        if store is not None and store.epoch != self._epoch:
            self._epoch = store.epoch
            self._taken.clear()
        now = self._clock()
        return [key for key in keys if self._taken.get(key, 0.0) <= now]

    async def _offer(self, keys: Sequence[bytes], tenant: str) -> bool:
        """One offer. False when the rest of the conversation is not worth offering now."""
        store = self._stores.to_offer()
        if store is None:
            self._dropped("no_store", len(keys))
            return False
        stats = self._context.engine.stats()
        if stats.blocks_free < FREE_SHARE * stats.blocks_total:
            self._dropped("pool_short", len(keys))
            return False
        began = self._clock()
        try:
            reply, offered = await self._held_offer(store, keys, tenant)
        except (BatonError, TimeoutError) as error:
            reason = error.reason if isinstance(error, BatonError) else Reason.STORE_UNAVAILABLE
            self._dropped(reason.name, len(keys))
            self._stores.failed(store.id, store.epoch)
            _log.info("offer failed", store=store.id, blocks=len(keys), reason=reason.name, why=str(error))
            return False
        if reply is None:
            self._dropped("evicted", len(keys))
            return True
        self._dropped("evicted", len(keys) - len(offered))
        self._count(reply)
        if reply.refused:
            # Which blocks they were is not told: all may come again.
            return not reply.refused.get(Reason.NO_CAPACITY.name)
        if store.epoch == self._epoch:
            self._remember(offered)
        self._stores.answered(store.id, (self._clock() - began) / reply.stored if reply.stored else 0.0)
        return True

    async def _held_offer(
        self, store: registry_pb2.KvStore, keys: Sequence[bytes], tenant: str
    ) -> tuple[kvstore_pb2.OfferReply | None, list[bytes]]:
        """Hold what is here of `keys`, let the store read it. Raises BatonError, TimeoutError."""
        context = self._context
        await self._stores.connected(store.address, CONNECT_S)
        async with context.engine.hold(keys) as handles:
            if not handles:
                return None, []
            deadline_s = OFFER_S + OFFER_BLOCK_S * len(handles)
            request = kvstore_pb2.OfferRequest(
                peer=context.peer, handles=[handle_to_pb(h) for h in handles], tenant=tenant, deadline_s=deadline_s
            )
            with context.transports.lease():
                try:
                    reply = await self._stores.stub(store.address).Offer(request, timeout=deadline_s + 1.0)
                except grpc.aio.AioRpcError as error:
                    raise from_rpc(error, Reason.STORE_UNAVAILABLE) from error
            return reply, [handle.key for handle in handles]

    def _remember(self, keys: Sequence[bytes]) -> None:
        until = self._clock() + REMEMBER_S
        for key in keys:
            self._taken[key] = until
            self._taken.move_to_end(key)
        while len(self._taken) > REMEMBERED:
            self._taken.popitem(last=False)

    def _count(self, reply: kvstore_pb2.OfferReply) -> None:
        offered = self._context.metrics.store_offered
        offered.labels("stored").inc(reply.stored)
        offered.labels("known").inc(reply.known)
        for reason, count in reply.refused.items():
            offered.labels(reason).inc(count)

    def _dropped(self, reason: str, blocks: int) -> None:
        if blocks > 0:
            self._context.metrics.store_dropped.labels(reason).inc(blocks)
