"""A WorkerService that says what a test tells it to, on a real gRPC server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc

from baton.kv.layout import LayoutFingerprint
from baton.v1 import kv_pb2, registry_pb2, worker_pb2, worker_pb2_grpc

LAYOUT = LayoutFingerprint("weights", 2, 2, 16, 32, "float32")


def registration(
    id: str, role: registry_pb2.Role.ValueType, address: str, epoch: int = 1, **fields: object
) -> registry_pb2.Worker:
    """A worker of the model `tiny`."""
    defaults: dict[str, object] = {
        "model": "tiny",
        "layout": kv_pb2.Layout(
            model="weights", layers=2, kv_heads=2, head_dim=16, block_size=32, dtype="float32", quantisation="none",
            order="lkhtd", tensor_parallel=1, pipeline_parallel=1,
        ),
        "fingerprint": LAYOUT.digest(),
        "card": registry_pb2.ModelCard(model="tiny", weights="w", tokenizer="t", chat_template="c"),
        "block_size": 32,
        "max_context": 2048,
        "max_streams": 8,
        "pool_blocks": 100,
        "rates": registry_pb2.Rates(prefill_tok_s=500, decode_step_s=0.03, transfer_bytes_s=1e9),
        "transports": ["tcp"],
        "host": "here",
        "started": 1.0,
    }  # fmt: skip
    return registry_pb2.Worker(id=id, role=role, address=address, epoch=epoch, **{**defaults, **fields})  # type: ignore[arg-type]


class ScriptedWorker(worker_pb2_grpc.WorkerServiceServicer):
    """Describe answers `describes`; whoever watches gets what `say` is given, numbered as a worker numbers."""

    def __init__(self) -> None:
        self.describes = registry_pb2.Worker()
        self.described = 0
        self.watches = 0
        self.updates: asyncio.Queue[worker_pb2.WorkerUpdate | None] = asyncio.Queue()

    async def Describe(self, request: worker_pb2.DescribeRequest, context: object) -> registry_pb2.Worker:
        self.described += 1
        return self.describes

    async def Watch(  # type: ignore[override]
        self, request: worker_pb2.WatchRequest, context: grpc.aio.ServicerContext
    ) -> None:
        self.watches += 1
        await context.write(self.cache(1, cleared=True))
        while (update := await self.updates.get()) is not None:
            await context.write(update)

    def say(self, update: worker_pb2.WorkerUpdate | None) -> None:
        """Send to the watcher; None ends its stream."""
        self.updates.put_nowait(update)

    def cache(self, seq: int, *, epoch: int | None = None, **event: object) -> worker_pb2.WorkerUpdate:
        """A cache event."""
        cache = kv_pb2.CacheEvent(seq=seq, **event)  # type: ignore[arg-type]
        return worker_pb2.WorkerUpdate(epoch=epoch or self.describes.epoch, cache=cache)

    def load(self, **load: object) -> worker_pb2.WorkerUpdate:
        """A load report."""
        return worker_pb2.WorkerUpdate(epoch=self.describes.epoch, load=worker_pb2.Load(**load))  # type: ignore[arg-type]


@asynccontextmanager
async def scripted(
    id: str, role: registry_pb2.Role.ValueType, epoch: int = 1, port: int = 0, **fields: object
) -> AsyncIterator[ScriptedWorker]:
    """A running scripted worker."""
    worker = ScriptedWorker()
    server = grpc.aio.server()
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(worker, server)
    bound = server.add_insecure_port(f"127.0.0.1:{port}")
    worker.describes = registration(id, role, f"127.0.0.1:{bound}", epoch, **fields)
    await server.start()
    try:
        yield worker
    finally:
        worker.say(None)
        await server.stop(0)
