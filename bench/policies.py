"""Eviction policies for comparison: LRU, S3-FIFO and ARC, each with room for `capacity` keys.

The store keeps the winner (`services/kvstore/eviction.py`); the others live here, so that the choice can be measured
again on other traces. `use(key)` is one access: it says whether the key was there, and puts it there if it was not.
"""

from __future__ import annotations

import abc
from collections import OrderedDict, deque


class Policy(abc.ABC):
    """A cache of keys."""

    name: str

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity

    @abc.abstractmethod
    def __contains__(self, key: object) -> bool: ...

    @abc.abstractmethod
    def use(self, key: int) -> bool:
        """One access; whether it was a hit."""


class Lru(Policy):
    """Least recently used goes first."""

    name = "lru"

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._order: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, key: object) -> bool:
        return key in self._order

    def use(self, key: int) -> bool:
        hit = key in self._order
        self._order[key] = None
        self._order.move_to_end(key)
        if len(self._order) > self.capacity:
            self._order.popitem(last=False)
        return hit


class S3Fifo(Policy):
    """S3-FIFO (Yang et al., SOSP 2023): a small queue for the new (10 %), a main queue for what was used again, a
    ghost queue of keys that fell out of the small one. Frequencies are capped at 3; from the small queue more than one
    use leads to the main one."""

    name = "s3-fifo"

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._small: deque[int] = deque()
        self._main: deque[int] = deque()
        self._ghost: OrderedDict[int, None] = OrderedDict()
        self._frequency: dict[int, int] = {}
        self._small_share = max(1, capacity // 10)

    def __contains__(self, key: object) -> bool:
        return key in self._frequency

    def use(self, key: int) -> bool:
        if key in self._frequency:
            self._frequency[key] = min(3, self._frequency[key] + 1)
            return True
        while len(self._frequency) >= self.capacity:
            self._evict()
        self._frequency[key] = 0
        if key in self._ghost:
            del self._ghost[key]
            self._main.append(key)
        else:
            self._small.append(key)
        return False

    def _evict(self) -> None:
        if len(self._small) >= self._small_share or not self._main:
            self._evict_small()
        else:
            self._evict_main()

    def _evict_small(self) -> None:
        while self._small:
            key = self._small.popleft()
            if self._frequency[key] <= 1:
                del self._frequency[key]
                self._ghost[key] = None
                if len(self._ghost) > self.capacity - self._small_share:
                    self._ghost.popitem(last=False)
                return
            self._frequency[key] = 0
            self._main.append(key)

    def _evict_main(self) -> None:
        while True:
            key = self._main.popleft()
            if not self._frequency[key]:
                del self._frequency[key]
                return
            self._frequency[key] -= 1
            self._main.append(key)


class Arc(Policy):
    """ARC (Megiddo and Modha, FAST 2003): lists of what was used once and more often, each with a ghost list; hits on
    the ghosts move the border between the two."""

    name = "arc"

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._once: OrderedDict[int, None] = OrderedDict()
        self._often: OrderedDict[int, None] = OrderedDict()
        self._once_ghost: OrderedDict[int, None] = OrderedDict()
        self._often_ghost: OrderedDict[int, None] = OrderedDict()
        self._target = 0.0

    def __contains__(self, key: object) -> bool:
        return key in self._once or key in self._often

    def use(self, key: int) -> bool:
        if key in self._once or key in self._often:
            self._once.pop(key, None)
            self._often[key] = None
            self._often.move_to_end(key)
            return True
        if key in self._once_ghost:
            step = max(1.0, len(self._often_ghost) / len(self._once_ghost))
            self._target = min(float(self.capacity), self._target + step)
            self._replace(False)
            del self._once_ghost[key]
            self._often[key] = None
        elif key in self._often_ghost:
            step = max(1.0, len(self._once_ghost) / len(self._often_ghost))
            self._target = max(0.0, self._target - step)
            self._replace(True)
            del self._often_ghost[key]
            self._often[key] = None
        else:
            self._make_room()
            self._once[key] = None
        return False

    def _make_room(self) -> None:
        seen_once = len(self._once) + len(self._once_ghost)
        total = seen_once + len(self._often) + len(self._often_ghost)
        if seen_once >= self.capacity:
            if len(self._once) < self.capacity:
                self._once_ghost.popitem(last=False)
                self._replace(False)
            else:
                self._once.popitem(last=False)
        elif total >= self.capacity:
            if total >= 2 * self.capacity:
                self._often_ghost.popitem(last=False)
            self._replace(False)

    def _replace(self, in_often_ghost: bool) -> None:
        if len(self._once) + len(self._often) < self.capacity:
            return
        once = len(self._once)
        if once and (once > self._target or (in_often_ghost and once == self._target) or not self._often):
            key, _ = self._once.popitem(last=False)
            self._once_ghost[key] = None
        else:
            key, _ = self._often.popitem(last=False)
            self._often_ghost[key] = None


POLICIES: tuple[type[Policy], ...] = (Lru, S3Fifo, Arc)
