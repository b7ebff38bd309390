"""The worker's end of the socket to its engine process: calls, per-job messages, and the process's death."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Awaitable, Callable

import structlog

from baton.engine.torch import messages as m
from baton.errors import BatonError, Reason

CALL_S = 60.0
"""The longest that an engine may take to answer between two steps."""
KILL_S = 5.0
MAX_UNSENT_BYTES = 256 * 2**20

_log = structlog.get_logger()
_Answer = m.Reserved | m.Refused | m.Swapped | m.Held | m.Answer


class Link:
    """One child process and the socket to it."""

    def __init__(
        self, process: asyncio.subprocess.Process, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer
        self._last_number = 0
        self._taken = 0
        self._sent: deque[float] = deque()  # when each message that is not known to be taken went out
        self._calls: dict[int, asyncio.Future[m.ToWorker]] = {}
        self._inboxes: dict[int, asyncio.Queue[m.ToWorker | BatonError]] = {}
        self._task: asyncio.Task[None] | None = None
        self._error: BatonError | None = None

    @property
    def pid(self) -> int:
        """Of the engine process."""
        return self._process.pid

    def run(self, take: Callable[[m.ToWorker], Awaitable[None]], died: Callable[[BatonError], None]) -> None:
        """Receive from now on: `take` gets what belongs to no job, `died` the end, once.

        While `take` waits nothing more is received: the engine is held back.
        """
        self._task = asyncio.create_task(self._run(take, died), name="engine link")

    async def _run(self, take: Callable[[m.ToWorker], Awaitable[None]], died: Callable[[BatonError], None]) -> None:
        try:
            while True:
                message = await self.receive()
                if not self._answers(message):
                    await take(message)
        except BatonError as error:
            self.fail(self._error or error)
        except Exception as error:
            _log.exception("engine link broke")
            self.fail(BatonError(Reason.ENGINE_FAILED, f"{type(error).__name__}: {error}"))
        finally:
            died(self._error or BatonError(Reason.ENGINE_FAILED, "the engine was closed"))

    def _answers(self, message: m.ToWorker) -> bool:
        """Give a call or a job what belongs to it; whether it did belong to one."""
        if isinstance(message, _Answer):
            number = message.call if isinstance(message, m.Answer | m.Swapped | m.Held) else message.job
            call = self._calls.pop(number, None)
            if call is not None and not call.done():
                call.set_result(message)
        elif isinstance(message, m.Sealed | m.Prefilled | m.Failed | m.Embedded):
            inbox = self._inboxes.get(message.job)
            if inbox is not None:
                inbox.put_nowait(message)  # bounded by the prompt's blocks
        else:
            return False
        return True

    async def receive(self) -> m.ToWorker:
        """The next message. Raises BatonError(ENGINE_FAILED) when the process is gone."""
        try:
            head = await self._reader.readexactly(m.LENGTH.size)
            return m.to_worker.decode(await self._reader.readexactly(m.LENGTH.unpack(head)[0]))
        except (asyncio.IncompleteReadError, OSError) as error:
            raise BatonError(Reason.ENGINE_FAILED, "the engine process ended; its log says why") from error

    def check(self) -> None:
        """Raises the BatonError with which the engine ended, if it did."""
        if self._error is not None:
            raise self._error

    def fail(self, error: BatonError) -> None:
        """Give the engine up: every waiting call and prefill meets `error`, the process is killed."""
        if self._error is None:
            self._error = error
        for call in self._calls.values():
            if not call.done():
                call.set_exception(error)
        for inbox in self._inboxes.values():
            inbox.put_nowait(error)
        self._calls.clear()
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    def tell(self, message: object) -> None:
        """Send without waiting; dropped when the engine is gone. An engine that reads nothing for long is given up."""
        if self._error is not None or self._writer.is_closing():
            return
        self._writer.write(m.frame(message))
        self._sent.append(time.time())
        if self._writer.transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
            self.fail(BatonError(Reason.ENGINE_FAILED, "the engine does not take messages"))

    def owed_since(self, taken: int) -> float:
        """`time.time()` of the oldest message beyond the first `taken`; 0 when the engine has taken all."""
        while self._taken < taken and self._sent:
            self._taken += 1
            self._sent.popleft()
        return self._sent[0] if self._sent else 0.0

    async def ask(self, number: int, message: object, limit_s: float) -> m.ToWorker:
        """Send and wait for the answer under `number`. Raises BatonError(ENGINE_FAILED) on death or silence."""
        self.check()
        call: asyncio.Future[m.ToWorker] = asyncio.get_running_loop().create_future()
        self._calls[number] = call
        try:
            self.tell(message)
            async with asyncio.timeout(limit_s):
                return await call
        except TimeoutError:
            raise BatonError(Reason.ENGINE_FAILED, f"the engine said nothing for {limit_s:g} s") from None
        finally:
            self._calls.pop(number, None)

    def number(self) -> int:
        """One that no job and no call had before."""
        self._last_number += 1
        return self._last_number

    def open(self, job: int) -> asyncio.Queue[m.ToWorker | BatonError]:
        """Where messages of a prefill job arrive from now on, until `forget`."""
        self.check()
        inbox = self._inboxes[job] = asyncio.Queue()
        return inbox

    def forget(self, job: int) -> None:
        """Drop what still comes for a job."""
        self._inboxes.pop(job, None)

    async def close(self) -> None:
        """End the process and wait for it. Idempotent."""
        self._writer.close()
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()
        try:
            async with asyncio.timeout(KILL_S):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
