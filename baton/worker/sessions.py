"""Session streams: one for each frontend, every event of its requests in frames.

A step's events are pushed without a pause between them, so the stream's writer finds all of them at once and sends one
frame: the cost of a message is paid once a step, not once a token. A frontend that does not read cannot hold memory
here: at `MAX_PENDING` events its session ends, and with it its requests.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator

import structlog

from baton.errors import BatonError, Reason
from baton.v1 import worker_pb2 as pb
from baton.worker.metrics import WorkerMetrics

HEARTBEAT_S = 0.2
MAX_PENDING = 8192
"""Events a session may owe its frontend: minutes of one stream, half a minute of 8."""

_log = structlog.get_logger()


class Session:
    """One frontend's stream, from the side that fills it."""

    def __init__(self, id: str, frontend: str) -> None:
        self.id = id
        self.frontend = frontend
        self.alive = True
        self.overflowed = False
        self.on_overflow: Callable[[Session], None] = lambda _: None
        self._pending: list[pb.Event] = []
        self._beat_due = True
        self._wake = asyncio.Event()
        self._wake.set()

    def push(self, event: pb.Event) -> None:
        """Send `event` with the next frame; nothing once the session has ended."""
        if not self.alive:
            return
        if len(self._pending) >= MAX_PENDING:
            self.alive = False
            self.overflowed = True
            self._pending.clear()
            self.on_overflow(self)
        else:
            self._pending.append(event)
        self._wake.set()

    def beat(self) -> None:
        """Ask for a heartbeat in the next frame."""
        self._beat_due = True
        self._wake.set()

    def end(self) -> None:
        """Let the writer end the stream after what is pending."""
        self.alive = False
        self._wake.set()

    @property
    def pending(self) -> int:
        """Events not yet given to the stream."""
        return len(self._pending)

    async def take(self) -> tuple[list[pb.Event], bool]:
        """Everything that is pending, and whether a heartbeat is due; waits until there is one of them."""
        while not self._pending and not self._beat_due and self.alive:
            self._wake.clear()
            await self._wake.wait()
        events, self._pending = self._pending, []
        beat, self._beat_due = self._beat_due, False
        return events, beat


class Sessions:
    """The live sessions. `heartbeat` tells the engine's state; `on_end` aborts what an ended session owned."""

    def __init__(
        self,
        epoch: int,
        metrics: WorkerMetrics,
        heartbeat: Callable[[], pb.Heartbeat],
        on_end: Callable[[Session], None],
    ) -> None:
        self._epoch = epoch
        self._metrics = metrics
        self._heartbeat = heartbeat
        self._on_end = on_end
        self._live: dict[str, Session] = {}
        self._none = asyncio.Event()
        self._none.set()

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._live.values()))

    def get(self, id: str) -> Session:
        """The live session of that id. Raises BatonError SESSION_LOST."""
        session = self._live.get(id)
        if session is None or not session.alive:
            raise BatonError(Reason.SESSION_LOST, f"no session {id} is open here: open one and submit again")
        return session

    async def serve(self, id: str, frontend: str, write: Callable[[pb.Frame], Awaitable[None]]) -> None:
        """Run one session until its stream ends. The first frame, a heartbeat, says that it is open.

        Raises BatonError: INVALID_REQUEST for an empty or used id, SLOW_CLIENT when the frontend did not read.
        """
        if not id or id in self._live:
            raise BatonError(Reason.INVALID_REQUEST, f"session id {id!r} is empty or in use", param="session")
        session = self._live[id] = Session(id, frontend)
        session.on_overflow = self._overflow
        self._none.clear()
        self._metrics.sessions.set(len(self._live))
        seq = 0
        try:
            while session.alive or session.pending:
                events, beat = await session.take()
                seq += 1
                frame = pb.Frame(epoch=self._epoch, seq=seq, events=events)
                if beat:
                    frame.heartbeat.CopyFrom(self._heartbeat())
                self._metrics.frames.inc()
                await write(frame)
            if session.overflowed:
                raise BatonError(Reason.SLOW_CLIENT, f"session {id} did not read {MAX_PENDING} events")
        finally:
            session.alive = False
            del self._live[id]
            if not self._live:
                self._none.set()
            self._metrics.sessions.set(len(self._live))
            self._on_end(session)

    async def beat(self) -> None:
        """Ask every session for a heartbeat, for ever: in every round while there is work, in every second one else.
        One task of the process."""
        idle = 0
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            now = self._heartbeat()
            idle = 0 if now.running or now.waiting or now.step_started else idle + 1
            if idle % 2 == 0:
                for session in self._live.values():
                    session.beat()

    async def end_all(self, timeout_s: float) -> None:
        """End every stream after what is pending; at most `timeout_s`."""
        for session in self:
            session.end()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._none.wait()

    def findings(self) -> list[str]:
        """Sessions that have ended and are still listed."""
        return [f"session {s.id} has ended and is still listed" for s in self._live.values() if not s.alive]

    def _overflow(self, session: Session) -> None:
        self._metrics.session_drops.labels("overflow").inc()
        _log.warning("session ended: its frontend does not read", session=session.id, frontend=session.frontend)
        self._on_end(session)
