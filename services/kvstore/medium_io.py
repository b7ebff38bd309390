"""I/O with deadlines on a disk or a device: a bounded pool of threads, each operation in an aligned buffer of its own.

A system call cannot be cancelled. When an operation's deadline passes, its caller is told so (a miss), and its buffer
and thread are out of use until the call has returned: a late answer cannot land in a buffer that is used again. With
every thread stuck, what comes next fails at its deadline, the breaker opens, and after that it fails at once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from services.kvstore.aligned import ALIGN, aligned_buffer
from services.kvstore.breaker import Breaker

T = TypeVar("T")


class MediumUnavailable(Exception):
    """The medium was not asked, did not answer in time, or answered with an error. `outcome` is the word for counters:
    "open", "late" or "error"."""

    def __init__(self, outcome: str, message: str) -> None:
        super().__init__(message)
        self.outcome = outcome


class MediumIo:
    """`threads` operations at once, each with a buffer of `buffer_bytes`; `deadline_s` from asking to the answer."""

    def __init__(self, breaker: Breaker, threads: int, deadline_s: float) -> None:
        self.breaker = breaker
        self.deadline_s = deadline_s
        self.late = 0
        """Operations whose caller has gone and whose thread has not returned."""
        self._pool = ThreadPoolExecutor(threads, "baton-tier")
        self._buffers: list[memoryview] = [aligned_buffer(ALIGN) for _ in range(threads)]
        self._free = asyncio.Semaphore(threads)

    async def run(
        self,
        size: int,
        work: Callable[[memoryview], T],
        *,
        before: Callable[[memoryview], None] = lambda buffer: None,
        after: Callable[[memoryview, T], None] = lambda buffer, result: None,
        ended: Callable[[], None] = lambda: None,
    ) -> T:
        """Run `work(buffer)` in a thread, with `before` and `after` on the loop around it, the latter only in time.

        `ended` is called once on every path, when no thread works on it any more: what `work` touches is busy until
        then. Raises MediumUnavailable; what `work` raises beyond OSError.
        """
        deadline = time.monotonic() + self.deadline_s
        if not self.breaker.allow(time.monotonic()):
            ended()
            raise MediumUnavailable("open", self.breaker.state(time.monotonic()))
        try:
            async with asyncio.timeout(self.deadline_s):
                await self._free.acquire()
        except TimeoutError:
            ended()
            self.breaker.failure(time.monotonic())
            raise MediumUnavailable("late", "every thread waits for the medium") from None
        except asyncio.CancelledError:
            ended()
            self.breaker.abandon()
            raise
        return await self._submit(size, work, before, after, ended, deadline)

    async def _submit(
        self,
        size: int,
        work: Callable[[memoryview], T],
        before: Callable[[memoryview], None],
        after: Callable[[memoryview, T], None],
        ended: Callable[[], None],
        deadline: float,
    ) -> T:
        whole = self._buffers.pop()
        if len(whole) < size:
            whole = aligned_buffer(size)
        buffer = whole[:size]
        try:
            before(buffer)
            future = asyncio.get_running_loop().run_in_executor(self._pool, work, buffer)
        except BaseException:
            self.breaker.abandon()
            self._give_back(whole, ended)
            raise
        try:
            done, _ = await asyncio.wait((future,), timeout=max(0.0, deadline - time.monotonic()))
            if not done:
                self.breaker.failure(time.monotonic())
                raise MediumUnavailable("late", f"no answer within {self.deadline_s} s")
            result = self._result(future)
            after(buffer, result)
            return result
        except asyncio.CancelledError:
            self.breaker.abandon()
            raise
        finally:
            if future.done():
                self._give_back(whole, ended)
            else:
                self.late += 1
                future.add_done_callback(lambda settled: self._settle(settled, whole, ended))

    def _result(self, future: asyncio.Future[T]) -> T:
        try:
            result = future.result()
        except OSError as error:
            self.breaker.failure(time.monotonic())
            raise MediumUnavailable("error", str(error)) from error
        except BaseException:
            self.breaker.abandon()
            raise
        self.breaker.success()
        return result

    def _settle(self, future: asyncio.Future[T], whole: memoryview, ended: Callable[[], None]) -> None:
        self.late -= 1
        if not future.cancelled():
            future.exception()  # the caller has been told already
        self._give_back(whole, ended)

    def _give_back(self, whole: memoryview, ended: Callable[[], None]) -> None:
        self._buffers.append(whole)
        self._free.release()
        ended()

    def close(self) -> None:
        """No new operation; those that hang end with the process."""
        self._pool.shutdown(wait=False, cancel_futures=True)
