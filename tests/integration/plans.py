"""What tests of workers ask of them: plans, prompts, and a worker's own figures."""

from __future__ import annotations

import random

import httpx

from baton.v1 import worker_pb2 as pb
from tests.worker_process import HANG_S, WorkerProcess

MERGED = pb.Plan(mode=pb.MODE_MERGED, reasons=["MERGED_CHEAPEST"])
LOCAL = pb.Plan(mode=pb.MODE_LOCAL, reasons=["LOCAL_CHEAPEST"])


def target(worker: WorkerProcess) -> pb.Target:
    """A worker as a plan names it."""
    return pb.Target(id=worker.id, address=worker.address)


def disaggregated(prefill: WorkerProcess, alternate: WorkerProcess | None = None, *, local: bool = False) -> pb.Plan:
    """Prefill there; `local`: computing what is missing here is cheapest."""
    plan = pb.Plan(mode=pb.MODE_DISAGGREGATED, prefill=target(prefill), reasons=["DISAGGREGATED"])
    plan.local_is_cheapest = local
    if alternate is not None:
        plan.alternate.CopyFrom(target(alternate))
    return plan


def prompt(tokens: int, seed: int) -> list[int]:
    """Random ids; prompts of different lengths or seeds share no prefix that a cache could find."""
    return random.Random(f"{tokens} {seed}").choices(range(256), k=tokens)


async def metric(worker: WorkerProcess, name: str) -> float:
    """The sum of one metric of a worker, over its labels."""
    async with httpx.AsyncClient(trust_env=False) as client:
        text = (await client.get(worker.metrics, timeout=HANG_S)).text
    values = [float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(f"baton_worker_{name}")]
    assert values, text
    return sum(values)
