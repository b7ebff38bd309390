"""A circuit breaker: after `threshold` failures in a row nobody asks the medium (a disk, a GPU) any more, but for one
probe now and then.

    closed      everything goes; failures in a row are counted
    open        nothing goes until the pause is over
    half open   one goes: its success closes, its failure opens again with twice the pause, at most `max_pause_s`

Times are `time.monotonic()` seconds, given by the caller.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Breaker:
    """Each `allow` that was true ends in exactly one of `success`, `failure`, `abandon`."""

    threshold: int = 3
    pause_s: float = 1.0
    max_pause_s: float = 60.0

    def __post_init__(self) -> None:
        self._failures = 0
        self._opened = 0
        self._until = 0.0
        self._probing = False

    @property
    def is_open(self) -> bool:
        """Whether only probes go."""
        return self._opened > 0

    def allow(self, now: float) -> bool:
        """Whether the medium may be asked now."""
        if not self._opened:
            return True
        if self._probing or now < self._until:
            return False
        self._probing = True
        return True

    def success(self) -> None:
        """It answered."""
        self._failures = self._opened = 0
        self._probing = False

    def failure(self, now: float) -> None:
        """It failed, or did not answer in time."""
        self._failures += 1
        if self._opened and not self._probing:
            return  # asked before the circuit opened
        if self._opened or self._failures >= self.threshold:
            self._until = now + min(self.max_pause_s, self.pause_s * 2**self._opened)
            self._opened = min(self._opened + 1, 30)
            self._probing = False

    def abandon(self) -> None:
        """It was not asked after all."""
        self._probing = False

    def state(self, now: float) -> str:
        """ "ok", or since how many failures it is open and when it is tried again."""
        if not self._opened:
            return "ok"
        return f"open: {self._failures} failures, tried again in {max(0.0, self._until - now):.1f} s"
