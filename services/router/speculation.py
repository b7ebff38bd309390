"""Blocks that a worker will hold soon, because a prompt was sent there to be computed.

Between a plan and the event that tells its blocks lies a gap in which a second request with the same prefix would not
find them. Engines take prompts in order, so by the time the second one starts, the first one's blocks are there: it may
count on them. What is expected and does not come is forgotten after its time; a wrong guess costs one
recomputed prefix.

An expectation is one prompt's keys from the first that is new to its worker on, found by that first key. Keys are a
hash chain: when two prompts have the key at some place in common, they have all before it.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from operator import attrgetter

from baton.kv.keys import KEY_BYTES, split_keys
from services.router.index import PrefixIndex
from services.router.places import in_common


@dataclass(eq=False, slots=True)
class _Expected:
    """The keys of a prompt, side by side, of which `worker` is going to hold those from place `start` on."""

    worker: str
    keys: bytes
    start: int
    first: bytes

    def __len__(self) -> int:
        """How many keys are expected."""
        return len(self.keys) // KEY_BYTES - self.start


class Speculation:
    """At most `max_keys` expected keys; beyond that new expectations are not taken (`refused` counts them)."""

    def __init__(self, index: PrefixIndex, max_keys: int = 200_000) -> None:
        self._index = index
        self._max_keys = max_keys
        self._by_first: dict[bytes, list[_Expected]] = {}
        self._by_worker: dict[str, dict[_Expected, None]] = {}  # in order of their coming
        self._by_end: list[tuple[float, int, _Expected]] = []
        self._number = 0
        self._keys = 0
        self.refused = 0

    def __len__(self) -> int:
        """Keys expected."""
        return self._keys

    def expect(self, worker: str, keys: bytes, start: int, until: float) -> None:
        """`worker` computes the blocks of the packed `keys` from place `start` on (it has those before, or they are
        expected too); believed until `until`, a moment on the caller's clock."""
        first = keys[start * KEY_BYTES : (start + 1) * KEY_BYTES]
        if not first:
            return
        count = len(keys) // KEY_BYTES - start
        if self._keys + count > self._max_keys:
            self.refused += 1
            return
        expected = _Expected(worker, keys, start, first)
        self._by_first.setdefault(first, []).append(expected)
        self._by_worker.setdefault(worker, {})[expected] = None
        self._number += 1
        heapq.heappush(self._by_end, (until, self._number, expected))
        self._keys += count

    def extend(self, found: dict[str, int], keys: bytes) -> None:
        """Lengthen the prefixes in `found` (numbers of keys by worker, from the index) by what is expected."""
        seen, reach, count = 0, max(found.values()) if found else 0, len(keys) // KEY_BYTES
        while self._by_first and seen <= reach and seen < count:  # nothing that begins deeper can count yet
            expectations = self._beginning(found, keys, seen, reach)
            seen = reach + 1
            if len(expectations) > 1:
                expectations.sort(key=attrgetter("start"))
            for expected in expectations:
                known = found.get(expected.worker, 0)
                if known < expected.start:
                    continue
                depth = expected.start + in_common(expected.keys, expected.start, keys, expected.start)
                if depth > known:
                    depth = found[expected.worker] = self._further(expected.worker, keys, depth)
                    reach = max(reach, depth)

    def _beginning(self, found: dict[str, int], keys: bytes, seen: int, reach: int) -> list[_Expected]:
        """What is expected of `keys` from a place between `seen` and `reach` on, as far as its worker has what is
        before; by worker or by key, whichever are fewer."""
        workers = set(found)
        if not seen:  # who has nothing yet can only begin at the first
            for expected in self._by_first.get(keys[:KEY_BYTES], ()):
                workers.add(expected.worker)
        near: list[_Expected] = []
        count = reach + 1 - seen
        if len(workers) <= count:
            for worker in workers:
                near += self._by_worker.get(worker, ())
        if len(workers) > count or len(near) > count:
            firsts = self._by_first.keys() & split_keys(keys[seen * KEY_BYTES : (reach + 1) * KEY_BYTES])
            near = [e for first in firsts for e in self._by_first[first]]
        return [e for e in near if seen <= e.start <= reach and keys.startswith(e.first, e.start * KEY_BYTES)]

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

    def _further(self, worker: str, keys: bytes, depth: int) -> int:
        """Behind what is expected may lie what is known."""
        while key := keys[depth * KEY_BYTES : (depth + 1) * KEY_BYTES]:
            if not self._index.holds(worker, key):
                break
            depth += 1
        return depth

    def _drop(self, expected: _Expected) -> None:
        self._keys -= len(expected)
        first = expected.first
        self._by_first[first].remove(expected)
        if not self._by_first[first]:
            del self._by_first[first]
        del self._by_worker[expected.worker][expected]
        if not self._by_worker[expected.worker]:
            del self._by_worker[expected.worker]
