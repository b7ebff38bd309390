"""Owned background tasks: none is forgotten, and a failure is seen."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import structlog

_log = structlog.get_logger()
T = TypeVar("T")


class Background:
    """The tasks of one owner. A failed task is logged, kept in `failures`, and told to `on_failure`."""

    def __init__(self, name: str, on_failure: Callable[[BaseException], None] | None = None) -> None:
        self.name = name
        self.failures = 0
        self._on_failure = on_failure
        self._tasks: set[asyncio.Task[Any]] = set()

    def spawn(self, coroutine: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        """Run `coroutine` until it ends or `close`."""
        task = asyncio.create_task(coroutine, name=f"{self.name}: {name}")
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def __len__(self) -> int:
        return len(self._tasks)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is None:
            return
        self.failures += 1
        _log.error("background task failed", task=task.get_name(), exc_info=error)
        if self._on_failure is not None:
            self._on_failure(error)

    async def close(self) -> None:
        """Cancel what still runs and wait for it (never for the caller's own task)."""
        tasks = [t for t in self._tasks if t is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
