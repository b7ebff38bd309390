"""Who goes first. ARC (Megiddo and Modha, FAST 2003): what was used once and what was used again are two lists, each
with a ghost list of keys that lately fell out of it; a hit on a ghost moves the border between the two.

Measured on the Mooncake traces against LRU and S3-FIFO it keeps the most (`baton bench eviction`, table in the README).
Of one prompt the end goes before the beginning, because a block is of no use without those before it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Watermarks:
    """Above `high` of the slots in use, evict down to `low`: both are shares of 1."""

    high: float
    low: float

    def surplus(self, wanted: int, total: int) -> int:
        """How many slots must go so that `wanted` fit: 0 up to the high mark, else down to the low one."""
        if wanted <= int(self.high * total):
            return 0
        return wanted - int(self.low * total)


class Arc:
    """Keys that may be evicted, in an order. `capacity` is how many blocks fit; ghosts are at most as many again."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._once: OrderedDict[bytes, None] = OrderedDict()
        self._often: OrderedDict[bytes, None] = OrderedDict()
        self._once_ghost: OrderedDict[bytes, None] = OrderedDict()
        self._often_ghost: OrderedDict[bytes, None] = OrderedDict()
        self._held: dict[bytes, bool] = {}
        self._target = 0.0
        """How many keys the list of those used once may have."""

    def __len__(self) -> int:
        """How many may be evicted now: held ones may not."""
        return len(self._once) + len(self._often)

    def __contains__(self, key: object) -> bool:
        return key in self._once or key in self._often

    @property
    def ghosts(self) -> int:
        """Keys that are remembered though they are not here."""
        return len(self._once_ghost) + len(self._often_ghost)

    def add(self, key: bytes) -> None:
        """A block came in."""
        if key in self._once_ghost:
            self._move_border(max(1.0, len(self._often_ghost) / len(self._once_ghost)))
            del self._once_ghost[key]
            self._often[key] = None
        elif key in self._often_ghost:
            self._move_border(-max(1.0, len(self._once_ghost) / len(self._often_ghost)))
            del self._often_ghost[key]
            self._often[key] = None
        else:
            self._once[key] = None

    def use(self, chain: Sequence[bytes]) -> None:
        """These keys, a prompt in order, were used now; the others among them are ignored."""
        for key in reversed(chain):
            if key in self:
                self._once.pop(key, None)
                self._often[key] = None
                self._often.move_to_end(key)

    def hold(self, key: bytes) -> None:
        """The key may not be evicted until `release`. Once, whoever else holds it."""
        self._held[key] = key in self._often
        self._once.pop(key, None)
        self._often.pop(key, None)

    def release(self, chain: Sequence[bytes], used: bool) -> None:
        """These may be evicted again; `used` when somebody wanted their bytes."""
        for key in reversed(chain):
            often = self._held.pop(key)
            (self._often if often or used else self._once)[key] = None

    def victim(self) -> bytes | None:
        """The next to go; None when nobody may."""
        if self._once and (len(self._once) > self._target or not self._often):
            return next(iter(self._once))
        return next(iter(self._often), None)

    def evict(self, key: bytes) -> None:
        """The key goes to make room: it is remembered for a while."""
        ghost = self._once_ghost if key in self._once else self._often_ghost
        self.forget(key)
        ghost[key] = None
        while len(self._once) + len(self._once_ghost) > self.capacity and self._once_ghost:
            self._once_ghost.popitem(last=False)
        while len(self) + self.ghosts > 2 * self.capacity and self._often_ghost:
            self._often_ghost.popitem(last=False)

    def forget(self, key: bytes) -> None:
        """The key is gone, held or not, and not remembered."""
        self._held.pop(key, None)
        self._once.pop(key, None)
        self._often.pop(key, None)

    def _move_border(self, step: float) -> None:
        self._target = min(float(self.capacity), max(0.0, self._target + step))
