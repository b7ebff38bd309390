"""Reads that may still write into slots which nobody waits for any more."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence

import structlog

from baton.errors import BatonError, Reason
from baton.transfer.port import ReadReport

QUARANTINE_CAP = 0.25
"""Above this share of the pool waiting for late reads the engine is given up: a new epoch starts with every slot."""

_log = structlog.get_logger()


class LateReads:
    """Slots in quarantine, and the tasks that wait for their reads to end. The pool's owner keeps the slots apart.

    `settle` gives slots back to the pool; `give_up` ends the engine when too many of its slots wait.
    """

    def __init__(
        self, settle: Callable[[Sequence[int]], None], give_up: Callable[[BatonError], None], pool_blocks: int
    ) -> None:
        self.slots: set[int] = set()
        self._late: set[int] = set()
        """Those of them whose read has passed its deadline."""
        self._settled = settle
        self._give_up = give_up
        self._cap = QUARANTINE_CAP * pool_blocks
        self._tasks: set[asyncio.Task[None]] = set()

    def abandon(self, read: asyncio.Task[ReadReport], slots: Sequence[int]) -> None:
        """Nobody waits for `read` now; its slots are back when it is over, late blocks included.

        It is not late yet, and does not count as such: most are over in milliseconds.
        """
        self.slots.update(slots)
        self._own(self._outlive(read, slots))

    def wait(self, settled: asyncio.Future[None], slots: Sequence[int]) -> None:
        """Slots are back when `settled` is done."""
        self._hold(slots)
        self._own(self._settle_after(settled, slots))

    def _hold(self, slots: Sequence[int]) -> None:
        self.slots.update(slots)
        self._late.update(slots)
        if len(self._late) > self._cap:
            self._give_up(BatonError(Reason.ENGINE_FAILED, f"{len(self._late)} slots wait for late reads"))

    def _own(self, waiting: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(waiting, name="late kv read")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _outlive(self, read: asyncio.Task[ReadReport], slots: Sequence[int]) -> None:
        try:
            report = await read
            if report.settled is not None:
                self._hold(slots)
                await asyncio.shield(report.settled)
        except Exception:
            _log.exception("an abandoned read failed")
        finally:
            self._settle(slots)

    async def _settle_after(self, settled: asyncio.Future[None], slots: Sequence[int]) -> None:
        try:
            await asyncio.shield(settled)
        finally:
            self._settle(slots)

    def _settle(self, slots: Sequence[int]) -> None:
        self.slots.difference_update(slots)
        self._late.difference_update(slots)
        self._settled(slots)

    async def close(self) -> None:
        """Stop waiting; the pool is going away."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
