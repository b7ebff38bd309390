"""Leaving without breaking a stream.

1. Tell everybody: routers by load, frontends by heartbeat, the registry by the registration. New attempts are refused
   at once (a frontend submits elsewhere at no cost). Runs are still taken: a decode worker whose plan is a moment older
   than the news would have to fall back.
2. Refuse runs too, and let what runs end.
3. Hand back what still runs at the deadline: frontends resume it elsewhere. End the leases.
"""

from __future__ import annotations

import asyncio
import time

import structlog

from baton.errors import Reason
from baton.process import ANNOUNCE_S
from baton.worker.attempts import Attempts
from baton.worker.context import WorkerContext
from baton.worker.run import Runs

FREE_S = 2.0
"""After streams were handed back: what freeing them may take."""

_log = structlog.get_logger()


async def drain(
    context: WorkerContext,
    attempts: Attempts,
    runs: Runs,
    deadline_s: float | None,
    announce_s: float = ANNOUNCE_S,
) -> int:
    """Wait until nothing runs; after `deadline_s` (None: never) hand streams back, end leases. Returns what is left."""
    began = time.monotonic()
    context.draining = True
    _log.info("draining", attempts=len(attempts), leases=len(runs), deadline_s=deadline_s)
    await asyncio.sleep(announce_s)
    runs.refusing = True
    left_s = None if deadline_s is None else max(0.0, began + deadline_s - time.monotonic())
    if await _idle(attempts, runs, left_s):
        return 0
    _log.info("handing back", attempts=len(attempts), leases=len(runs))
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
