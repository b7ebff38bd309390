"""What differs between prefill, decode and merged."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from baton.rpc.server import RpcServer
from baton.v1 import registry_pb2
from baton.v1 import worker_pb2 as pb
from baton.worker.run import Runs


def _nothing(server: RpcServer, runs: Runs) -> None:
    """No service beside WorkerService."""


@dataclass(frozen=True)
class WorkerRole:
    """A role: the modes whose attempts stream from here, and what is served beside WorkerService."""

    role: registry_pb2.Role.ValueType
    modes: tuple[pb.Mode.ValueType, ...]
    add_services: Callable[[RpcServer, Runs], None] = _nothing

    @property
    def name(self) -> str:
        """prefill, decode or merged."""
        return registry_pb2.Role.Name(self.role).removeprefix("ROLE_").lower()
