"""What an engine tells its worker: steps' tokens and cache changes, each for one consumer, bounded, ended for good."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from baton.engine.port import CacheEvent, TokenEvent
from baton.errors import BatonError

MAX_CACHE_EVENTS = 1024
MAX_STEPS = 1024
"""Steps that may wait for the worker; then `put` waits."""


class StepFeed:
    """Steps' token events, until the engine fails: every consumer from then on meets the error."""

    def __init__(self, limit: int = MAX_STEPS) -> None:
        self._steps: asyncio.Queue[list[TokenEvent] | BatonError] = asyncio.Queue(limit)

    @property
    def full(self) -> bool:
        """Whether `put` would wait."""
        return self._steps.full()

    async def put(self, events: list[TokenEvent]) -> None:
        """One step's. Waits for room: that holds the engine back."""
        await self._steps.put(events)

    def put_nowait(self, events: list[TokenEvent]) -> None:
        """One step's, of an engine that cannot be held back. Raises asyncio.QueueFull."""
        self._steps.put_nowait(events)

    def fail(self, error: BatonError) -> None:
        """The last word."""
        if self._steps.full():
            self._steps.get_nowait()  # its requests end with the engine
        self._steps.put_nowait(error)

    async def stream(self) -> AsyncIterator[list[TokenEvent]]:
        """See `Engine.events`."""
        while True:
            step = await self._steps.get()
            if isinstance(step, BatonError):
                self._steps.put_nowait(step)  # every later consumer meets it too
                raise step
            yield step


class CacheFeed:
    """Changes of the prefix cache. Who does not keep up gets the state as it is then."""

    def __init__(self) -> None:
        self._keys: dict[bytes, None] = {}
        self._events: asyncio.Queue[CacheEvent | None] = asyncio.Queue(MAX_CACHE_EVENTS)

    def tell(self, stored: list[bytes], removed: list[bytes]) -> None:
        """One change."""
        for key in stored:
            self._keys[key] = None
        for key in removed:
            self._keys.pop(key, None)
        try:
            self._events.put_nowait(CacheEvent(tuple(stored), tuple(removed)))
        except asyncio.QueueFull:
            # Nobody kept up: what is queued is worth less than the state now.
            while not self._events.empty():
                self._events.get_nowait()
            self._events.put_nowait(CacheEvent(tuple(self._keys), cleared=True))

    def end(self) -> None:
        """Nothing follows."""
        if self._events.full():
            self._events.get_nowait()
        self._events.put_nowait(None)

    async def stream(self) -> AsyncIterator[list[CacheEvent]]:
        """See `Engine.cache_events`."""
        while True:
            queued = [await self._events.get()]
            while not self._events.empty():
                queued.append(self._events.get_nowait())
            events = [event for event in queued if event is not None]
            if events:
                yield events
            if None in queued:
                self._events.put_nowait(None)  # every later consumer meets the end too
                return
