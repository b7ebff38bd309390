"""Which blocks have been wanted again: only those are worth a write to a disk.

A block is sighted when it is stored, when a look-up hits it, and when it is offered although it is here, unless it was
sighted just before: a prefill and a decode worker offer the blocks of one and the same request. Most prompts never come
again: on the Mooncake traces writing at the second sighting writes a fifth to a half of the blocks (README). The memory
is two generations of counts: when the young one is full it becomes the old one, and the old one's are forgotten.
"""

from __future__ import annotations

import time
from collections.abc import Callable

APART_S = 8.0
"""Offers of a known block count when they are so far apart: less than the 10 s for which a worker remembers that it has
offered a block."""


class Sightings:
    """Remembers between `capacity` and twice as many keys: how often, at most 2, and when last."""

    def __init__(self, capacity: int = 65_536, clock: Callable[[], float] = time.monotonic) -> None:
        self._capacity = capacity
        self._clock = clock
        self._young: dict[bytes, tuple[int, float]] = {}
        self._old: dict[bytes, tuple[int, float]] = {}

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def sight(self, key: bytes, apart_s: float = 0.0) -> bool:
        """The key was wanted; whether that was at least the second time. Not counted within `apart_s` of the last."""
        now = self._clock()
        count, last = self._young.get(key) or self._old.pop(key, (0, 0.0))
        if not count or now - last >= apart_s:
            count, last = min(2, count + 1), now
        self._young[key] = count, last
        if len(self._young) >= self._capacity:
            self._old, self._young = self._young, {}
        return count > 1

    def twice(self, key: bytes) -> bool:
        """Whether it has been wanted at least twice."""
        return (self._young.get(key) or self._old.get(key, (0, 0.0)))[0] > 1
