"""Whether the engine's process gets on: a step that is long because others have the processor is not stuck.

Linux tells the state of a process' main thread (/proc/PID/stat). R is running, or ready to run and waiting for a
processor; a process that was stopped, or waits for something that never comes, is in another one. (Its schedstat would
say how long it waited, but only once it has got a processor again.)
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import replace
from pathlib import Path

from baton.engine.port import EngineStats

WINDOW_S = 1.0
APART_S = 0.1
LEAST = 3
"""Samples in the window before anything is told."""
SHARE = 0.5
"""Of the samples, at least, for a process that gets on."""
LATE_S = 0.5
SLOW_S = 2.0
"""What is predicted at most of a step because its process gets on: it may be running in a circle."""


class Liveness:
    """Ask often while a step is long: what is told is about the last WINDOW_S."""

    def __init__(self, pid: int) -> None:
        self._stat = Path(f"/proc/{pid}/stat")
        self._samples: deque[tuple[float, bool]] = deque()

    def gets_on(self, now: float) -> bool:
        """Whether the main thread ran or was ready to in most samples; False when that cannot be told (yet).
        `now`: any clock's seconds."""
        while self._samples and now - self._samples[0][0] > WINDOW_S:
            self._samples.popleft()
        if not self._samples or now - self._samples[-1][0] >= APART_S:
            self._samples.append((now, self._ready()))
        ready = sum(ready for _, ready in self._samples)
        return len(self._samples) >= LEAST and ready >= SHARE * len(self._samples)

    def _ready(self) -> bool:
        try:
            return self._stat.read_text().rpartition(")")[2].split()[0] == "R"
        except (OSError, IndexError):  # it has ended, or this is no Linux
            return False


def patient(stats: EngineStats, liveness: Liveness | None) -> EngineStats:
    """Predict more of a step that is late while the process gets on: the machine is slow, not the engine stuck."""
    now = time.time()
    age = now - stats.step_started if stats.step_started else 0.0
    if age < LATE_S or liveness is None or not liveness.gets_on(now):
        return stats
    return replace(stats, step_predicted_s=max(stats.step_predicted_s, min(age, SLOW_S)))
