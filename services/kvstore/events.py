"""What changes in the store, told to whoever watches: a snapshot first, then every change, numbered without a hole.

A watcher that does not keep up costs a bounded number of waiting events: beyond that its queue is dropped and it gets a
new snapshot. Numbers count what one watcher was sent, so it needs no history of others.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Change:
    """Keys that came to and went from a tier; `cleared` forgets everything before it, of all tiers. `speeds`: nothing
    came or went, a tier's speed or state is another one. `alive`: nothing at all, but somebody is here to say so; not
    told to whom something else waits for."""

    tier: str = "host"
    stored: tuple[bytes, ...] = ()
    removed: tuple[bytes, ...] = ()
    cleared: bool = False
    speeds: bool = False
    alive: bool = False


@dataclass
class _Watcher:
    waiting: deque[Change] = field(default_factory=deque)
    behind: bool = True
    wake: asyncio.Event = field(default_factory=asyncio.Event)


class Events:
    """`snapshot()` must return every key that is in the store at that moment, a change for each tier. `overflowed()` is
    called when a watcher has fallen so far behind that it gets a new one."""

    def __init__(
        self,
        snapshot: Callable[[], Sequence[Change]],
        queue: int = 1024,
        overflowed: Callable[[], None] = lambda: None,
    ) -> None:
        self._snapshot = snapshot
        self._queue = queue
        self._watchers: list[_Watcher] = []
        self._overflowed = overflowed

    @property
    def watchers(self) -> int:
        """How many watch now."""
        return len(self._watchers)

    def publish(self, change: Change) -> None:
        """Tell everybody. Never waits."""
        for watcher in self._watchers:
            if watcher.behind or (change.alive and watcher.waiting):  # what waits says already that we are alive
                continue
            if len(watcher.waiting) >= self._queue:
                watcher.waiting.clear()
                watcher.behind = True
                self._overflowed()
            else:
                watcher.waiting.append(change)
            watcher.wake.set()

    async def watch(self) -> AsyncGenerator[tuple[int, Change], None]:
        """(number, change) for ever, the first one `cleared` with what is here. `speeds` and `alive` have the number of
        the one before. Close it when done."""
        watcher = _Watcher()
        self._watchers.append(watcher)
        number = 0
        try:
            while True:
                watcher.wake.clear()
                if watcher.behind:
                    watcher.behind = False
                    watcher.waiting.extend(self._snapshot())
                if not watcher.waiting:
                    await watcher.wake.wait()
                    continue
                change = watcher.waiting.popleft()
                number += not (change.speeds or change.alive)
                yield number, change
        finally:
            self._watchers.remove(watcher)
