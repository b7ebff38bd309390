"""Scripted peers that speak worker.proto and router.proto over real gRPC: what a test says is what they do."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.protobuf import json_format
from prometheus_client import CollectorRegistry

from baton.errors import BatonError, Reason
from baton.model.card import Model
from baton.registry.registry import Registry
from baton.registry.view import View
from baton.rpc.channel import Channels
from baton.rpc.errors import failure
from baton.rpc.tasks import Background
from baton.v1 import registry_pb2, router_pb2, router_pb2_grpc, worker_pb2, worker_pb2_grpc
from services.frontend.app import create_app
from services.frontend.frontend import Frontend
from services.frontend.gate import Gate
from services.frontend.metrics import FrontendMetrics
from services.frontend.reader import BodyReader
from services.frontend.ready import CardKeeper, Readiness
from services.frontend.request import Backend
from services.frontend.responses.store import ResponseStore
from services.frontend.route import RouterClient
from services.frontend.server import Server, listen, make_server
from services.frontend.sessions import Sessions

HANG_S = 20.0

Script = Callable[["Attempt"], Awaitable[None]]


@dataclass
class Attempt:
    """One submitted attempt, with the ways to answer it."""

    worker: ScriptedWorker
    submit: worker_pb2.SubmitRequest
    aborted: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def message(self) -> worker_pb2.Attempt:
        return self.submit.attempt

    def event(self, **fields: Any) -> worker_pb2.Event:
        return worker_pb2.Event(uid=self.message.uid, attempt=self.message.attempt, **fields)

    async def send(self, *events: worker_pb2.Event) -> None:
        await self.worker.send(self.submit.session, events)

    async def tokens(self, ids: Sequence[int], *, offset: int, choice: int = 0, **fields: Any) -> None:
        await self.send(self.event(choice=choice, offset=offset, tokens=worker_pb2.Tokens(ids=ids), **fields))

    async def play(self, ids: Sequence[int], *, choice: int = 0, finish: str = "stop", pause_s: float = 0.0) -> None:
        """The tokens of `ids` that the client does not have yet, one an event, then the end."""
        start = len(self.message.emitted_ids)
        for offset in range(start, len(ids)):
            last = offset == len(ids) - 1
            route = self.route() if offset == start or last else None
            fields: dict[str, Any] = {"finish": finish} if last else {}
            await self.tokens([ids[offset]], offset=offset, choice=choice, route=route, **fields)
            await asyncio.sleep(pause_s)

    def route(self) -> worker_pb2.RouteTaken:
        plan = self.submit.plan
        return worker_pb2.RouteTaken(
            mode=plan.mode, reasons=plan.reasons, kv_bytes=1000, worker=plan.worker.id, prefill=plan.prefill.id
        )


class ScriptedWorker(worker_pb2_grpc.WorkerServiceServicer):
    """A decode or merged worker that answers each attempt by `script`."""

    def __init__(self, id: str, script: Script, role: registry_pb2.Role.ValueType = registry_pb2.ROLE_MERGED) -> None:
        self.id = id
        self.epoch = secrets.randbits(63) | 1
        self.role = role
        self.script = script
        self.refusal: BatonError | None = None
        self.max_context = 0
        self.lacks: list[str] = []
        self.heartbeat: worker_pb2.Heartbeat | None = worker_pb2.Heartbeat(time=1.0)
        """What each heartbeat says; None: silence."""
        self.fate: Callable[[worker_pb2.Frame], Sequence[worker_pb2.Frame]] = lambda frame: [frame]
        """What becomes of each numbered frame on its way."""
        self.attempts: list[Attempt] = []
        self.embeds: list[worker_pb2.EmbedRequest] = []
        self.embed: Callable[[worker_pb2.EmbedRequest], Awaitable[worker_pb2.EmbedReply]] | None = None
        """How it answers `Embed`; None: it is gone."""
        self.cleared = 0
        self.address = ""
        self.sessions: dict[str, asyncio.Queue[worker_pb2.Frame | None]] = {}
        self.background = Background(id)
        self._server: grpc.aio.Server | None = None
        self._port = 0

    async def start(self) -> None:
        server = self._server = grpc.aio.server()
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(self, server)  # type: ignore[no-untyped-call]
        self._port = server.add_insecure_port(f"127.0.0.1:{self._port}")
        self.address = f"127.0.0.1:{self._port}"
        await server.start()

    async def stop(self) -> None:
        server, self._server = self._server, None
        for queue in self.sessions.values():
            queue.put_nowait(None)
        if server is not None:
            await server.stop(None)
        await self.background.close()

    def registration(self, model: str) -> registry_pb2.Worker:
        return registry_pb2.Worker(
            id=self.id,
            epoch=self.epoch,
            role=self.role,
            address=self.address,
            model=model,
            max_streams=8,
            max_context=self.max_context,
            lacks=self.lacks,
        )

    async def Describe(self, request: worker_pb2.DescribeRequest, context: Any) -> registry_pb2.Worker:
        return self.registration("")

    def cut(self) -> None:
        """End every session; the process lives on."""
        for queue in self.sessions.values():
            queue.put_nowait(None)

    async def send(self, session: str, events: Sequence[worker_pb2.Event]) -> None:
        queue = self.sessions.get(session)
        if queue is not None:
            queue.put_nowait(worker_pb2.Frame(epoch=self.epoch, events=events))

    async def Session(self, request: worker_pb2.SessionRequest, context: Any) -> AsyncIterator[worker_pb2.Frame]:
        queue: asyncio.Queue[worker_pb2.Frame | None] = asyncio.Queue()
        self.sessions[request.session] = queue
        seq = 1
        try:
            yield worker_pb2.Frame(epoch=self.epoch, seq=seq, heartbeat=worker_pb2.Heartbeat(time=1.0))
            while True:
                try:
                    async with asyncio.timeout(0.2):
                        frame = await queue.get()
                except TimeoutError:
                    if self.heartbeat is None:
                        continue
                    frame = worker_pb2.Frame(epoch=self.epoch, heartbeat=self.heartbeat)
                if frame is None:
                    return
                seq += 1
                frame.seq = seq
                for one in self.fate(frame):
                    yield one
        finally:
            self.sessions.pop(request.session, None)

    async def Submit(self, request: worker_pb2.SubmitRequest, context: Any) -> worker_pb2.SubmitReply:
        attempt = Attempt(self, request)
        self.attempts.append(attempt)
        if request.session not in self.sessions:
            return worker_pb2.SubmitReply(failure=failure(BatonError(Reason.SESSION_LOST, "no such session")))
        if self.refusal is not None:
            return worker_pb2.SubmitReply(failure=failure(self.refusal))
        self.background.spawn(self.script(attempt), f"{request.attempt.uid}/{request.attempt.attempt}")
        return worker_pb2.SubmitReply(epoch=self.epoch)

    async def Embed(self, request: worker_pb2.EmbedRequest, context: Any) -> worker_pb2.EmbedReply:
        self.embeds.append(request)
        if self.embed is None:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "gone")
        return await self.embed(request)

    async def ClearCache(self, request: worker_pb2.ClearCacheRequest, context: Any) -> worker_pb2.ClearCacheReply:
        self.cleared += 1
        return worker_pb2.ClearCacheReply()

    async def Abort(self, request: worker_pb2.AbortRequest, context: Any) -> worker_pb2.AbortReply:
        found = [a for a in self.attempts if (a.message.uid, a.message.attempt) == (request.uid, request.attempt)]
        for attempt in found:
            attempt.aborted.set()
        return worker_pb2.AbortReply(found=bool(found))


class ScriptedRouter(router_pb2_grpc.RouterServiceServicer):
    """Plans the first worker that is not excluded."""

    def __init__(self, workers: Sequence[ScriptedWorker]) -> None:
        self.workers = list(workers)
        self.requests: list[router_pb2.RouteRequest] = []
        self.explained: list[router_pb2.RouteRequest] = []
        self.outcomes: list[router_pb2.Outcome] = []
        self.refusal: BatonError | None = None
        self.silent = False
        self.cancelled = 0
        self.prefill = ""
        self.address = ""
        self._server: grpc.aio.Server | None = None

    async def start(self) -> None:
        server = self._server = grpc.aio.server()
        router_pb2_grpc.add_RouterServiceServicer_to_server(self, server)  # type: ignore[no-untyped-call]
        self.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()

    async def stop(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            await server.stop(None)

    async def Route(self, request: router_pb2.RouteRequest, context: Any) -> router_pb2.RouteReply:
        self.requests.append(request)
        if self.silent:
            try:
                await asyncio.Event().wait()
            finally:
                self.cancelled += 1
        if self.refusal is not None:
            return router_pb2.RouteReply(failure=failure(self.refusal))
        for worker in self.workers:
            if worker.id not in request.exclude:
                return router_pb2.RouteReply(plan=self._plan(worker, request))
        nobody = BatonError(Reason.DECODE_UNAVAILABLE, "nobody is left")
        return router_pb2.RouteReply(failure=failure(nobody))

    async def Explain(self, request: router_pb2.RouteRequest, context: Any) -> router_pb2.ExplainReply:
        self.explained.append(request)
        if self.refusal is not None:
            return router_pb2.ExplainReply(failure=failure(self.refusal))
        found = [
            router_pb2.Candidate(
                mode=worker_pb2.MODE_MERGED, worker=worker.id, terms_ms={"queue": 1.5, "prefill": 20.0}, total_ms=21.5
            )
            for worker in self.workers
        ]
        found[0].chosen = True
        return router_pb2.ExplainReply(candidates=found, plan=self._plan(self.workers[0], request))

    async def Report(self, request: router_pb2.ReportRequest, context: Any) -> router_pb2.ReportReply:
        self.outcomes.extend(request.outcomes)
        return router_pb2.ReportReply()

    def _plan(self, worker: ScriptedWorker, request: router_pb2.RouteRequest) -> worker_pb2.Plan:
        target = worker_pb2.Target(id=worker.id, address=worker.address, epoch=worker.epoch)
        if worker.role == registry_pb2.ROLE_MERGED or request.merged_only:
            return worker_pb2.Plan(mode=worker_pb2.MODE_MERGED, worker=target, reasons=["MERGED_CHEAPEST"])
        if self.prefill and self.prefill not in request.exclude:
            prefill = worker_pb2.Target(id=self.prefill, address="127.0.0.1:1")
            return worker_pb2.Plan(
                mode=worker_pb2.MODE_DISAGGREGATED, worker=target, prefill=prefill, reasons=["DISAGGREGATED"]
            )
        return worker_pb2.Plan(mode=worker_pb2.MODE_LOCAL, worker=target, reasons=["LOCAL_FALLBACK"])


class Stack:
    """A real frontend (app, sessions, router client) over scripted peers, and views that a test fills by hand."""

    def __init__(self, model: Model, workers: Sequence[ScriptedWorker], **changes: Any) -> None:
        self.model = model
        self.workers = list(workers)
        self.router = ScriptedRouter(workers)
        self.background, self.channels = Background("frontend-test"), Channels()
        self.metrics = FrontendMetrics(CollectorRegistry())
        self.worker_view: View[registry_pb2.Worker] = View("workers", registry_pb2.Worker)
        self.router_view: View[registry_pb2.Router] = View("routers", registry_pb2.Router)
        strict = changes.pop("strict", False)
        fallback = worker_pb2.FALLBACK_STRICT if strict else worker_pb2.FALLBACK_AUTO
        self.sessions = Sessions(
            "frontend-test",
            model.name,
            self.channels,
            self.background,
            self.metrics,
            lambda worker: self.client.failed(worker),
        )
        self.client = RouterClient(
            self.router_view, self.worker_view, self.sessions.live(), self.channels, self.metrics
        )
        self.registry = Registry(["127.0.0.1:1"], "test")
        self.card = CardKeeper(model.card, self.registry)
        self.card.standing = model.card
        self.readiness = Readiness(
            model.name,
            self.registry,
            self.worker_view,
            self.router_view,
            self.client,
            self.sessions,
            self.card,
            fallback,
        )
        self.bodies = BodyReader(model, self.metrics, reasoning=changes.pop("reasoning", "auto"))
        self.backend = Backend(
            card=model.card,
            eos_ids=model.generation.eos_ids,
            prompts=self.bodies.reading.prompts,
            router=self.client,
            sessions=self.sessions,
            background=self.background,
            metrics=self.metrics,
            fallback=fallback,
            ttft_slo_s=changes.pop("ttft_slo_s", 0.0),
        )
        gate = Gate(changes.pop("max_requests", 1024), changes.pop("max_body_held", 2 << 20), self.metrics)
        settings = {"request_timeout_s": HANG_S, "client_stall_s": 5.0, "max_body_bytes": 1 << 20} | changes
        self.frontend = Frontend(
            model=model,
            backend=self.backend,
            bodies=self.bodies,
            gate=gate,
            readiness=self.readiness,
            metrics=self.metrics,
            created=1,
            responses=ResponseStore(self.metrics.responses_evicted, self.metrics.responses_bytes),
            **settings,
        )
        self.app = create_app(self.frontend)
        self.url = ""
        self._server: Server | None = None

    def announce(self, worker: ScriptedWorker) -> None:
        self.worker_view.change(worker.id, _json(worker.registration(self.model.name)))

    async def start(self) -> None:
        for worker in self.workers:
            await worker.start()
        await self.router.start()
        self.sessions.follow(self.worker_view)
        for worker in self.workers:
            self.announce(worker)
        router = registry_pb2.Router(id="router-1", address=self.router.address)
        self.router_view.change("router-1", _json(router))
        self.background.spawn(self.client.run(), "reports")
        sock = listen("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        server = self._server = make_server(self.app, self.frontend.client_stall_s, self.metrics.slow_clients.inc)
        self._serving = asyncio.create_task(server.serve(sockets=[sock]))
        async with asyncio.timeout(HANG_S):
            await server.listening.wait()
        await until(lambda: all(self.connected(worker) for worker in self.workers))

    def connected(self, worker: ScriptedWorker) -> bool:
        session = self.sessions.live().get(worker.id)
        return session is not None and session.connected

    def connections(self) -> int:
        """HTTP connections that are open."""
        return len(self._server.server_state.connections) if self._server is not None else 0

    async def stop(self) -> None:
        assert self._server is not None
        self._server.should_exit = True
        self._server.force_exit = True
        async with asyncio.timeout(HANG_S):
            await self._serving
            await self.background.close()
            await self.channels.close()
            await self.router.stop()
            for worker in self.workers:
                await worker.stop()
        await self.bodies.close()
        # Whatever happened, nothing of a request is left.
        assert self.metrics.active._value.get() == 0
        assert self.background.failures == 0

    def count(self, name: str, **labels: str) -> float:
        value = self.metrics.registry.get_sample_value(f"baton_frontend_{name}_total", labels)
        return value or 0.0


async def until(condition: Callable[[], bool]) -> None:
    """Wait for `condition`, a hang's length at most."""
    async with asyncio.timeout(HANG_S):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def running(model: Model, *workers: ScriptedWorker, **changes: Any) -> AsyncIterator[Stack]:
    stack = Stack(model, workers, **changes)
    await stack.start()
    try:
        yield stack
    finally:
        await stack.stop()


def _json(message: Any) -> bytes:
    return json_format.MessageToJson(message).encode()
