"""Eviction policies for comparison: LRU, S3-FIFO and ARC, each with room for `capacity` keys.

The store keeps the winner, and it is the store's own code that runs here; the others live here, so that the choice can
be measured again on other traces. `use(key)` is one access: it says whether the key was there, and puts it there if it
was not.
"""

from __future__ import annotations

import abc
from collections import OrderedDict, deque

from services.kvstore.eviction import Arc as StoreArc


class Policy(abc.ABC):
    """A cache of keys."""

    name: str

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity

    @abc.abstractmethod
    def __contains__(self, key: object) -> bool: ...

    @abc.abstractmethod
    def use(self, key: bytes) -> bool:
        """One access; whether it was a hit."""


class Lru(Policy):
    """Least recently used goes first."""

    name = "lru"

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._order: OrderedDict[bytes, None] = OrderedDict()

    def __contains__(self, key: object) -> bool:
        return key in self._order

    def use(self, key: bytes) -> bool:
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
        self._small: deque[bytes] = deque()
        self._main: deque[bytes] = deque()
        self._ghost: OrderedDict[bytes, None] = OrderedDict()
        self._frequency: dict[bytes, int] = {}
        self._small_share = max(1, capacity // 10)

    def __contains__(self, key: object) -> bool:
        return key in self._frequency

    def use(self, key: bytes) -> bool:
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
    """ARC (Megiddo and Modha, FAST 2003), as the store has it."""

    name = "arc"

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._arc = StoreArc(capacity)

    def __contains__(self, key: object) -> bool:
        return key in self._arc

    def use(self, key: bytes) -> bool:
        if key in self._arc:
            self._arc.use([key])
            return True
        if len(self._arc) >= self.capacity and (victim := self._arc.victim()) is not None:
            self._arc.evict(victim)
        self._arc.add(key)
        return False


POLICIES: tuple[type[Policy], ...] = (Lru, S3Fifo, Arc)
