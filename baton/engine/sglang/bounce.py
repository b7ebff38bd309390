"""Slots through which pages are read from a store, before their bytes go into SGLang's pool.

Not into the pool at once, although that would save a copy: a one-sided read cannot be cancelled, and SGLang gives a
page to somebody else as soon as a load has failed. Here a slot that a late read may still write to stays aside until
the transport says that it is over. A page is also verified before any of its bytes is where SGLang could use them.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence

SWEEP_S = 0.05


class Bounce:
    """`slots` slots of `slot_bytes`, on one event loop. `quarantined` tells offsets that late reads may write to."""

    def __init__(self, slots: int, slot_bytes: int, quarantined: Callable[[], frozenset[int]]) -> None:
        self.slots = slots
        self._quarantined = quarantined
        self._free = [n * slot_bytes for n in range(slots)][::-1]
        self._aside: set[int] = set()
        self._given_back = asyncio.Event()

    @property
    def free(self) -> int:
        """Slots to be had now."""
        self._sweep()
        return len(self._free)

    @property
    def aside(self) -> int:
        """Slots that late reads may still write to."""
        self._sweep()
        return len(self._aside)

    async def take(self, most: int) -> list[int]:
        """Offsets of 1 to `most` slots; waits while there is none. The caller gives every one back."""
        while not self.free:
            self._given_back.clear()
            with contextlib.suppress(TimeoutError):  # nobody says when a late read is over: look again
                async with asyncio.timeout(SWEEP_S if self._aside else None):
                    await self._given_back.wait()
        return [self._free.pop() for _ in range(min(most, len(self._free)))]

    def give_back(self, offsets: Sequence[int]) -> None:
        """These are no longer used by who took them."""
        late = self._quarantined() if offsets else frozenset()
        self._aside.update(offset for offset in offsets if offset in late)
        self._free.extend(offset for offset in offsets if offset not in late)
        self._given_back.set()

    def _sweep(self) -> None:
        if self._aside:
            over = self._aside - self._quarantined()
            self._aside -= over
            self._free.extend(over)
