"""Pairs with each prefill worker when it appears, so that the first hand-over does not pay for wiring up.

A convenience: a hand-over pairs for itself when this has not happened, so a failure here is only logged.
"""

from __future__ import annotations

import asyncio
import time

import grpc
import structlog

from baton.errors import BatonError
from baton.registry import View
from baton.rpc.codec import peer_from_pb
from baton.rpc.errors import from_failure
from baton.v1 import registry_pb2, worker_pb2_grpc
from baton.v1 import worker_pb2 as pb
from baton.worker.context import WorkerContext
from baton.worker.handover import CONNECT_S, PAIR_S

AT_ONCE = 4

_log = structlog.get_logger()


class Warmer:
    """Follows the registry's workers."""

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._known: dict[str, int] = {}
        self._at_once = asyncio.Semaphore(AT_ONCE)

    def follow(self, view: View[registry_pb2.Worker]) -> None:
        """Pair with what is there and with what comes, once for each epoch."""
        self._context.channels.follow(view)
        view.subscribe(self._on_worker)

    def _on_worker(self, id: str, worker: registry_pb2.Worker | None) -> None:
        if worker is None:
            self._known.pop(id, None)
            return
        if worker.role != registry_pb2.ROLE_PREFILL or worker.fingerprint != self._context.fingerprint:
            return
        if self._known.get(id) != worker.epoch:
            self._known[id] = worker.epoch
            self._context.background.spawn(self._pair(worker), f"warm up {id}")

    async def _pair(self, worker: registry_pb2.Worker) -> None:
        ours = self._context
        try:
            async with self._at_once:
                async with asyncio.timeout(CONNECT_S):
                    await ours.channels.connected(worker.address)
                channel = ours.channels.get(worker.address)
                stub: worker_pb2_grpc.WorkerServiceAsyncStub = worker_pb2_grpc.WorkerServiceStub(channel)
                with ours.transports.lease():  # the prefill reads nothing, but wires up towards us
                    request = pb.PairRequest(peer=ours.peer, fingerprint=ours.fingerprint)
                    reply = await stub.Pair(request, timeout=2 * PAIR_S)
                    if reply.HasField("failure"):
                        raise from_failure(reply.failure)
                    await ours.transports.pair(peer_from_pb(reply.peer), time.monotonic() + PAIR_S)
            _log.info("paired", prefill=worker.id, transport=str(ours.transports.choice(worker.id)))
        except (TimeoutError, BatonError, grpc.aio.AioRpcError) as error:
            _log.info("not paired ahead of use", prefill=worker.id, why=str(error))
