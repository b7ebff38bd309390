"""Which blocks' time is over: a heap of when and what. An entry is only a reminder; the tiers know the truth."""

from __future__ import annotations

import heapq


class Expiry:
    """Times are seconds since 1970. A key is reminded of once for each time that was noted."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, bytes]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def note(self, key: bytes, expires: float) -> None:
        """The key's time is over then; 0 means never."""
        if expires:
            heapq.heappush(self._heap, (expires, key))

    def due(self, now: float) -> set[bytes]:
        """Keys whose noted time has come, each reminder once."""
        found = set()
        while self._heap and self._heap[0][0] <= now:
            found.add(heapq.heappop(self._heap)[1])
        return found

    def keep(self, here: set[bytes]) -> None:
        """Forget the reminders of all others."""
        self._heap = [item for item in self._heap if item[1] in here]
        heapq.heapify(self._heap)
