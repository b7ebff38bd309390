"""The leak check: what of this process is still held, in words. Empty when it is idle and clean."""

from __future__ import annotations

import time

from baton.worker.attempts import Attempts
from baton.worker.context import WorkerContext
from baton.worker.offers import Offers
from baton.worker.run import Runs
from baton.worker.sessions import Sessions


async def findings(
    context: WorkerContext, sessions: Sessions, attempts: Attempts, runs: Runs, offers: Offers
) -> list[str]:
    """Live attempts, dead sessions, open leases, what is being offered, slots in quarantine, what the engine finds."""
    now = time.monotonic()
    found = [
        f"attempt {a.key[0]}/{a.key[1]} is {a.stage} since {now - a.started:.1f} s, session "
        f"{a.session.id} {'alive' if a.session.alive else 'ended'}"
        for a in attempts
    ]
    found += sessions.findings() + runs.findings() + offers.findings()
    late = context.transports.quarantined()
    if late:
        found.append(f"{len(late)} slots are in quarantine: late reads may still write to them")
    return found + await context.engine.check_integrity()
