"""The engine's state, as frontends (heartbeats) and routers (load) are told it."""

from __future__ import annotations

import time

from baton.v1 import worker_pb2 as pb
from baton.worker.context import WorkerContext


def heartbeat(context: WorkerContext) -> pb.Heartbeat:
    """Now. A frontend tells a long step from a stalled engine by when the step began and how long it should take."""
    stats = context.engine.stats()
    return pb.Heartbeat(
        time=time.time(),
        step_started=stats.step_started,
        step_predicted_s=stats.step_predicted_s,
        running=stats.running,
        waiting=stats.waiting,
        draining=context.draining,
    )


def load(context: WorkerContext) -> pb.Load:
    """Now, without `admitted`."""
    stats = context.engine.stats()
    return pb.Load(
        running=stats.running,
        waiting=stats.waiting,
        queued_prefill_tokens=stats.queued_prefill_tokens,
        blocks_total=stats.blocks_total,
        blocks_free=stats.blocks_free,
        prefill_tok_s=stats.prefill_tok_s,
        decode_step_s=stats.decode_step_s,
        draining=context.draining,
    )
