"""Where bodies are read: small ones in threads, large ones in a process of their own.

Taking JSON apart holds the interpreter's lock from the first byte to the last (measured: 0.2 s for 27 MB of token
ids, 1.8 s for 27 MB of small lists), in whichever thread it runs: no stream gets its tokens meanwhile and no probe its
answer. A process of its own holds up nobody. It starts with the first large body, takes one at a time, ends with us;
when it dies of a body, or is too slow, only that body's request fails. A request that goes away meanwhile is read to
its end all the same: ending the process would make the next one wait for a new one.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import structlog

from baton.errors import BatonError, Reason
from baton.model.card import Model
from services.frontend.asked import Asked, Reading, Unread, unpack
from services.frontend.metrics import FrontendMetrics
from services.frontend.voices import AUTO

THREADS = 2
LARGE_BYTES = 256 << 10
"""Bodies from here on are read in the process: below, the interpreter's lock is held for some milliseconds at most."""
MAX_WAITING = {"thread": 512, "process": 8}
"""Bodies that may wait to be read; more are refused with NO_CAPACITY."""
START_S = 60.0
READ_S = 30.0
"""The longest that a large body may take to be read."""
SETTLE_S = 1.0
"""How long a body that nobody waits for may hold up the next: about what a new process takes to start (measured: 0.6 s
with a small model's tokenizer)."""
SLICE_BYTES = 1 << 20
ASK = struct.Struct("<bQQqQ")
"""Which body (Api); the context's tokens; bytes of the tenant's name that follows, of the earlier conversation behind
it (-1: none), and of the body behind that."""
ANSWER = struct.Struct("<Q")
"""Bytes of the answer that follows."""

_log = structlog.get_logger()


class BodyReader:
    """Reads bodies for one model, in order of arrival. `close` on every path."""

    def __init__(self, model: Model, metrics: FrontendMetrics, tools: str = AUTO, reasoning: str = AUTO) -> None:
        """`tools` and `reasoning` name parsers of answers, as `Reading`'s."""
        self.reading = Reading(model, tools, reasoning)
        self._metrics = metrics
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="reader")
        self._process = _Process(model, self.reading.voices.names)
        self._waiting = dict.fromkeys(MAX_WAITING, 0)

    async def read(self, unread: Unread) -> Asked:
        """See `Reading.read`. Raises BatonError, NO_CAPACITY when too many bodies wait included."""
        where = "thread" if unread.size < LARGE_BYTES else "process"
        if self._waiting[where] >= MAX_WAITING[where]:
            self._metrics.refused.labels("reader").inc()
            raise BatonError(Reason.NO_CAPACITY, "Too many prompts are waiting to be read.")
        self._waiting[where] += 1
        self._metrics.bodies.labels(where).inc()
        try:
            asked = await self._read(where, unread)
            for prompt in asked.prompts if asked.chat else ():
                self._metrics.chat_tokens.labels("reused").inc(prompt.reused)
                self._metrics.chat_tokens.labels("tokenised").inc(len(prompt.ids) - prompt.reused)
            return asked
        finally:
            self._waiting[where] -= 1

    async def _read(self, where: str, unread: Unread) -> Asked:
        if where == "process":
            return await self._process.read(unread)
        return await asyncio.get_running_loop().run_in_executor(self._threads, self.reading.read, unread)

    async def close(self) -> None:
        """Stop; bodies that wait are dropped."""
        await self._process.close()
        self._threads.shutdown(wait=True, cancel_futures=True)


class _Process:
    """The process for large bodies, and the socket to it."""

    def __init__(self, model: Model, parsers: tuple[str, str]) -> None:
        self._model = model
        self._parsers = parsers
        self._turn = asyncio.Lock()
        self._exchange: asyncio.Task[bytes] | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def read(self, unread: Unread) -> Asked:
        async with self._turn:
            await self._settle()
            ours = replace(unread, body=bytes(unread.body))  # the caller's goes when its request does
            exchange = self._exchange = asyncio.create_task(self._answer(ours), name="large body")
            await asyncio.wait((exchange,))  # cancelled here, it goes on
            self._exchange = None
        return unpack(exchange.result())

    async def _settle(self) -> None:
        """Let the exchange of a request that has gone away end, in `SETTLE_S` or with the process."""
        left = self._exchange
        if left is None:
            return
        await asyncio.wait((left,), timeout=SETTLE_S)
        if not left.done():
            left.cancel()
        await asyncio.gather(left, return_exceptions=True)
        self._exchange = None

    async def _answer(self, unread: Unread) -> bytes:
        for last in (False, True):
            answered = False
            try:
                answer = await self._ask(unread)
                answered = True
                return answer
            except TimeoutError:
                raise BatonError(Reason.REQUEST_TOO_LARGE, f"The body takes over {READ_S:g} s to read.") from None
            except (OSError, asyncio.IncompleteReadError) as error:
                # Killed by somebody, or by this body: the second time it is the body.
                _log.warning("the process that reads large bodies ended", bytes=unread.size, error=repr(error))
                if last:
                    raise BatonError(Reason.REQUEST_TOO_LARGE, "The body takes too much memory to read.") from error
            finally:
                # Cancelled or late in mid-exchange: what it would answer next belongs to nobody.
                if not answered:
                    await self._end()
        raise AssertionError("the second try returns or raises")

    async def _ask(self, unread: Unread) -> bytes:
        if self._streams is None:
            try:
                async with asyncio.timeout(START_S):
                    self._streams = await self._start()
                    await self._streams[0].readexactly(1)
            except TimeoutError:  # no fault of the body
                message = f"The process that reads large bodies has not started in {START_S:g} s."
                raise BatonError(Reason.NO_CAPACITY, message) from None
        reader, writer = self._streams
        async with asyncio.timeout(READ_S):
            tenant, before = unread.tenant.encode(), -1 if unread.earlier is None else len(unread.earlier)
            writer.write(ASK.pack(unread.api, unread.limit, len(tenant), before, len(unread.body)))
            for part in (tenant, unread.earlier or b"", unread.body):
                for start in range(0, len(part), SLICE_BYTES):
                    writer.write(memoryview(part)[start : start + SLICE_BYTES])
                    await writer.drain()
            (size,) = ANSWER.unpack(await reader.readexactly(ANSWER.size))
            return await reader.readexactly(size)

    async def _start(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        ours, theirs = socket.socketpair()
        try:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "services.frontend.large",
                json.dumps([str(self._model.path), self._model.name, *self._parsers, theirs.fileno()]),
                pass_fds=(theirs.fileno(),),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=sys.stderr,
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        return await asyncio.open_connection(sock=ours)

    async def close(self) -> None:
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.cancel()
            await asyncio.gather(exchange, return_exceptions=True)
        await self._end()

    async def _end(self) -> None:
        streams, self._streams = self._streams, None
        process, self._process = self._process, None
        if streams is not None:
            streams[1].close()
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
