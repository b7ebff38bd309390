"""The parts that serve requests, and the loops between the engine and them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from baton.errors import BatonError, Reason
from baton.v1 import registry_pb2
from baton.worker import state
from baton.worker.announce import Announcement
from baton.worker.attempts import Attempts
from baton.worker.context import WorkerContext
from baton.worker.conversations import Conversations
from baton.worker.drain import drain
from baton.worker.embed import Embeddings
from baton.worker.load import StoreLoader
from baton.worker.offers import Offers
from baton.worker.run import Runs
from baton.worker.service import WorkerServicer
from baton.worker.sessions import Session, Sessions
from baton.worker.stores import Stores
from baton.worker.submit import Submissions
from baton.worker.watch import Watchers

SHOW_S = 1.0

_log = structlog.get_logger()


class Serving:
    """Made once the engine is there. `end(code)` is how a part ends the process."""

    def __init__(self, context: WorkerContext, end: Callable[[int], None]) -> None:
        self.context = context
        self.watchers = Watchers(
            context.epoch,
            lambda: state.load(context),
            context.metrics,
            lambda: context.check_moving(Reason.ENGINE_FAILED),
        )
        self.attempts = Attempts(context.metrics, self.watchers.changed)
        self.sessions = Sessions(
            context.epoch, context.metrics, lambda: state.heartbeat(context, self.attempts.batch), self._end_session
        )
        self.stores = Stores(
            context.peer, context.fingerprint, context.transports, context.channels, context.background
        )
        self.offers = Offers(context, self.stores)
        self.conversations = Conversations(context, self.attempts, self.offers)
        self.loader = StoreLoader(context, self.stores)
        self.runs = Runs(context, self.watchers, self.loader, self.offers)
        self.embeddings = Embeddings(context, self.watchers)
        self.announcement: Announcement | None = None
        self._end = end

    def servicer(self) -> WorkerServicer:
        """The gRPC face of all of it."""
        submissions = Submissions(
            self.context, self.sessions, self.attempts, self.watchers, self.loader, self.conversations
        )
        return WorkerServicer(
            self.context,
            self.sessions,
            self.attempts,
            submissions,
            self.runs,
            self.watchers,
            self.offers,
            self.embeddings,
            self._describe,
            self.leave,
        )

    def spawn_loops(self) -> None:
        """Everything that runs for as long as the process does."""
        spawn = self.context.background.spawn
        spawn(self.sessions.beat(), "heartbeats")
        spawn(self.watchers.tick(), "load")
        spawn(self._follow_tokens(), "engine events")
        spawn(self._follow_cache(), "cache events")
        spawn(self._show(), "metrics")
        if self.context.fingerprint:
            spawn(self.offers.run(), "offers to stores")
            spawn(self.conversations.watch(), "conversations")

    async def drain(self, deadline_s: float | None) -> int:
        """Take no new work, tell everyone, and end or move what runs. Returns what is left."""
        self.context.draining = True
        self.watchers.changed()
        if self.announcement is not None:
            await self.announcement.say_draining()
        draining = drain(self.context, self.attempts, self.runs, deadline_s)
        return sum(await asyncio.gather(draining, self.embeddings.idle(deadline_s)))

    async def leave(self, deadline_s: float | None) -> int:
        """Drain, then end the process, whether the caller waits for it or not. Returns what is left."""
        return await asyncio.shield(self.context.background.spawn(self._leave(deadline_s), "leave"))

    async def _leave(self, deadline_s: float | None) -> int:
        left = await self.drain(deadline_s)
        self._end(0)
        return left

    def _describe(self) -> registry_pb2.Worker:
        return registry_pb2.Worker() if self.announcement is None else self.announcement.message

    def _end_session(self, session: Session) -> None:
        for attempt in self.attempts.of(session):
            attempt.abort()

    async def _follow_tokens(self) -> None:
        """Every step's tokens to their sessions. The engine's end is ours."""
        try:
            async for events in self.context.engine.events():
                self.attempts.dispatch(events)
            error = BatonError(Reason.ENGINE_FAILED, "the engine's events ended")
        except BatonError as failed:
            error = failed
        except Exception as failed:
            _log.exception("engine events could not be passed on")
            error = BatonError(Reason.INTERNAL, f"{type(failed).__name__} while passing tokens on")
        _log.error("the engine is gone: this epoch ends", reason=error.reason.name, message=error.message)
        for attempt in self.attempts:
            attempt.send_failure(error)
            attempt.abort()
        self._end(1)

    async def _follow_cache(self) -> None:
        try:
            await self.watchers.follow(self.context.engine)
        except BatonError as error:
            _log.warning("cache events ended", reason=error.reason.name, message=error.message)

    async def _show(self) -> None:
        while True:
            await asyncio.sleep(SHOW_S)
            self.context.metrics.engine(self.context.engine.stats())
            self.context.metrics.unwell.set(bool(self.context.engine.unwell))
