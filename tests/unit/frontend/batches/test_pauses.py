"""Telling workers that the lane pauses: one call at a time each, and what is not told is counted."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from baton.registry.view import View
from baton.rpc.tasks import Background
from baton.v1 import registry_pb2, worker_pb2
from services.frontend.batches.metrics import BatchMetrics
from services.frontend.batches.pauses import Pauses


@pytest.mark.timeout(30)
async def test_a_worker_that_is_still_being_told_is_counted() -> None:
    workers = View("workers", registry_pb2.Worker)
    workers.replace({"a": b'{"id": "a", "address": "here:1"}'})
    called, answer = asyncio.Event(), asyncio.Event()

    class Stub:
        async def PauseBatch(self, request: worker_pb2.PauseBatchRequest, **limits: float) -> None:
            called.set()
            await answer.wait()

    stub: Any = Stub()
    metrics, background = BatchMetrics(CollectorRegistry()), Background("test")
    pauses = Pauses(workers, lambda address: stub, background, metrics)

    def counted(result: str) -> float:
        return float(metrics.pauses.labels(result)._value.get())

    pauses("a", 0.5)
    await called.wait()
    pauses("a", 0.5)
    pauses("gone", 0.5)
    assert (counted("busy"), counted("told")) == (1, 0)
    answer.set()
    while not counted("told"):  # noqa: ASYNC110
        await asyncio.sleep(0)
    pauses("a", 0.5)
    while counted("told") < 2:  # noqa: ASYNC110
        await asyncio.sleep(0)
    assert counted("busy") == 1
    await background.close()
