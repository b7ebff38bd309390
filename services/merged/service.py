"""Merged: prefill and decode in one process."""

from __future__ import annotations

from baton.v1 import registry_pb2
from baton.v1 import worker_pb2 as pb
from baton.worker.role import WorkerRole

MERGED = WorkerRole(registry_pb2.ROLE_MERGED, modes=(pb.MODE_MERGED,))
