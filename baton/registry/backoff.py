"""Waiting between attempts: exponential with jitter, so that a fleet never comes back in step."""

from __future__ import annotations

import random


class Backoff:
    """Seconds to wait before the next attempt; `reset` after a success."""

    def __init__(self, first_s: float = 0.1, most_s: float = 5.0) -> None:
        self.first_s = first_s
        self.most_s = most_s
        self.failures = 0
        """Failures in a row so far."""

    @property
    def worth_telling(self) -> bool:
        """Whether this failure should be logged: the first of a row, and then one in twenty."""
        return self.failures % 20 == 0

    def next(self) -> float:
        """A delay in [half, whole] of first * 2^failures, at most `most_s`."""
        whole = min(self.most_s, self.first_s * 2.0 ** min(self.failures, 20))
        self.failures += 1
        return whole * random.uniform(0.5, 1.0)

    def reset(self) -> None:
        """The last attempt succeeded: the next failure waits the shortest time again."""
        self.failures = 0
