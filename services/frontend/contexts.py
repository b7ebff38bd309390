"""How long a context there is: that of the workers who are here, and of those who may be back in a moment."""

from __future__ import annotations

import time
from collections.abc import Callable

from baton.registry.view import View
from baton.v1 import registry_pb2

AWAY_S = 300.0
"""Who has been gone for longer than a restart takes is not coming back: what only he could take is then refused."""


class Contexts:
    """Follows the registry's workers of one model. A restart takes nothing away: what only an absent worker can take is
    no mistake of the client, but waits, or is told to come again."""

    def __init__(
        self, workers: View[registry_pb2.Worker], model: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._model = model
        self._clock = clock
        self._here: dict[str, int] = {}
        self._left: dict[str, tuple[int, float]] = {}
        """Tokens, and until when they count."""
        workers.subscribe(self._on_change)

    def longest(self) -> int:
        """Tokens of the longest context of a decode or merged worker; 0 when none is known."""
        now = self._clock()
        self._left = {id: left for id, left in self._left.items() if left[1] > now}
        return max([*self._here.values(), *(tokens for tokens, _ in self._left.values())], default=0)

    def _on_change(self, id: str, worker: registry_pb2.Worker | None) -> None:
        was = self._here.pop(id, None)
        if worker is not None:
            self._left.pop(id, None)
            if worker.model == self._model and worker.role != registry_pb2.ROLE_PREFILL:
                self._here[id] = worker.max_context
        elif was is not None:
            self._left[id] = was, self._clock() + AWAY_S
