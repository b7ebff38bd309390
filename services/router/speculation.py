"""Blocks that a worker will hold soon, because a prompt was sent there to be computed.

Between a plan and the event that tells its blocks lies a gap in which a second request with the same prefix would not
find them. Engines take prompts in order, so by the time the second one starts, the first one's blocks are there: it may
count on them. What is expected and does not come is forgotten after its time; a wrong guess costs one
recomputed prefix.

An expectation is one prompt's keys from the first that is new to its worker on, found by that first key. Keys are a
hash chain: when two prompts have the key at some place in common, they have all before it, so how far they go together
is found by bisection.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

from services.router.index import PrefixIndex


@dataclass(eq=False, slots=True)
class _Expected:
    worker: str
    keys: Sequence[bytes]
    start: int


class Speculation:
    """At most `max_keys` expected keys; beyond that new expectations are not taken (`refused` counts them)."""

    def __init__(self, index: PrefixIndex, max_keys: int = 200_000) -> None:
        self._index = index
        self._max_keys = max_keys
        self._by_first: dict[bytes, list[_Expected]] = {}
        self._by_worker: dict[str, set[_Expected]] = {}
        self._by_end: list[tuple[float, int, _Expected]] = []
        self._number = 0
        self._keys = 0
        self.refused = 0

    def __len__(self) -> int:
        """Keys expected."""
        return self._keys

    def expect(self, worker: str, keys: Sequence[bytes], start: int, until: float) -> None:
        """`worker` computes the blocks of `keys` from place `start` on (it has those before, or they are expected too);
        believed until `until`, a moment on the caller's clock."""
        if start >= len(keys):
            return
        if self._keys + len(keys) - start > self._max_keys:
            self.refused += 1
            return
        expected = _Expected(worker, keys, start)
        self._by_first.setdefault(keys[start], []).append(expected)
        self._by_worker.setdefault(worker, set()).add(expected)
        self._number += 1
        heapq.heappush(self._by_end, (until, self._number, expected))
        self._keys += len(keys) - start

    def extend(self, found: dict[str, int], keys: Sequence[bytes]) -> None:
        """Lengthen the prefixes in `found` (keys by worker, from the index) by what is expected."""
        seen, reach = 0, max(found.values(), default=0)
        while self._by_first and seen <= reach and seen < len(keys):  # nothing that begins deeper can count yet
            firsts = self._by_first.keys() & keys[seen : reach + 1]
            seen = reach + 1
            expectations = [expected for first in firsts for expected in self._by_first[first]]
            for expected in sorted(expectations, key=attrgetter("start")):
                known, start = found.get(expected.worker, 0), expected.start
                if known < start or start >= len(keys) or expected.keys[start] != keys[start]:
                    continue
                depth = _common(expected.keys, keys, start)
                if depth > known:
                    depth = found[expected.worker] = self._further(expected.worker, keys, depth)
                    reach = max(reach, depth)

    def expire(self, now: float) -> None:
        """Forget what should have come by now."""
        while self._by_end and self._by_end[0][0] <= now:
            expected = heapq.heappop(self._by_end)[2]
            if expected in self._by_worker.get(expected.worker, ()):
                self._drop(expected)

    def forget(self, worker: str) -> None:
        """Nothing comes from `worker` any more."""
        for expected in list(self._by_worker.get(worker, ())):
            self._drop(expected)

    def _further(self, worker: str, keys: Sequence[bytes], depth: int) -> int:
        """Behind what is expected may lie what is known."""
        while depth < len(keys) and self._index.holds(worker, keys[depth]):
            depth += 1
        return depth

    def _drop(self, expected: _Expected) -> None:
        self._keys -= len(expected.keys) - expected.start
        first = expected.keys[expected.start]
        self._by_first[first].remove(expected)
        if not self._by_first[first]:
            del self._by_first[first]
        self._by_worker[expected.worker].remove(expected)
        if not self._by_worker[expected.worker]:
            del self._by_worker[expected.worker]


def _common(these: Sequence[bytes], those: Sequence[bytes], low: int) -> int:
    """How many keys two chains have in common, `low` + 1 at least."""
    low, high = low + 1, min(len(these), len(those))
    while low < high:
        middle = (low + high + 1) // 2
        if these[middle - 1] == those[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low
