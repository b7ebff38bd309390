"""Telling workers that the batch lane pauses."""

from __future__ import annotations

from collections.abc import Callable

import grpc

from baton.registry.view import View
from baton.rpc.tasks import Background
from baton.v1 import registry_pb2, worker_pb2, worker_pb2_grpc
from services.frontend.batches.metrics import BatchMetrics

TOLD_S = 0.4
"""Later it would say nothing any more: the next one is due."""


class Pauses:
    """Tells workers, one call at a time each. One that cannot be told, or is still being told, is counted; the next
    pause comes soon."""

    def __init__(
        self,
        workers: View[registry_pb2.Worker],
        stub: Callable[[str], worker_pb2_grpc.WorkerServiceAsyncStub],
        background: Background,
        metrics: BatchMetrics,
    ) -> None:
        self._workers = workers
        self._stub = stub
        self._background = background
        self._metrics = metrics
        self._telling: set[str] = set()

    def __call__(self, worker: str, seconds: float) -> None:
        """Tell it; never waits, never raises."""
        found = self._workers.items().get(worker)
        if found is None:
            return
        if worker in self._telling:
            self._metrics.pauses.labels("busy").inc()
            return
        self._telling.add(worker)
        self._background.spawn(self._tell(worker, found.address, seconds), f"pause {worker}")

    async def _tell(self, worker: str, address: str, seconds: float) -> None:
        try:
            await self._stub(address).PauseBatch(worker_pb2.PauseBatchRequest(seconds=seconds), timeout=TOLD_S)
            self._metrics.pauses.labels("told").inc()
        except grpc.aio.AioRpcError as error:
            self._metrics.pauses.labels(error.code().name).inc()
        finally:
            self._telling.discard(worker)
