"""One long-lived session stream for each worker: every event of every request that this frontend submitted there.

A session that breaks is opened again with jittered back-off under a new name; its requests are told at once. A worker
that leaves the registry keeps its session as long as requests run on it: only the session's own loss moves streams.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import time
from collections.abc import Callable, Mapping
from typing import Protocol

import grpc
import structlog

from baton.errors import BatonError, Reason
from baton.registry.view import View
from baton.rpc.channel import Channels
from baton.rpc.errors import from_failure, from_rpc
from baton.rpc.tasks import Background
from baton.v1 import registry_pb2, worker_pb2, worker_pb2_grpc
from services.frontend.metrics import FrontendMetrics

HEARTBEAT_TIMEOUT_S = 5.0
"""Heartbeats come five times a second: a session that is silent for so long is lost."""
STEP_STALLED_S = 60.0
"""An engine step this long, and 20 times longer than predicted, is a dead engine behind a live server."""
OPEN_TIMEOUT_S = 3.0
SUBMIT_TIMEOUT_S = 5.0
ABORT_TIMEOUT_S = 2.0
UNKNOWN_S = 30.0
"""How long a session lives whose worker the registry does not show."""
_BACKOFF_S = (0.05, 2.0)
_STREAMING = (registry_pb2.ROLE_DECODE, registry_pb2.ROLE_MERGED)

_log = structlog.get_logger()


class Sink(Protocol):
    """Who takes the events of one attempt."""

    def on_event(self, event: worker_pb2.Event) -> None:
        """An event of this attempt, in the order of the stream."""

    def on_lost(self, error: BatonError) -> None:
        """The session is gone, and with it the attempt. Nothing follows."""


AttemptKey = tuple[str, int]


class Session:
    """The session stream to one worker process, and the calls that go beside it."""

    def __init__(self, worker: str, address: str, frontend: str, channels: Channels, metrics: FrontendMetrics) -> None:
        self.worker = worker
        self.address = address
        self.heartbeat: worker_pb2.Heartbeat | None = None
        self._frontend = frontend
        self._channels = channels
        self._metrics = metrics
        self._name = ""
        self._open = asyncio.Event()
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
            self._lose(BatonError(Reason.SESSION_LOST, f"the session with {self.worker} was closed"))

    async def _left(self) -> None:
        await self._retired.wait()
        await self._idle.wait()

    async def _keep_streaming(self) -> None:
        low, high = _BACKOFF_S
        wait = low
        while True:
            started = time.monotonic()
            error = await self._stream()
            self._lose(error)
            _log.info("session lost", worker=self.worker, address=self.address, error=str(error))
            wait = low if time.monotonic() - started > HEARTBEAT_TIMEOUT_S else min(high, wait * 2)
            await asyncio.sleep(wait * random.uniform(0.5, 1.0))

    async def submit(self, request: worker_pb2.SubmitRequest, sink: Sink, deadline: float) -> None:
        """Start an attempt whose events go to `sink` (events may come before this returns).

        `deadline` is `time.time()` seconds. Raises BatonError: the worker's refusal, DECODE_UNAVAILABLE when it cannot
        be reached. After a raise nothing more comes to the sink.
        """
        key = (request.attempt.uid, request.attempt.attempt)
        try:
            async with asyncio.timeout(min(OPEN_TIMEOUT_S, max(0.0, deadline - time.time()))):
                await self._open.wait()
        except TimeoutError:
            raise BatonError(Reason.DECODE_UNAVAILABLE, f"worker {self.worker} cannot be reached") from None
        request.session = self._name
        self._sinks[key] = sink
        self._idle.clear()
        accepted = False
        try:
            timeout = min(SUBMIT_TIMEOUT_S, max(0.05, deadline - time.time()))
            reply = await self._stub().Submit(request, timeout=timeout)
            if reply.HasField("failure"):
                raise from_failure(reply.failure)
            accepted = True
        except grpc.aio.AioRpcError as error:
            raise from_rpc(error, Reason.DECODE_UNAVAILABLE) from error
        finally:
            if not accepted:
                self.detach(key)

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

    def retire(self) -> None:
        """The worker has left: end when its last request has ended."""
        self._retired.set()

    def _stub(self) -> worker_pb2_grpc.WorkerServiceAsyncStub:
        return worker_pb2_grpc.WorkerServiceStub(self._channels.get(self.address))

    async def _stream(self) -> BatonError:
        """Open the stream and read it to its end; why it ended."""
        name = f"{self._frontend}-{secrets.token_hex(6)}"
        call = self._stub().Session(worker_pb2.SessionRequest(session=name, frontend=self._frontend))
        try:
            while True:
                async with asyncio.timeout(HEARTBEAT_TIMEOUT_S):
                    frame = await call.read()
                if not isinstance(frame, worker_pb2.Frame):
                    return BatonError(Reason.SESSION_LOST, f"worker {self.worker} ended the session")
                if not self._open.is_set():
                    # The first frame says that the worker knows this name: only now may it be submitted under.
                    self._name = name
                    self._open.set()
                    self._metrics.sessions.inc()
                    _log.info("session open", worker=self.worker, address=self.address)
                self._take(frame)
                if self._stalled():
                    return BatonError(Reason.SESSION_LOST, f"the engine of {self.worker} is stuck in a step")
        except TimeoutError:
            return BatonError(Reason.SESSION_LOST, f"worker {self.worker} is silent")
        except grpc.aio.AioRpcError as error:
            return BatonError(Reason.SESSION_LOST, f"worker {self.worker}: {error.code().name}: {error.details()}")
        finally:
            call.cancel()

    def _take(self, frame: worker_pb2.Frame) -> None:
        if frame.HasField("heartbeat"):
            self.heartbeat = frame.heartbeat
        for event in frame.events:
            sink = self._sinks.get((event.uid, event.attempt))
            if sink is None:
                self._metrics.dropped.labels("unknown").inc()
            else:
                sink.on_event(event)

    def _stalled(self) -> bool:
        beat = self.heartbeat
        if beat is None or not beat.step_started:
            return False
        return beat.time - beat.step_started > max(STEP_STALLED_S, 20 * beat.step_predicted_s)

    def _lose(self, error: BatonError) -> None:
        if self._open.is_set():
            self._open.clear()
            self._metrics.sessions.dec()
            self._metrics.sessions_lost.labels(self.worker).inc()
        self.heartbeat = None
        sinks, self._sinks = list(self._sinks.values()), {}
        self._idle.set()
        for sink in sinks:
            sink.on_lost(error)


class Sessions:
    """The sessions with every decode and merged worker of one model, opened as workers appear."""

    def __init__(
        self,
        frontend: str,
        model: str,
        channels: Channels,
        background: Background,
        metrics: FrontendMetrics,
    ) -> None:
        self._frontend = frontend
        self._model = model
        self._channels = channels
        self._background = background
        self._metrics = metrics
        self._live: dict[str, Session] = {}
        self._by_address: dict[str, Session] = {}

    def follow(self, workers: View[registry_pb2.Worker]) -> Callable[[], None]:
        """Open and retire sessions as the registry changes; returns the way to stop following."""
        return workers.subscribe(self._changed)

    def live(self) -> Mapping[str, Session]:
        """Sessions with the workers that the registry shows, by worker id."""
        return self._live

    def to(self, target: worker_pb2.Target) -> Session:
        """The session with a plan's worker; opened now, for a while, if the registry does not show that address."""
        session = self._by_address.get(target.address)
        if session is None or session.retired:
            session = self._open(target.id, target.address)
            self._background.spawn(self._expire(session), f"expire {target.id}")
        return session

    async def answers(self, worker: registry_pb2.Worker) -> bool:
        """Whether a worker that the registry lost is there all the same. Raises AioRpcError when it cannot be asked."""
        session = self._live.get(worker.id)
        if session is not None and session.connected:
            return True
        stub: worker_pb2_grpc.WorkerServiceAsyncStub
        stub = worker_pb2_grpc.WorkerServiceStub(self._channels.get(worker.address))
        described = await stub.Describe(worker_pb2.DescribeRequest(), timeout=SUBMIT_TIMEOUT_S)
        return described.epoch == worker.epoch

    def _changed(self, id: str, worker: registry_pb2.Worker | None) -> None:
        known = self._live.get(id)
        if worker is not None and (worker.role not in _STREAMING or worker.model != self._model):
            worker = None
        if known is not None and (worker is None or worker.address != known.address):
            del self._live[id]
            known.retire()
        if worker is not None and id not in self._live:
            session = self._by_address.get(worker.address)
            if session is None or session.retired or session.worker != id:
                session = self._open(id, worker.address)
            self._live[id] = session

    def _open(self, id: str, address: str) -> Session:
        session = self._by_address[address] = Session(id, address, self._frontend, self._channels, self._metrics)
        self._background.spawn(self._keep(session), f"session {id}")
        return session

    async def _keep(self, session: Session) -> None:
        try:
            await session.run()
        finally:
            if self._by_address.get(session.address) is session:
                del self._by_address[session.address]

    async def _expire(self, session: Session) -> None:
        """A plan may know a worker before the registry shows it here, or after it has gone for good."""
        await asyncio.sleep(UNKNOWN_S)
        if self._live.get(session.worker) is not session:
            session.retire()
