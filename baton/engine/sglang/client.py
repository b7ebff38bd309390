"""The store as SGLang's storage sees it: how much of a prefix is there, read pages, offer pages. One event loop.

    find    Prefetch: what is readable, and what of the disk begins to come up, since SGLang reads it next
    read    Lookup (held: the pin) -> pair -> READ into bounce slots, verify -> close; the caller copies
    offer   Offer: the store READs the pages where they lie, while the caller keeps them unchanged

Everything goes to one store: on this host if there is one (`baton.worker.stores` chooses, and lets one that failed
rest). Everything that goes wrong is a BatonError with its reason; the caller makes it a miss.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass

import grpc

from baton.engine.sglang.bounce import Bounce
from baton.engine.sglang.options import Options
from baton.errors import BatonError, Reason
from baton.kv.arena import Arena
from baton.kv.handle import Handle
from baton.registry import Registry, machine_id
from baton.rpc.channel import Channels
from baton.rpc.codec import handle_from_pb, handle_to_pb, peer_from_pb, peer_to_pb
from baton.rpc.errors import from_rpc
from baton.rpc.tasks import Background
from baton.transfer.port import Peer
from baton.transfer.transports import Transports, available
from baton.v1 import kv_pb2, kvstore_pb2, registry_pb2
from baton.worker.stores import CONNECT_S, Stores

GRACE_S = 1.0
"""How much longer than the store's own deadline an Offer waits for the answer."""


@dataclass(frozen=True)
class Identity:
    """Whose pages these are: the layout's digest, and what a page has of bytes and tokens."""

    fingerprint: str
    page_bytes: int
    tokens: int


class Side:
    """One arena that peers can read, and the transports over it."""

    def __init__(self, arena: Arena, owner: str, epoch: int, options: Options) -> None:
        self.arena = arena
        self.owner = owner
        self.epoch = epoch
        wanted = [name.strip() for name in options.transports.split(",")]
        self.transports = Transports([t for t in available(options.host, options.host) if t.name in wanted])

    async def start(self, slot_bytes: int | None = None) -> None:
        """Raises BatonError KV_TRANSFER_FAILED when no transport can be used here."""
        await self.transports.start(self.arena, self.owner, self.epoch, slot_bytes=slot_bytes)
        peer = Peer(self.owner, self.epoch, self.arena.size, self.transports.metadata())
        self.peer: kv_pb2.Peer = peer_to_pb(peer, host=machine_id())


@dataclass(frozen=True)
class Fetched:
    """Bounce slots with the verified pages of a prefix, in order; why not more, if not."""

    offsets: Sequence[int]
    reason: Reason | None


