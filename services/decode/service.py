"""Decode: streams tokens from KV that a prefill worker computed, or that it computes itself when that is cheaper."""

from __future__ import annotations

from baton.v1 import registry_pb2
from baton.v1 import worker_pb2 as pb
from baton.worker.role import WorkerRole

DECODE = WorkerRole(registry_pb2.ROLE_DECODE, modes=(pb.MODE_DISAGGREGATED, pb.MODE_LOCAL))
