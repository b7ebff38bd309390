"""One long-lived session stream to a worker: every event of every request that this frontend submitted there.

A session is lost when its stream ends, when it is silent, when the worker's engine is stuck, or when another process
answers. Its requests and the routers are told at once, and it is opened again with jittered back-off under a new name.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import secrets
import time
from collections.abc import Callable
from enum import StrEnum
from typing import Protocol

import grpc
import structlog

from baton.engine import progress
from baton.errors import BatonError, Reason
from baton.rpc.channel import Channels
from baton.rpc.errors import from_failure, from_rpc
from baton.rpc.patience import Patience
from baton.v1 import worker_pb2, worker_pb2_grpc
from services.frontend.metrics import FrontendMetrics

SILENCE_S = 1.0
"""Heartbeats come five times a second, half as often from an idle worker: a session silent for so long is lost."""
OPEN_TIMEOUT_S = 3.0
"""How long a worker may take to answer a new session."""
SUBMIT_TIMEOUT_S = 5.0
ABORT_TIMEOUT_S = 2.0
_BACKOFF_S = (0.05, 2.0)

_log = structlog.get_logger()


class Loss(StrEnum):
    """Why a session was lost. All but ENDED can be false alarms: they cost a resume, and lose nothing."""

    ENDED = "ended"
    SILENT = "silent"
    STUCK = "stuck"
    GAP = "gap"
    RESTARTED = "restarted"


_TOLD = {
    Loss.SILENT: "is silent",
    Loss.STUCK: "is there, but its engine is stuck",
    Loss.GAP: "said something that never arrived",
    Loss.RESTARTED: "is another process now",
}


class Sink(Protocol):
    """Who takes the events of one attempt."""

    def on_event(self, event: worker_pb2.Event) -> None:
        """An event of this attempt, in the order of the stream."""

    def on_lost(self, error: BatonError) -> None:
        """The session is gone, and with it the attempt. Nothing follows."""


AttemptKey = tuple[str, int]


class Session:
    """The session stream to one worker process, and the calls that go beside it."""

    def __init__(
        self,
        worker: str,
        address: str,
        frontend: str,
        metrics: FrontendMetrics,
        failed: Callable[[str], None],
    ) -> None:
        """`failed` is called with the worker's id when it can no longer be counted on."""
        self.worker = worker
        self.address = address
        self.heartbeat: worker_pb2.Heartbeat | None = None
        self.alive_at = time.monotonic()
        """The worker's last sign of progress: its last frame, or when the step began in which its engine is stuck."""
        self._frontend = frontend
        self._channels = Channels()
        self._metrics = metrics
        self._failed = failed
        self._name = ""
        self._epoch = 0
        self._seq = 0
        self._open = asyncio.Event()
        self._tried = asyncio.Event()
        """Set from the first time on that the stream opened or failed to."""
        self._retry = asyncio.Event()
        self._lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._sinks: dict[AttemptKey, Sink] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._retired = asyncio.Event()

    @property
    def retired(self) -> bool:
        """Whether the worker has left: nothing new goes here."""
        return self._retired.is_set()

    @property
    def connected(self) -> bool:
        """Whether the stream is up."""
        return self._open.is_set()

    @property
    def epoch(self) -> int:
        """Of the process that answers: news of its restart come here before they come to the registry."""
        return self._epoch

    @property
    def draining(self) -> bool:
        """Whether the worker said that it takes nothing new."""
        return self.heartbeat is not None and self.heartbeat.draining

    @property
    def load(self) -> int:
        """Requests that the worker runs and holds, as its last heartbeat said."""
        return self.heartbeat.running + self.heartbeat.waiting if self.heartbeat is not None else 0

    async def run(self) -> None:
        """Keep the stream open until the worker has left and its last request here has ended."""
        streaming = asyncio.create_task(self._keep_streaming(), name=f"stream {self.worker}")
        leaving = asyncio.create_task(self._left(), name=f"leave {self.worker}")
        try:
            await asyncio.wait({streaming, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if streaming.done():
                streaming.result()
        finally:
            for task in (streaming, leaving):
                task.cancel()
            await asyncio.gather(streaming, leaving, return_exceptions=True)
            await self._channels.close()
            self._lose(BatonError(Reason.SESSION_LOST, f"the session with {self.worker} was closed"))

    async def _left(self) -> None:
        await self._retired.wait()
        await self._idle.wait()

    async def _keep_streaming(self) -> None:
        low, high = _BACKOFF_S
        wait = low
        while True:
            why, error = await self._stream()
            wait = min(high, wait * 2)
            if not self._tried.is_set():
                _log.info("session not opened", worker=self.worker, address=self.address, why=why, error=str(error))
            if self.connected:
                wait = low
                self._metrics.sessions_lost.labels(self.worker, why).inc()
                self._failed(self.worker)
                _log.info("session lost", worker=self.worker, address=self.address, why=why, error=str(error))
            self._lose(error)
            self._retry.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait * random.uniform(0.5, 1.0)):
                    await self._retry.wait()
                    wait = low

    async def submit(self, request: worker_pb2.SubmitRequest, sink: Sink, deadline: float) -> None:
        """Start an attempt whose events go to `sink` (events may come before this returns).

        `deadline` is `time.time()` seconds. Raises BatonError: the worker's refusal, DECODE_UNAVAILABLE when it cannot
        be reached, or is lost before it has answered. After a raise nothing more comes to the sink.
        """
        key = (request.attempt.uid, request.attempt.attempt)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(OPEN_TIMEOUT_S, max(0.0, deadline - time.time()))):
                await self._tried.wait()
        if not self.connected:
            raise BatonError(Reason.DECODE_UNAVAILABLE, f"worker {self.worker} cannot be reached")
        request.session = self._name
        self._sinks[key] = sink
        self._idle.clear()
        accepted = False
        try:
            timeout = min(SUBMIT_TIMEOUT_S, max(0.05, deadline - time.time()))
            reply = await self._unless_lost(self._stub().Submit(request, timeout=timeout))
            if reply.HasField("failure"):
                raise from_failure(reply.failure)
            accepted = True
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNAVAILABLE:  # not: it took longer than this request may
                self._failed(self.worker)
            raise from_rpc(error, Reason.DECODE_UNAVAILABLE) from error
        finally:
            if not accepted:
                self.detach(key)

    async def _unless_lost(
        self, call: grpc.aio.UnaryUnaryCall[worker_pb2.SubmitRequest, worker_pb2.SubmitReply]
    ) -> worker_pb2.SubmitReply:
        answer, lost = asyncio.ensure_future(call), self._lost
        try:
            await asyncio.wait({answer, lost}, return_when=asyncio.FIRST_COMPLETED)
            if not answer.done() or answer.cancelled():  # by the end of the connection
                raise BatonError(Reason.DECODE_UNAVAILABLE, f"worker {self.worker} was lost before it had answered")
            return answer.result()
        finally:
            answer.cancel()

    def detach(self, key: AttemptKey) -> None:
        """Nothing more of this attempt is wanted. Idempotent."""
        self._sinks.pop(key, None)
        if not self._sinks:
            self._idle.set()

    async def abort(self, key: AttemptKey) -> None:
        """Tell the worker to stop an attempt. Never raises: a worker that cannot be told ends it with the session."""
        request = worker_pb2.AbortRequest(session=self._name, uid=key[0], attempt=key[1])
        try:
            reply = await self._stub().Abort(request, timeout=ABORT_TIMEOUT_S)
            self._metrics.aborts.labels("found" if reply.found else "unknown").inc()
        except grpc.aio.AioRpcError as error:
            self._metrics.aborts.labels("failed").inc()
            _log.warning("abort failed", worker=self.worker, uid=key[0], error=error.code().name)

    def retry(self) -> None:
        """A sign that the worker is there: if the session is not, try now."""
        self._retry.set()

    def retire(self) -> None:
        """The worker has left: end when its last request has ended."""
        self._retired.set()

    def _stub(self) -> worker_pb2_grpc.WorkerServiceAsyncStub:
        return worker_pb2_grpc.WorkerServiceStub(self._channels.get(self.address))

    async def _stream(self) -> tuple[Loss, BatonError]:
        """Open the stream and read it for as long as it can be counted on; why no longer."""
        name = f"{self._frontend}-{secrets.token_hex(6)}"
        self._seq = 0
        call = self._stub().Session(worker_pb2.SessionRequest(session=name, frontend=self._frontend))
        try:
            async with Patience(OPEN_TIMEOUT_S) as patience:
                while isinstance(frame := await call.read(), worker_pb2.Frame):
                    patience.heard(SILENCE_S)
                    why = self._take(frame, name)
                    if why is not None:
                        return why, BatonError(Reason.SESSION_LOST, f"worker {self.worker} {_TOLD[why]}")
            return Loss.ENDED, BatonError(Reason.SESSION_LOST, f"worker {self.worker} ended the session")
        except TimeoutError:
            return Loss.SILENT, BatonError(Reason.SESSION_LOST, f"worker {self.worker} {_TOLD[Loss.SILENT]}")
        except grpc.aio.AioRpcError as error:
            text = f"worker {self.worker}: {error.code().name}: {error.details()}"
            return Loss.ENDED, BatonError(Reason.SESSION_LOST, text)
        finally:
            call.cancel()
            # It may be the connection that died: gRPC takes four seconds to find out, and every attempt on it fails.
            await self._channels.drop(self.address)

    def _take(self, frame: worker_pb2.Frame, name: str) -> Loss | None:
        """Pass a frame on. Its last events count also when it says that the worker is lost; returns why it is."""
        if self.connected and frame.epoch != self._epoch:
            return Loss.RESTARTED
        if frame.seq <= self._seq:
            self._metrics.dropped.labels("frame").inc()
            return None
        if frame.seq > self._seq + 1:  # what was in between may have been an end, after which nothing comes
            return Loss.GAP
        self._seq = frame.seq
        self.alive_at = time.monotonic()
        stuck = False
        if frame.HasField("heartbeat"):
            beat = self.heartbeat = frame.heartbeat
            stuck = progress.stuck(beat.step_started, beat.step_predicted_s, beat.time)
        if not self.connected and not stuck:
            # The first frame says that the worker knows this name: only now may it be submitted under.
            self._opened(name, frame.epoch)
        for event in frame.events:
            sink = self._sinks.get((event.uid, event.attempt))
            if sink is None:
                self._metrics.dropped.labels("unknown").inc()
            else:
                sink.on_event(event)
        if stuck:
            self.alive_at -= beat.time - beat.step_started
        return Loss.STUCK if stuck else None

    def _opened(self, name: str, epoch: int) -> None:
        self._name, self._epoch = name, epoch
        self._lost = asyncio.get_running_loop().create_future()
        self._open.set()
        self._tried.set()
        self._metrics.sessions.inc()
        _log.info("session open", worker=self.worker, address=self.address)

    def _lose(self, error: BatonError) -> None:
        if self._open.is_set():
            self._open.clear()
            self._lost.set_result(None)
            self._metrics.sessions.dec()
        self._tried.set()
        self.heartbeat = None
        sinks, self._sinks = list(self._sinks.values()), {}
        self._idle.set()
        for sink in sinks:
            sink.on_lost(error)