class StoreClient:
    """For one rank. `pool` is SGLang's host pool as an arena; pages are read into an arena of our own."""

    def __init__(self, options: Options, identity: Identity, pool: Arena, owner: str) -> None:
        self._options = options
        self._identity = identity
        epoch = secrets.randbits(64) | 1
        slots = options.bounce_mib * 2**20 // identity.page_bytes
        if slots < 1:
            raise ValueError(f"bounce_mib: a page has {identity.page_bytes} bytes, which {options.bounce_mib} MiB lack")
        self.pool = Side(pool, f"{owner}-pool", epoch, options)
        self.inward = Side(Arena.create(slots * identity.page_bytes, "baton-sglang"), f"{owner}-in", epoch, options)
        self.bounce = Bounce(slots, identity.page_bytes, self.inward.transports.quarantined)
        self._channels = Channels()
        self._background = Background(owner)
        self._registry: Registry | None = None
        self._stores: Stores | None = None

    async def start(self) -> None:
        """Become readable and follow the registry. A registry or a store that is not there yet is no error."""
        await self.pool.start()
        await self.inward.start(self._identity.page_bytes)
        self._registry = Registry(self._options.etcd_endpoints, self._options.cluster, self._background)
        self._stores = Stores(
            self.pool.peer, self._identity.fingerprint, self.pool.transports, self._channels, self._background
        )
        self._stores.follow(self._registry.view("kvstores", registry_pb2.KvStore))

    async def close(self) -> None:
        """Drop every connection. The arenas stay mapped, as arenas do."""
        if self._registry is not None:
            await self._registry.close()
        await self._background.close()
        await self._channels.close()
        await self.inward.transports.close()
        await self.pool.transports.close()

    async def find(self, keys: Sequence[bytes], end: float) -> int:
        """How many of the prefix the store can give. Raises BatonError."""
        store = self._store()
        request = kvstore_pb2.PrefetchRequest(
            keys=keys, fingerprint=self._identity.fingerprint, tenant=self._options.tenant
        )
        try:
            await self._known.connected(store.address, min(CONNECT_S, _left(end)))
            reply = await self._known.stub(store.address).Prefetch(request, timeout=_left(end))
        except grpc.aio.AioRpcError as error:
            raise self._failed(store, from_rpc(error, Reason.STORE_UNAVAILABLE)) from error
        except BatonError as error:
            raise self._failed(store, error) from error
        self._known.answered(store.id)
        return min(len(keys), reply.readable + reply.coming)

    async def read(self, keys: Sequence[bytes], end: float) -> Fetched:
        """Read what there are slots for, from the first on. The caller gives the slots back (`bounce`).

        Raises BatonError when there is no store to ask; otherwise what went wrong is the reason in `Fetched`.
        """
        store = self._store()
        slots = await self._slots(len(keys), end)
        good = 0
        reason: Reason | None = None
        try:
            good = await self._read(store, keys[: len(slots)], slots, end)
            self._known.answered(store.id)
            reason = Reason.NOT_FOUND if good < len(slots) else None
        except _Broken as broken:
            good, reason = broken.good, broken.error.reason
            self._failed(store, broken.error)
        finally:
            self.bounce.give_back(slots[good:])
        return Fetched(slots[:good], reason)

    async def slots(self, most: int, end: float) -> list[int]:
        """1 to `most` bounce slots, for pages to be offered from there. Raises BatonError NO_CAPACITY."""
        return await self._slots(most, end)

    async def offer(self, side: Side, handles: Sequence[Handle], end: float) -> kvstore_pb2.OfferReply:
        """Let the store read these pages, all of `side`. What it refused is in the reply. Raises BatonError."""
        store = self._store()
        try:
            await self._known.connected(store.address, min(CONNECT_S, _left(end)))
            with side.transports.lease():
                left = _left(end)
                request = kvstore_pb2.OfferRequest(
                    peer=side.peer,
                    handles=[handle_to_pb(handle) for handle in handles],
                    tenant=self._options.tenant,
                    deadline_s=left,
                )
                reply = await self._known.stub(store.address).Offer(request, timeout=left + GRACE_S)
        except grpc.aio.AioRpcError as error:
            raise self._failed(store, from_rpc(error, Reason.STORE_UNAVAILABLE)) from error
        except BatonError as error:
            raise self._failed(store, error) from error
        self._known.answered(store.id)
        return reply

    async def clear(self, end: float) -> int:
        """Forget this layout's pages of our tenant, whoever stored them; how many. Raises BatonError."""
        store = self._store()
        request = kvstore_pb2.ClearRequest(fingerprint=self._identity.fingerprint, tenant=self._options.tenant)
        try:
            return (await self._known.stub(store.address).Clear(request, timeout=_left(end))).dropped
        except grpc.aio.AioRpcError as error:
            raise from_rpc(error, Reason.STORE_UNAVAILABLE) from error

    @property
    def _known(self) -> Stores:
        assert self._stores is not None, "not started"
        return self._stores

    def _store(self) -> registry_pb2.KvStore:
        store = self._known.to_offer()
        if store is None:
            raise BatonError(Reason.STORE_UNAVAILABLE, "no store of this layout is there, or it rests after a failure")
        return store

    def _failed(self, store: registry_pb2.KvStore, error: BatonError) -> BatonError:
        self._known.failed(store.id, store.epoch)
        return error

    async def _slots(self, most: int, end: float) -> list[int]:
        try:
            async with asyncio.timeout(_left(end)):
                return await self.bounce.take(most)
        except TimeoutError:
            raise BatonError(Reason.NO_CAPACITY, f"{self.bounce.aside} of {self.bounce.slots} slots are late") from None

    async def _read(self, store: registry_pb2.KvStore, keys: Sequence[bytes], slots: Sequence[int], end: float) -> int:
        """How many of the prefix are in `slots` now; fewer when the store has no more. Raises _Broken."""
        good = 0
        try:
            await self._known.connected(store.address, min(CONNECT_S, _left(end)))
            request = kvstore_pb2.LookupRequest(
                keys=keys, fingerprint=self._identity.fingerprint, tenant=self._options.tenant, deadline_s=_left(end)
            )
            async with aclosing(self._known.lookup(store.id, store.address, request, end)) as replies:
                async for reply in replies:
                    handles = [handle_from_pb(handle) for handle in reply.handles]
                    self._check(handles, keys[good : good + len(handles)])
                    if handles:
                        await self.inward.transports.pair(peer_from_pb(reply.peer), end)
                        report = await self.inward.transports.read(handles, slots[good : good + len(handles)], end)
                        verified = report.verified_prefix()
                        good += verified
                        if verified < len(handles):
                            reason = report.blocks[verified].reason or Reason.KV_TRANSFER_FAILED
                            raise BatonError(reason, f"reading from {store.id}")
                    if reply.complete or good == len(keys):
                        break
        except BatonError as error:
            raise _Broken(good, error) from error
        return good

    def _check(self, handles: Sequence[Handle], keys: Sequence[bytes]) -> None:
        """What the store says it has must be what was asked for: the checksum holds only for what a handle claims."""
        if [handle.key for handle in handles] != list(keys):
            raise BatonError(Reason.KV_BAD_HANDLE, "the store answered with other blocks than were asked for")
        for handle in handles:
            if (handle.fingerprint, handle.length, handle.tokens) != (
                self._identity.fingerprint,
                self._identity.page_bytes,
                self._identity.tokens,
            ):
                raise BatonError(Reason.KV_BAD_HANDLE, "the store answered with blocks of another layout")


class _Broken(Exception):
    """A read ended early: `good` pages were verified until then."""

    def __init__(self, good: int, error: BatonError) -> None:
        super().__init__(str(error))
        self.good = good
        self.error = error


def _left(end: float) -> float:
    """Seconds until `end`, a `time.monotonic()`. Raises BatonError KV_TRANSFER_TIMEOUT when it has passed."""
    left = end - time.monotonic()
    if left <= 0:
        raise BatonError(Reason.KV_TRANSFER_TIMEOUT, "no time is left")
    return left
