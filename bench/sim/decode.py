"""The machines that stream: all their streams advance together, one token a step, and a fuller batch steps slower.

Between two changes of the batch every stream advances equally, so it is enough to know how many tokens a stream that
was there from the start would have (`_clock`): a stream of n tokens ends when that has grown by n.
"""

from __future__ import annotations

import heapq
from collections import deque

from bench.sim.fleet import Job, Setting


class Decode:
    """One node."""

    def __init__(self, number: int, setting: Setting) -> None:
        self.number = number
        self.down = False
        self.version = 0
        self._setting = setting
        self._clock = 0.0
        self._then = 0.0
        self._running: list[tuple[float, int, Job]] = []
        self._waiting: deque[Job] = deque()
        self._count = 0
        self.coming = 0
        """Streams that were promised to it and are still being computed elsewhere."""

    @property
    def streams(self) -> int:
        """Running, waiting and promised ones."""
        return len(self._running) + len(self._waiting) + self.coming

    @property
    def step_s(self) -> float:
        """Seconds of a step now."""
        return self._setting.step_s + self._setting.step_stream_s * len(self._running)

    def join(self, job: Job, now: float) -> None:
        """A stream begins, or waits for its place."""
        self._advance(now)
        self._waiting.append(job)
        self._fill()

    def next_end(self) -> float | None:
        """When the first stream ends if nothing else happens."""
        return self._then + (self._running[0][0] - self._clock) * self.step_s if self._running else None

    def ended(self, now: float) -> list[Job]:
        """The streams that are over by now."""
        self._advance(now)
        found = []
        while self._running and self._running[0][0] <= self._clock + 1e-6:
            found.append(heapq.heappop(self._running)[2])
        self._fill()
        return found

    def die(self, now: float) -> list[Job]:
        """Everything that was here, with what each has emitted."""
        self._advance(now)
        lost = []
        for end, _, job in self._running:
            job.emitted = max(0, min(job.request.output - 1, job.request.output - int(end - self._clock) - 1))
            lost.append(job)
        lost += self._waiting
        self._running, self._waiting, self.down = [], deque(), True
        self.version += 1
        return lost

    def _advance(self, now: float) -> None:
        self._clock += (now - self._then) / self.step_s
        self._then = now

    def _fill(self) -> None:
        while self._waiting and len(self._running) < self._setting.max_streams:
            job = self._waiting.popleft()
            self._count += 1
            left = job.request.output - 1 - job.emitted  # the first came from the prefill
            heapq.heappush(self._running, (self._clock + max(0, left), self._count, job))
        self.version += 1
