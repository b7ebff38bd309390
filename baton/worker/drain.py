"""Leaving without breaking a stream: no new work, wait, hand back what still runs, and say when idle."""

from __future__ import annotations

import asyncio

import structlog

from baton.errors import Reason
from baton.worker.attempts import Attempts
from baton.worker.context import WorkerContext
from baton.worker.run import Runs

FREE_S = 5.0
"""After streams were handed back: what freeing them may take."""

_log = structlog.get_logger()


async def drain(context: WorkerContext, attempts: Attempts, runs: Runs, deadline_s: float) -> int:
    """Wait until nothing runs; after `deadline_s` (0 = never) hand streams back, end leases. Returns what is left."""
    context.draining = True
    _log.info("draining", attempts=len(attempts), leases=len(runs), deadline_s=deadline_s)
    if await _idle(attempts, runs, deadline_s or None):
        return 0
    for attempt in attempts:
        cached = attempt.reservation.cached_tokens if attempt.reservation is not None else 0
        attempt.send_handback(Reason.DRAINING, cached)
        context.metrics.handbacks.labels(Reason.DRAINING.name).inc()
        attempt.abort()
    runs.close_all()
    await _idle(attempts, runs, FREE_S)
    return len(attempts) + len(runs)


async def _idle(attempts: Attempts, runs: Runs, timeout_s: float | None) -> bool:
    try:
        async with asyncio.timeout(timeout_s):
            while len(attempts) or len(runs):
                await attempts.idle()
                await runs.idle()
    except TimeoutError:
        return False
    return True
