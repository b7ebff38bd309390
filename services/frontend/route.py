"""Asking the routers, telling them what became of it, and placing requests when none of them answers."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import deque
from collections.abc import Mapping

import grpc
import structlog

from baton.errors import BatonError, Reason
from baton.registry.view import View
from baton.route import RouteReason
from baton.rpc.channel import Channels
from baton.rpc.errors import from_failure, from_rpc
from baton.v1 import registry_pb2, router_pb2, router_pb2_grpc, worker_pb2
from services.frontend.lately import AWAY_S, Lately
from services.frontend.metrics import FrontendMetrics
from services.frontend.session import Session

ROUTE_TIMEOUT_S = 1.0
HEDGE_S = 0.2
"""A router answers in a millisecond: when one says nothing for so long, the next is asked as well."""
AVOID_S = 2.0
"""A router that failed is asked last for so long."""
REPORT_EVERY_S = 0.25
REPORT_TIMEOUT_S = 2.0
MAX_OUTCOMES = 4096

_log = structlog.get_logger()


class RouterClient:
    """The routers, behind one call. Stays with the router that answered last."""

    def __init__(
        self,
        routers: View[registry_pb2.Router],
        workers: View[registry_pb2.Worker],
        sessions: Mapping[str, Session],
        channels: Channels,
        metrics: FrontendMetrics,
    ) -> None:
        self._routers = routers
        self._workers = workers
        self.lately = Lately(workers)
        self._sessions = sessions
        self._channels = channels
        self._metrics = metrics
        self._current = ""
        self._failed_at: dict[str, float] = {}
        self._outcomes: deque[router_pb2.Outcome] = deque()
        self._have_outcomes = asyncio.Event()
        self._urgent = asyncio.Event()
        self.answered = False
        """Whether any router has ever answered."""

    async def route(self, request: router_pb2.RouteRequest, away_s: float = AWAY_S) -> worker_pb2.Plan:
        """The plan for one attempt. Raises BatonError: the router's refusal, ROUTER_UNAVAILABLE, DEADLINE_EXCEEDED; and
        DECODE_UNAVAILABLE for what only somebody can who left within `away_s`.

        When no router answers, the request is placed on the least busy worker that is connected (not under strict
        fallback): worse placed is better than refused.
        """
        asked: dict[asyncio.Future[router_pb2.RouteReply], str] = {}
        try:
            for id, router in self._order():
                remaining = request.deadline - time.time()
                if remaining <= 0:
                    raise BatonError(Reason.DEADLINE_EXCEEDED, "The request ran out of time while it was being placed.")
                call = self._stub(router).Route(request, timeout=min(ROUTE_TIMEOUT_S, remaining))
                asked[asyncio.ensure_future(call)] = id
                reply = await self._first_answer(asked, HEDGE_S)
                if reply is not None:
                    break
            else:
                reply = await self._first_answer(asked, None)
        finally:
            for late in asked:
                late.cancel()
        if reply is None:
            return self._own_choice(request)
        if reply.HasField("failure"):
            error = from_failure(reply.failure)
            if self._could(request, error.reason, away_s):
                raise BatonError(Reason.DECODE_UNAVAILABLE, f"those who could are away: {error.message}") from error
            raise error
        return reply.plan

    async def _first_answer(
        self, asked: dict[asyncio.Future[router_pb2.RouteReply], str], within_s: float | None
    ) -> router_pb2.RouteReply | None:
        """An answer of those asked; None when one of them failed (it is asked no more), or none came in time.
        `within_s` is None: the calls' own deadlines count, and None comes when all have failed."""
        while asked:
            done, _ = await asyncio.wait(asked, timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
            for call in done:
                id = asked.pop(call)
                try:
                    reply = call.result()
                except grpc.aio.AioRpcError as error:
                    self._failed(id, from_rpc(error, Reason.ROUTER_UNAVAILABLE))
                    continue
                self._current = id
                self._failed_at.pop(id, None)
                self.answered = True
                return reply
            if within_s is not None:
                break
        return None

    async def explain(self, request: router_pb2.RouteRequest) -> router_pb2.ExplainReply:
        """What the routers would do with it, and why. Raises BatonError(ROUTER_UNAVAILABLE)."""
        for id, router in self._order():
            try:
                return await self._stub(router).Explain(request, timeout=ROUTE_TIMEOUT_S)
            except grpc.aio.AioRpcError as error:
                self._failed(id, from_rpc(error, Reason.ROUTER_UNAVAILABLE))
        raise BatonError(Reason.ROUTER_UNAVAILABLE, "No router answers.")

    def report(self, outcome: router_pb2.Outcome) -> None:
        """Tell the routers, soon and in a batch; when they cannot keep up the oldest outcome is dropped and counted."""
        if len(self._outcomes) >= MAX_OUTCOMES:
            self._outcomes.popleft()
            self._metrics.reports_dropped.inc()
        self._outcomes.append(outcome)
        self._have_outcomes.set()

    def failed(self, worker: str) -> None:
        """Tell the routers, now, that a worker was lost or cannot be reached."""
        self._urgent.set()
        self.report(router_pb2.Outcome(reason=Reason.SESSION_LOST.name, failed_workers=[worker]))

    async def run(self) -> None:
        """Send reports for ever: every router learns from every outcome."""
        while True:
            await self._have_outcomes.wait()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(REPORT_EVERY_S):
                    await self._urgent.wait()
            await self.flush()

    async def flush(self) -> None:
        """Send what has gathered now."""
        self._have_outcomes.clear()
        self._urgent.clear()
        if not self._outcomes:
            return
        request = router_pb2.ReportRequest(outcomes=self._outcomes)
        self._outcomes.clear()
        sends = [self._send(id, router, request) for id, router in self._routers.items().items()]
        if not any(await asyncio.gather(*sends)):
            self._metrics.reports_dropped.inc(len(request.outcomes))

    async def _send(self, id: str, router: registry_pb2.Router, request: router_pb2.ReportRequest) -> bool:
        try:
            await self._stub(router).Report(request, timeout=REPORT_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            self._failed(id, from_rpc(error, Reason.ROUTER_UNAVAILABLE))
            return False
        return True

    def _stub(self, router: registry_pb2.Router) -> router_pb2_grpc.RouterServiceAsyncStub:
        return router_pb2_grpc.RouterServiceStub(self._channels.get(router.address))

    def _order(self) -> list[tuple[str, registry_pb2.Router]]:
        """The current router first, those that failed a moment ago last."""
        now = time.monotonic()
        routers = list(self._routers.items().items())
        random.shuffle(routers)
        return sorted(
            routers, key=lambda r: (now - self._failed_at.get(r[0], -AVOID_S) < AVOID_S, r[0] != self._current)
        )

    def _failed(self, id: str, error: BatonError) -> None:
        self._failed_at[id] = time.monotonic()
        self._metrics.router_failures.labels(error.reason.name).inc()
        _log.warning("router failed", router=id, error=str(error))

    def _could(self, request: router_pb2.RouteRequest, refusal: Reason, away_s: float) -> bool:
        """Whether what is said to be too much is so only because of who is away. Strict forbids other ways to run."""
        if request.fallback == worker_pb2.FALLBACK_STRICT:
            return False
        if refusal is Reason.CONTEXT_LENGTH_EXCEEDED:
            return self.lately.longest(request.model, away_s) > request.prompt_tokens
        return refusal is Reason.INVALID_REQUEST and self.lately.able(request.model, request.needs, away_s)

    def _own_choice(self, request: router_pb2.RouteRequest) -> worker_pb2.Plan:
        if request.fallback == worker_pb2.FALLBACK_STRICT:
            raise BatonError(Reason.ROUTER_UNAVAILABLE, "No router answers, and strict fallback forbids to do without.")
        plan = own_choice(request, self._workers.items(), self._sessions)
        if plan is None:
            raise BatonError(Reason.ROUTER_UNAVAILABLE, "No router answers and no worker is known that could run this.")
        self._metrics.own_choices.inc()
        return plan


def own_choice(
    request: router_pb2.RouteRequest,
    workers: Mapping[str, registry_pb2.Worker],
    sessions: Mapping[str, Session],
) -> worker_pb2.Plan | None:
    """The least busy connected worker of the model (merged before decode when equal), or None."""
    best: tuple[float, bool, float] | None = None
    chosen: registry_pb2.Worker | None = None
    epoch = 0
    for id, worker in workers.items():
        session = sessions.get(id)
        merged = worker.role == registry_pb2.ROLE_MERGED
        fits = merged or (worker.role == registry_pb2.ROLE_DECODE and not request.merged_only)
        if not fits or worker.model != request.model or worker.draining or id in request.exclude:
            continue
        if any(need in worker.lacks for need in request.needs):
            continue
        if session is None or not session.connected or session.draining:
            continue
        if worker.max_context and request.prompt_tokens >= worker.max_context:
            continue
        score = (session.load / max(1, worker.max_streams), not merged, random.random())
        if best is None or score < best:
            best, chosen, epoch = score, worker, session.epoch
    if chosen is None:
        return None
    merged = chosen.role == registry_pb2.ROLE_MERGED
    return worker_pb2.Plan(
        mode=worker_pb2.MODE_MERGED if merged else worker_pb2.MODE_LOCAL,
        worker=worker_pb2.Target(id=chosen.id, address=chosen.address, epoch=epoch),
        reasons=[RouteReason.MERGED_FALLBACK if merged else RouteReason.LOCAL_FALLBACK],
        local_is_cheapest=not merged,
    )
