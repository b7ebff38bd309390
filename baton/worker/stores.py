"""The stores that this worker knows of: how to reach them, whether they answered, and which one is offered to.

A store that did not answer rests: nothing is loaded from it or offered to it for a moment that doubles with each
failure. So a store that hangs costs one request its patience and not all of them. Offers go to one store and stay
there, for a prefix is only of use whole: one on our host before others, then the one that answered fastest so far.
"""

from __future__ import annotations

import asyncio
import time
import zlib
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass

import grpc
import structlog

from baton.errors import BatonError, Reason
from baton.registry import View
from baton.rpc.channel import Channels
from baton.rpc.codec import peer_from_pb
from baton.rpc.errors import from_failure, from_rpc
from baton.rpc.tasks import Background
from baton.transfer.transports import Transports
from baton.v1 import kv_pb2, kvstore_pb2, kvstore_pb2_grpc, registry_pb2
from baton.v1 import worker_pb2 as pb

REST_S = 0.5
REST_MOST_S = 30.0
CONNECT_S = 1.0
PAIR_S = 5.0

_log = structlog.get_logger()


@dataclass
class _Health:
    failures: int = 0
    resting_until: float = 0.0
    seconds_per_block: float = 0.0


class Stores:
    """Fed by the registry's view; `clock` is monotonic seconds."""

    def __init__(
        self,
        peer: kv_pb2.Peer,
        fingerprint: str,
        transports: Transports,
        channels: Channels,
        background: Background,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._peer = peer
        self._fingerprint = fingerprint
        self._transports = transports
        self._channels = channels
        self._background = background
        self._clock = clock
        self._known: dict[str, registry_pb2.KvStore] = {}
        self._health: dict[str, _Health] = {}
        self._current = ""

    def follow(self, view: View[registry_pb2.KvStore]) -> None:
        """Mirror the registry from now on, and pair with each store when it appears."""
        self._channels.follow(view)
        view.subscribe(self.registered)

    def registered(self, id: str, store: registry_pb2.KvStore | None) -> None:
        """A store came, changed or (None) is gone."""
        before = self._known.get(id)
        if store is None:
            self._known.pop(id, None)
            self._health.pop(id, None)
            return
        self._known[id] = store
        if before is None or before.epoch != store.epoch:
            self._health.pop(id, None)
            self._background.spawn(self._warm(store), f"pair with {id}")

    def stub(self, address: str) -> kvstore_pb2_grpc.KvStoreServiceAsyncStub:
        """The store at that address."""
        return kvstore_pb2_grpc.KvStoreServiceStub(self._channels.get(address))

    async def connected(self, address: str, within_s: float) -> None:
        """Wait for the connection. Raises BatonError STORE_UNAVAILABLE."""
        try:
            async with asyncio.timeout(within_s):
                await self._channels.connected(address)
        except TimeoutError:
            raise BatonError(Reason.STORE_UNAVAILABLE, f"no connection to the store at {address}") from None

    async def lookup(
        self, id: str, address: str, request: kvstore_pb2.LookupRequest, end: float
    ) -> AsyncGenerator[kvstore_pb2.LookupReply]:
        """Replies until the store says no more. The pins of what it said end with this generator: close it.

        Raises BatonError: KV_TRANSFER_TIMEOUT at `end` (a `time.monotonic()`), STORE_UNAVAILABLE.
        """
        call = self.stub(address).Lookup(request)  # held for as long as we read
        try:
            while True:
                async with asyncio.timeout(end - time.monotonic()):
                    reply = await call.read()
                if not isinstance(reply, kvstore_pb2.LookupReply):
                    return
                yield reply
        except TimeoutError:
            raise BatonError(Reason.KV_TRANSFER_TIMEOUT, f"{id} did not answer in time") from None
        except grpc.aio.AioRpcError as error:
            raise from_rpc(error, Reason.STORE_UNAVAILABLE) from error
        finally:
            call.cancel()

    def resting(self, id: str) -> bool:
        """Whether the store failed a moment ago and is left alone."""
        health = self._health.get(id)
        return health is not None and self._clock() < health.resting_until

    def failed(self, id: str, epoch: int) -> None:
        """The store did not answer, or not with what it should: it rests, each time longer. Not for what an earlier
        process of that id did."""
        known = self._known.get(id)
        if known is not None and known.epoch != epoch:
            return
        health = self._health.setdefault(id, _Health())
        health.resting_until = self._clock() + min(REST_MOST_S, REST_S * 2.0 ** min(health.failures, 16))
        health.failures += 1

    def answered(self, id: str, seconds_per_block: float = 0.0) -> None:
        """The store did what it was asked; how long a block took when it took one from us."""
        health = self._health.setdefault(id, _Health())
        health.failures = 0
        if seconds_per_block > 0:
            before = health.seconds_per_block or seconds_per_block
            health.seconds_per_block = before + 0.2 * (seconds_per_block - before)

    def to_offer(self) -> registry_pb2.KvStore | None:
        """The store that takes our blocks now, or None."""
        usable = [s for s in self._known.values() if s.fingerprint in ("", self._fingerprint)]
        usable = [store for store in usable if not self.resting(store.id)]
        if not usable:
            return None
        best = min(usable, key=self._rank)
        current = next((s for s in usable if s.id == self._current), None)
        if current is not None and self._near(current) == self._near(best):
            return current
        self._current = best.id
        return best

    def _near(self, store: registry_pb2.KvStore) -> bool:
        return bool(store.host) and store.host == self._peer.host

    def _rank(self, store: registry_pb2.KvStore) -> tuple[bool, float, int]:
        health = self._health.get(store.id, _Health())
        tie = zlib.crc32(f"{self._peer.owner}|{store.id}".encode())
        return not self._near(store), health.seconds_per_block, tie

    async def _warm(self, store: registry_pb2.KvStore) -> None:
        """A convenience: the first load pairs for itself when this has not happened, so a failure is only logged."""
        try:
            await self.connected(store.address, CONNECT_S)
            with self._transports.lease():  # the store wires up towards us, to read what we offer
                request = pb.PairRequest(peer=self._peer, fingerprint=self._fingerprint)
                reply = await self.stub(store.address).Pair(request, timeout=2 * PAIR_S)
                if reply.HasField("failure"):
                    raise from_failure(reply.failure)
                await self._transports.pair(peer_from_pb(reply.peer), self._clock() + PAIR_S)
            _log.info("paired", store=store.id, transport=str(self._transports.choice(store.id)))
        except (BatonError, grpc.aio.AioRpcError) as error:
            _log.info("not paired ahead of use", store=store.id, why=str(error))
