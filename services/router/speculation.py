"""Blocks that a worker will hold soon, because a prompt was sent there to be computed.

Between a plan and the event that tells its blocks lies a gap in which a second request with the same prefix would not
find them. Engines take prompts in order, so by the time the second one starts, the first one's blocks are there: it may
count on them. What is expected and does not come is forgotten after its time; a wrong guess costs one
recomputed prefix.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from services.router.index import PrefixIndex


class Speculation:
    """At most `max_keys` expectations; beyond that new ones are not taken."""

    def __init__(self, index: PrefixIndex, max_keys: int = 200_000) -> None:
        self._index = index
        self._max_keys = max_keys
        self._expected: dict[str, dict[bytes, float]] = {}
        self._by_end: list[tuple[float, str, bytes]] = []

    def __len__(self) -> int:
        return sum(map(len, self._expected.values()))

    def expect(self, worker: str, keys: Sequence[bytes], until: float) -> None:
        """`worker` computes these blocks; believed until they would be there, at the latest `until`."""
        if len(self._by_end) + len(keys) > self._max_keys:
            return
        expected = self._expected.setdefault(worker, {})
        for key in keys:
            if not self._index.holds(worker, key) and expected.get(key, 0.0) < until:
                expected[key] = until
                heapq.heappush(self._by_end, (until, worker, key))

    def extend(self, found: dict[str, int], keys: Sequence[bytes]) -> None:
        """Lengthen the prefixes in `found` (keys by worker, from the index) by what is expected."""
        for worker, expected in self._expected.items():
            depth = found.get(worker, 0)
            while depth < len(keys) and (keys[depth] in expected or self._index.holds(worker, keys[depth])):
                depth += 1
            if depth:
                found[worker] = depth

    def expire(self, now: float) -> None:
        """Forget what should have come by now."""
        while self._by_end and self._by_end[0][0] <= now:
            end, worker, key = heapq.heappop(self._by_end)
            expected = self._expected.get(worker, {})
            if expected.get(key) == end:
                del expected[key]
                if not expected:
                    del self._expected[worker]

    def forget(self, worker: str) -> None:
        """Nothing comes from `worker` any more."""
        self._expected.pop(worker, None)
