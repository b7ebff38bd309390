"""Tells a store what a plan will load from its slower tiers, while the request is still on its way there.

A hint: nobody waits for it, a few are under way at a time, and one that fails or finds no room is only counted.
"""

from __future__ import annotations

from collections.abc import Sequence

import grpc
from prometheus_client import Counter

from baton.rpc.channel import Channels
from baton.rpc.tasks import Background
from baton.v1 import kvstore_pb2, kvstore_pb2_grpc, registry_pb2

AT_ONCE = 32
DEADLINE_S = 1.0
READABLE_TIER = "host"
"""What lies there can be read as it is; what lies on any other tier comes up into it first."""


class Prefetcher:
    """`results` counts hints by what became of them."""

    def __init__(self, background: Background, channels: Channels, results: Counter) -> None:
        self._background = background
        self._channels = channels
        self._results = results
        self._under_way = 0

    def hint(self, store: registry_pb2.KvStore, keys: Sequence[bytes], tenant: str) -> None:
        """Ask `store` to bring `keys` up. Never waits."""
        if self._under_way >= AT_ONCE:
            self._results.labels("dropped").inc()
            return
        self._under_way += 1
        request = kvstore_pb2.PrefetchRequest(keys=keys, fingerprint=store.fingerprint, tenant=tenant)
        task = self._background.spawn(self._send(store.address, request), f"prefetch at {store.id}")
        task.add_done_callback(self._ended)

    def _ended(self, task: object) -> None:
        self._under_way -= 1

    async def _send(self, address: str, request: kvstore_pb2.PrefetchRequest) -> None:
        stub = kvstore_pb2_grpc.KvStoreServiceStub(self._channels.get(address))
        try:
            await stub.Prefetch(request, timeout=DEADLINE_S)
        except grpc.aio.AioRpcError as error:
            self._results.labels(error.code().name).inc()
        else:
            self._results.labels("ok").inc()
