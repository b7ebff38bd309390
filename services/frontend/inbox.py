"""What waits between the session streams and a client: bounded, so a client that does not read costs little."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import Generic, TypeVar

from baton.errors import BatonError, Reason

MAX_ITEMS = 8192

T = TypeVar("T")


class Inbox(Generic[T]):
    """A bounded queue with one reader. Putting never waits; over the bound the reader is told SLOW_CLIENT."""

    def __init__(self, limit: int = MAX_ITEMS) -> None:
        self._items: deque[T] = deque()
        self._limit = limit
        self._some = asyncio.Event()
        self.overflowed = False

    def put(self, item: T) -> None:
        """Add an item; after an overflow nothing is kept any more."""
        if len(self._items) >= self._limit:
            self.overflowed = True
        if self.overflowed:
            self._items.clear()
        else:
            self._items.append(item)
        self._some.set()

    async def take(self, deadline: float) -> list[T]:
        """Everything that is there, at least one item, oldest first.

        Raises BatonError: DEADLINE_EXCEEDED when `deadline` (`time.time()` seconds) passes first, SLOW_CLIENT after an
        overflow.
        """
        if not self._some.is_set():
            try:
                async with asyncio.timeout(max(0.0, deadline - time.time())):
                    await self._some.wait()
            except TimeoutError:
                raise BatonError(Reason.DEADLINE_EXCEEDED, "The request took longer than it may.") from None
        if self.overflowed:
            raise BatonError(Reason.SLOW_CLIENT, "The client does not read what it asked for.")
        self._some.clear()
        items = list(self._items)
        self._items.clear()
        return items
