"""What the trigger tests ask of a running fleet: plans, prompts, counters, a real `Run` with the test in between."""

from __future__ import annotations

import contextlib
import random
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import httpx
from prometheus_client.parser import text_string_to_metric_families

from baton.v1 import worker_pb2 as pb
from baton.v1 import worker_pb2_grpc
from tests.scripted_prefill import ScriptedPrefill
from tests.worker_process import HANG_S, WorkerProcess, settle

LOCAL = pb.Plan(mode=pb.MODE_LOCAL, reasons=["LOCAL_CHEAPEST"])
MERGED = pb.Plan(mode=pb.MODE_MERGED, reasons=["MERGED_CHEAPEST"])
FREED_S = 10.0
"""The promise is 1 s; machines that run tests are slower than that when they like."""

Prefill = WorkerProcess | ScriptedPrefill


def target(worker: Prefill) -> pb.Target:
    """A worker's place in a plan."""
    return worker.target() if isinstance(worker, ScriptedPrefill) else pb.Target(id=worker.id, address=worker.address)


def handed_over(prefill: Prefill, alternate: Prefill | None = None, *, local: bool = False) -> pb.Plan:
    """A disaggregated plan; `local`: without the prefill, compute where it is."""
    plan = pb.Plan(mode=pb.MODE_DISAGGREGATED, prefill=target(prefill), reasons=["DISAGGREGATED"])
    plan.local_is_cheapest = local
    if alternate is not None:
        plan.alternate.CopyFrom(target(alternate))
    return plan


def prompt(tokens: int, *name: object) -> list[int]:
    """Random ids; prompts of different lengths or names share no prefix that a cache could find."""
    return random.Random(f"{tokens} {name}").choices(range(256), k=tokens)


async def counted(worker: WorkerProcess, metric: str, **labels: str) -> float:
    """The sum of a worker's metric over the samples with these labels, now."""
    async with httpx.AsyncClient(trust_env=False) as client:
        text = (await client.get(worker.metrics, timeout=HANG_S)).text
    samples = (s for family in text_string_to_metric_families(text) for s in family.samples)
    return sum(s.value for s in samples if s.name == f"baton_worker_{metric}" and labels.items() <= s.labels.items())


@contextlib.asynccontextmanager
async def real_run(prefill: WorkerProcess, request: pb.RunRequest) -> AsyncIterator[AsyncIterator[pb.RunEvent]]:
    """A real prefill's answer to `request`, for a script that passes it on as it likes. Leaving ends the lease."""
    async with grpc.aio.insecure_channel(prefill.address) as channel:
        call = worker_pb2_grpc.PrefillServiceStub(channel).Run(request, timeout=HANG_S)
        try:
            yield call
        finally:
            call.cancel()


async def empty(*workers: WorkerProcess) -> None:
    """Everything is given back, and every block of every pool can be had again."""
    await settle(*workers)
    for worker in workers:
        async with grpc.aio.insecure_channel(worker.address) as channel:
            stub = worker_pb2_grpc.WorkerServiceStub(channel)
            await stub.ClearCache(pb.ClearCacheRequest(), timeout=HANG_S)
            call = stub.Watch(pb.WatchRequest(), timeout=HANG_S)
            while not (update := await call.read()).load.blocks_total:
                pass
            call.cancel()
        load = update.load
        assert (load.running, load.waiting, load.blocks_free) == (0, 0, load.blocks_total), (worker.id, load)


def arena_path(worker: WorkerProcess) -> Path:
    """The file behind a worker's KV pool: what is written there is in its memory."""
    for path in Path(f"/proc/{worker.process.pid}/fd").iterdir():
        if path.readlink().name.startswith("memfd:baton-kv"):
            return path
    raise AssertionError(f"{worker.id} has no pool")
