"""Who goes first: least recently used, and of one prompt the end before the beginning."""

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


class LeastRecentlyUsed:
    """Keys that may be evicted, in the order in which they would be."""

    def __init__(self) -> None:
        self._order: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, key: object) -> bool:
        return key in self._order

    def touch(self, chain: Sequence[bytes]) -> None:
        """These keys, a prompt in order, were used now. A block is of no use without those before it: they go last."""
        for key in reversed(chain):
            self._order[key] = None
            self._order.move_to_end(key)

    def remove(self, key: bytes) -> None:
        """The key may not be evicted any more (pinned), or is gone."""
        self._order.pop(key, None)

    def victim(self) -> bytes | None:
        """The next to go; None when nobody may."""
        return next(iter(self._order), None)
