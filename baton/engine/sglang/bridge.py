"""Calls from SGLang's threads into an event loop that runs in a thread of its own.

SGLang calls its storage from three threads (look up, load, back up), one call at a time each, and waits. A call here
waits at most its timeout. What it would have brought then is given to `discard` when it comes after all, so that
nothing that a coroutine took is lost between two threads.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class _Answer(Generic[T]):
    """Handed over once: to who waits, or to `discard` when nobody does any more."""

    def __init__(self, discard: Callable[[T], None] | None) -> None:
        self._discard = discard
        self._lock = threading.Lock()
        self._there = threading.Event()
        self._abandoned = False
        self._values: list[T] = []
        self._error: BaseException | None = None

    def put(self, value: T) -> None:
        with self._lock:
            if self._abandoned:
                if self._discard is not None:
                    self._discard(value)
                return
            self._values.append(value)
        self._there.set()

    def fail(self, error: BaseException) -> None:
        self._error = error
        self._there.set()

    def take(self, timeout_s: float) -> T:
        self._there.wait(timeout_s)
        with self._lock:
            if self._values:
                return self._values.pop()
            self._abandoned = True
        if self._error is not None:
            raise self._error
        raise TimeoutError(f"no answer from Baton's thread in {timeout_s:g} s")


class Bridge:
    """The loop and its thread, a daemon: SGLang's processes end without asking. `close` ends it."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def call(
        self, coroutine: Coroutine[Any, Any, T], timeout_s: float, discard: Callable[[T], None] | None = None
    ) -> T:
        """The coroutine's result. Raises what it raises, and TimeoutError (it is cancelled then). `discard` runs on the
        loop."""
        answer = _Answer(discard)
        task = asyncio.run_coroutine_threadsafe(_deliver(coroutine, answer), self.loop)
        try:
            return answer.take(timeout_s)
        except TimeoutError:
            task.cancel()
            raise

    def post(self, callback: Callable[[], None]) -> None:
        """Run on the loop, soon."""
        self.loop.call_soon_threadsafe(callback)

    def close(self, within_s: float = 5.0) -> None:
        """Stop the loop; idempotent."""
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join(within_s)
            if not self._thread.is_alive():
                self.loop.close()


async def _deliver(coroutine: Coroutine[Any, Any, T], answer: _Answer[T]) -> None:
    try:
        answer.put(await coroutine)
    except BaseException as error:
        answer.fail(error)
        if not isinstance(error, Exception):
            raise
