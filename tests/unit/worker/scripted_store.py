"""A KvStoreService that does what a test tells it to, on a real gRPC server. Its blocks are in nobody's memory: the
scripted engine's loads read none."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc

from baton.kv.handle import Handle
from baton.rpc.codec import handle_to_pb
from baton.rpc.server import RpcServer
from baton.v1 import kv_pb2, kvstore_pb2, kvstore_pb2_grpc, registry_pb2, worker_pb2
from tests.unit.worker.engine import BLOCK, LAYOUT

EPOCH = 5


class ScriptedStore(kvstore_pb2_grpc.KvStoreServiceServicer):
    """`keys` are here. `gate` holds answers back; `tail` are what a second, later reply brings."""

    def __init__(self, peer: kv_pb2.Peer) -> None:
        self.peer = peer
        self.keys: set[bytes] = set()
        self.tail: set[bytes] = set()
        self.gate = asyncio.Event()
        self.gate.set()
        self.fail: grpc.StatusCode | None = None
        self.looked_up: list[kvstore_pb2.LookupRequest] = []
        self.pins = 0
        self.offers: list[kvstore_pb2.OfferRequest] = []
        self.refuse = ""
        self.address = ""

    def target(self) -> worker_pb2.Target:
        """For a plan."""
        return worker_pb2.Target(id=self.peer.owner, address=self.address, epoch=EPOCH)

    def registration(self, **fields: Any) -> registry_pb2.KvStore:
        """For `Stores.registered`."""
        return registry_pb2.KvStore(**{"id": self.peer.owner, "epoch": EPOCH, "address": self.address, **fields})

    async def Lookup(  # type: ignore[override]
        self, request: kvstore_pb2.LookupRequest, context: grpc.aio.ServicerContext
    ) -> None:
        self.looked_up.append(request)
        self.pins += 1
        try:
            await self.gate.wait()
            if self.fail is not None:
                await context.abort(self.fail, "as scripted")
            here = self._prefix(list(request.keys), self.keys)
            later = self._prefix(list(request.keys[len(here) :]), self.tail)
            await context.write(self._reply(here, complete=not later))
            if later:
                await context.write(self._reply(later, complete=True))
            if here or later:
                await asyncio.Event().wait()
        finally:
            self.pins -= 1

    def _prefix(self, asked: list[bytes], here: set[bytes]) -> list[bytes]:
        return asked[: next((i for i, key in enumerate(asked) if key not in here), len(asked))]

    def _reply(self, keys: list[bytes], *, complete: bool) -> kvstore_pb2.LookupReply:
        handles = [handle_to_pb(Handle(k, LAYOUT.digest(), self.peer.owner, 1, 1, BLOCK, (), 0)) for k in keys]
        return kvstore_pb2.LookupReply(handles=handles, peer=self.peer, complete=complete)

    async def Offer(self, request: kvstore_pb2.OfferRequest, context: Any) -> kvstore_pb2.OfferReply:
        self.offers.append(request)
        await self.gate.wait()
        if self.fail is not None:
            await context.abort(self.fail, "as scripted")
        offered = [handle.key for handle in request.handles]
        if self.refuse:
            return kvstore_pb2.OfferReply(refused={self.refuse: len(offered)})
        known = len(self.keys.intersection(offered))
        self.keys.update(offered)
        return kvstore_pb2.OfferReply(stored=len(offered) - known, known=known)

    async def Pair(self, request: worker_pb2.PairRequest, context: object) -> worker_pb2.PairReply:
        return worker_pb2.PairReply(peer=self.peer)


@contextlib.asynccontextmanager
async def scripted_store(peer: kv_pb2.Peer) -> AsyncIterator[ScriptedStore]:
    """Serving; readable as `peer`, whoever that is."""
    store, server = ScriptedStore(peer), RpcServer("127.0.0.1", 0)
    server.add(kvstore_pb2_grpc.add_KvStoreServiceServicer_to_server, store, "baton.v1.KvStoreService")
    store.address = f"127.0.0.1:{await server.start()}"
    try:
        yield store
    finally:
        store.gate.set()
        await server.stop(0)
