"""What this frontend knows of every worker's load: heartbeats, its own requests of this moment, the registry."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence

from baton.registry.view import View
from baton.v1 import registry_pb2
from services.frontend.batches.idle import Seen
from services.frontend.placed import Placed
from services.frontend.session import Session
from services.frontend.turn import MERGED

LAG_S = 1.0
"""A heartbeat may still count what has ended here within this."""


class Look:
    """Looks at the workers of one model."""

    def __init__(
        self, model: str, workers: View[registry_pb2.Worker], sessions: Mapping[str, Session], placed: Placed
    ) -> None:
        self._model = model
        self._workers = workers
        self._sessions = sessions
        self._placed = placed
        self._busy_at: dict[str, float] = {}
        self._used: deque[tuple[float, dict[str, int]]] = deque()

    def __call__(self, used: dict[str, int]) -> Sequence[Seen]:
        """Every worker that something may be placed on, and every prefill worker; `used` is the lane's own outputs."""
        now = time.monotonic()
        mine = self._recent(used, now)
        ours = self._placed.outputs()
        seen = []
        for id, worker in self._workers.items().items():
            if worker.model != self._model:
                continue
            interactive, lane, streams = ours[id], 0, 0
            if worker.role != registry_pb2.ROLE_PREFILL:
                session = self._sessions.get(id)
                if session is None or not session.connected or session.draining or session.heartbeat is None:
                    continue
                beat = session.heartbeat
                interactive = max(interactive, beat.running + beat.waiting - beat.batch)
                lane, streams = beat.batch, worker.max_streams
            if interactive:
                self._busy_at[id] = now
            seen.append(
                Seen(
                    id=id,
                    # Without a device of its own a worker computes on what the host has.
                    shares=f"{worker.host}/{worker.device}",
                    streams=streams,
                    interactive=interactive,
                    quiet_s=now - self._busy_at.get(id, -1e9),
                    others=max(0, lane - mine.get(id, 0)),
                    yields=worker.yields,
                    max_context=worker.max_context,
                    lacks=frozenset(worker.lacks) | ({MERGED} if worker.role == registry_pb2.ROLE_DECODE else set()),
                )
            )
        return seen

    def _recent(self, used: dict[str, int], now: float) -> dict[str, int]:
        """The most that the lane had on each worker within LAG_S."""
        self._used.append((now, used))
        while now - self._used[0][0] > LAG_S:
            self._used.popleft()
        most: dict[str, int] = {}
        for _, one in self._used:
            for id, outputs in one.items():
                most[id] = max(most.get(id, 0), outputs)
        return most
