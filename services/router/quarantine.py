"""Workers that did not answer: out of every plan at once, asked again with growing, jittered pauses.

One failed connection is enough, because its cost is a failed request each time and its gain is nothing. A worker that
comes back and fails again soon waits longer than the first time: `calm_s` without a failure resets that.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

SILENT_TIMES = 3.0
"""A stream that says nothing for so many times as long as it promised is one of a stopped process."""


@dataclass
class _Record:
    failures: int
    failed_at: float
    until: float
    out: bool
    why: str


class Quarantine:
    """A state machine on given times (seconds, any monotonic clock)."""

    def __init__(
        self, first_s: float = 0.25, most_s: float = 10.0, calm_s: float = 30.0, random_: random.Random | None = None
    ) -> None:
        self._first_s = first_s
        self._most_s = most_s
        self._calm_s = calm_s
        self._random = random_ or random.Random()
        self._records: dict[str, _Record] = {}

    def failed(self, worker: str, why: str, now: float) -> float:
        """Take `worker` out. Returns when to ask it again: `first_s` doubled for each failure, 50 to 100 % of it."""
        record = self._records.get(worker)
        failures = 0 if record is None or now - record.failed_at > self._calm_s else record.failures
        pause = min(self._most_s, self._first_s * 2.0 ** min(failures, 16)) * self._random.uniform(0.5, 1.0)
        self._records[worker] = _Record(failures + 1, now, now + pause, True, why)
        return now + pause

    def answered(self, worker: str) -> None:
        """`worker` is back in. Its failures are remembered for `calm_s`."""
        record = self._records.get(worker)
        if record is not None:
            record.out = False

    def why(self, worker: str) -> str:
        """Why `worker` is out, or an empty string when it is in."""
        record = self._records.get(worker)
        return record.why if record is not None and record.out else ""

    def due(self, worker: str) -> float:
        """When `worker` may be asked again; 0 when it is in."""
        record = self._records.get(worker)
        return record.until if record is not None and record.out else 0.0

    def forget(self, worker: str) -> None:
        """The worker is gone from the registry, or a new process has its name."""
        self._records.pop(worker, None)
