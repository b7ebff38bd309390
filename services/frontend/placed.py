"""Where this frontend's own requests run right now, those of the batch lane aside: what heartbeats will say later."""

from __future__ import annotations

from collections import Counter
from typing import Protocol

from baton.v1 import worker_pb2


class Attempt(Protocol):
    """One attempt of a request."""

    plan: worker_pb2.Plan
    choices: tuple[int, ...]
    first_token: float


class Placed:
    """Attempts under way."""

    def __init__(self) -> None:
        self._attempts: set[Attempt] = set()

    def add(self, attempt: Attempt) -> None:
        """It is being submitted."""
        self._attempts.add(attempt)

    def discard(self, attempt: Attempt) -> None:
        """It has ended. Idempotent."""
        self._attempts.discard(attempt)

    def outputs(self) -> Counter[str]:
        """Outputs by worker; a prefill worker has those that wait for their first token."""
        found: Counter[str] = Counter()
        for attempt in self._attempts:
            found[attempt.plan.worker.id] += len(attempt.choices)
            if attempt.plan.prefill.id and not attempt.first_token:
                found[attempt.plan.prefill.id] += 1
        return found
