"""Who can do what: the workers who are here, and those who left so lately that they may be back in a moment.

A restart takes nothing away: what only an absent worker can do is no mistake of the client, but waits, or is told to
come again. The batch lane has a day, so it waits longer for who left.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from baton.registry.view import View
from baton.v1 import registry_pb2

AWAY_S = 300.0
"""Who has been gone for longer than a restart takes is not coming back: what only he could do is then refused."""
LONG_AWAY_S = 24 * 3600.0
"""And to the batch lane, whose lines have as much time."""


class Lately:
    """Follows the registry's workers."""

    def __init__(self, workers: View[registry_pb2.Worker], clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._here: dict[str, registry_pb2.Worker] = {}
        self._left: dict[str, tuple[registry_pb2.Worker, float]] = {}
        """With the time when they left."""
        workers.subscribe(self._on_change)

    def longest(self, model: str, away_s: float = AWAY_S) -> int:
        """Tokens of the longest context, of those too who left within `away_s`; 0 when none is known."""
        return max((worker.max_context for worker in self._streaming(model, away_s)), default=0)

    def longer(self, id: str, away_s: float = AWAY_S) -> bool:
        """Whether there is a longer context than that of worker `id`; true of one that is not known."""
        this = self._here.get(id)
        return this is None or self.longest(this.model, away_s) > this.max_context

    def able(self, model: str, needs: Iterable[str], away_s: float = AWAY_S) -> bool:
        """Whether anybody can do all of `needs` (`baton.engine.needs`)."""
        return any(set(needs).isdisjoint(worker.lacks) for worker in self._streaming(model, away_s))

    def _streaming(self, model: str, away_s: float) -> list[registry_pb2.Worker]:
        now = self._clock()
        self._left = {id: left for id, left in self._left.items() if now - left[1] < LONG_AWAY_S}
        known = [*self._here.values(), *(worker for worker, at in self._left.values() if now - at < away_s)]
        return [worker for worker in known if worker.model == model and worker.role != registry_pb2.ROLE_PREFILL]

    def _on_change(self, id: str, worker: registry_pb2.Worker | None) -> None:
        was = self._here.pop(id, None)
        if worker is not None:
            self._left.pop(id, None)
            self._here[id] = worker
        elif was is not None:
            self._left[id] = was, self._clock()
