"""Which blocks have been wanted again: only those are worth a write to a disk.

A block is sighted when it is stored because a worker computed it, and when a look-up hits it. Most prompts never come
again: on the Mooncake traces writing at the second sighting writes a fifth to a half of the blocks (README). The memory
is two generations of counts: when the young one is full it becomes the old one, and the old one's are forgotten.
"""

from __future__ import annotations


class Sightings:
    """Remembers between `capacity` and twice as many keys."""

    def __init__(self, capacity: int = 65_536) -> None:
        self._capacity = capacity
        self._young: dict[bytes, int] = {}
        self._old: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def sight(self, key: bytes) -> bool:
        """The key was wanted; whether that was at least the second time."""
        count = min(2, self._young.get(key, 0) + self._old.pop(key, 0) + 1)
        self._young[key] = count
        if len(self._young) >= self._capacity:
            self._old, self._young = self._young, {}
        return count > 1

    def twice(self, key: bytes) -> bool:
        """Whether it has been wanted at least twice."""
        return self._young.get(key, 0) + self._old.get(key, 0) > 1
