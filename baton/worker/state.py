"""The engine's state, as frontends (heartbeats) and routers (load) are told it."""

from __future__ import annotations

import time

from baton.v1 import worker_pb2 as pb
from baton.worker.context import WorkerContext


def heartbeat(context: WorkerContext, batch: int) -> pb.Heartbeat:
    """Now. A frontend tells a long step from a stalled engine by when the step began and how long it should take;
    `batch` tells it how much of what is here gives way."""
    stats = context.engine.stats()
    return pb.Heartbeat(
        time=time.time(),
        step_started=stats.step_started,
        step_predicted_s=stats.step_predicted_s,
        running=stats.running,
        waiting=stats.waiting,
        draining=context.draining,
        # From one and the same look at the engine, where it tells.
        batch=stats.batch_running + stats.batch_waiting if context.spec.yields else batch,
    )


def load(context: WorkerContext) -> pb.Load:
    """Now, without `admitted`. What gives way to all others (the batch lane) is no load."""
    stats = context.engine.stats()
    return pb.Load(
        running=stats.running - stats.batch_running,
        waiting=stats.waiting - stats.batch_waiting,
        queued_prefill_tokens=stats.queued_prefill_tokens - stats.batch_queued_tokens,
        queued_short_tokens=stats.queued_short_tokens,
        blocks_total=stats.blocks_total,
        blocks_free=min(stats.blocks_total, stats.blocks_free + stats.batch_blocks),
        prefill_tok_s=stats.prefill_tok_s,
        decode_step_s=stats.decode_step_s,
        draining=context.draining,
    )
