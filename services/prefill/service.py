"""Prefill: computes prompts for decode workers; nothing streams to a frontend from here."""

from __future__ import annotations

import grpc

from baton.rpc.server import RpcServer
from baton.v1 import registry_pb2, worker_pb2_grpc
from baton.v1 import worker_pb2 as pb
from baton.worker.role import WorkerRole
from baton.worker.run import Runs


class PrefillServicer(worker_pb2_grpc.PrefillServiceServicer):
    """gRPC face of `Runs`."""

    def __init__(self, runs: Runs) -> None:
        self._runs = runs

    async def Run(  # type: ignore[override]
        self, request: pb.RunRequest, context: grpc.aio.ServicerContext[pb.RunRequest, pb.RunEvent]
    ) -> None:
        """See `Runs.serve`. Writes through the context: a generator would not run its `finally` when cancelled."""
        await self._runs.serve(request, context.write)


def _add(server: RpcServer, runs: Runs) -> None:
    add = worker_pb2_grpc.add_PrefillServiceServicer_to_server
    server.add(add, PrefillServicer(runs), "baton.v1.PrefillService")


PREFILL = WorkerRole(registry_pb2.ROLE_PREFILL, modes=(), add_services=_add)
