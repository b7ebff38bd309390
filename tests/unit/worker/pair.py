"""A prefill and a decode worker in one process: scripted engines, everything else real (gRPC, sessions, transports)."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry

from baton.kv.arena import Arena
from baton.rpc.channel import Channels
from baton.rpc.codec import peer_to_pb
from baton.rpc.server import RpcServer
from baton.rpc.tasks import Background
from baton.transfer.port import Peer
from baton.transfer.tcp.transport import TcpTransport
from baton.transfer.transports import Transports
from baton.v1 import registry_pb2
from baton.v1 import worker_pb2 as pb
from baton.worker.attempts import Attempt
from baton.worker.context import WorkerContext
from baton.worker.metrics import WorkerMetrics
from baton.worker.role import WorkerRole
from baton.worker.serving import Serving
from baton.worker.submit import Submissions
from services.decode.service import DECODE
from services.prefill.service import PREFILL
from tests.unit.worker.engine import SPEC, ScriptedEngine

HANG_S = 20.0
CARD = registry_pb2.ModelCard(model="m", weights="w", tokenizer="t")


@dataclass
class Worker:
    """One of the two."""

    context: WorkerContext
    engine: ScriptedEngine
    serving: Serving
    submissions: Submissions
    address: str
    ended: list[int]

    def target(self) -> pb.Target:
        """For a plan."""
        return pb.Target(id=self.context.id, address=self.address)

    async def idle(self) -> None:
        """Wait until nothing is held, and check that nothing is."""
        async with asyncio.timeout(HANG_S):
            await self.serving.attempts.idle()
            await self.serving.runs.idle()
        assert await self.engine.check_integrity() == []
        assert self.serving.runs.findings() == []


@contextlib.asynccontextmanager
async def worker(role: WorkerRole, id: str, epoch: int) -> AsyncIterator[Worker]:
    """One worker, serving."""
    engine = ScriptedEngine()
    background = Background(id)
    channels = Channels()
    transports = Transports([TcpTransport()])
    arena = Arena.create(4096)
    await transports.start(arena, id, epoch)
    context = WorkerContext(
        id=id,
        role=role.role,
        modes=role.modes,
        epoch=epoch,
        engine=engine,
        spec=SPEC,
        transports=transports,
        peer=peer_to_pb(Peer(id, epoch, arena.size, transports.metadata()), host="h"),
        card=CARD,
        channels=channels,
        metrics=WorkerMetrics(CollectorRegistry()),
        background=background,
    )
    ended: list[int] = []
    serving = Serving(context, ended.append)
    serving.spawn_loops()
    server = RpcServer("127.0.0.1", 0)
    role.add_services(server, serving.runs)
    port = await server.start()
    submissions = Submissions(
        context, serving.sessions, serving.attempts, serving.watchers, serving.loader, serving.conversations
    )
    try:
        yield Worker(context, engine, serving, submissions, f"127.0.0.1:{port}", ended)
    finally:
        await server.stop(0)
        await background.close()
        await channels.close()
        await transports.close()


class Client:
    """A frontend's session, without gRPC in between."""

    def __init__(self, worker: Worker, id: str = "s") -> None:
        self.worker = worker
        self.events: list[pb.Event] = []
        self.news = asyncio.Condition()
        self.id = id
        self.task = asyncio.create_task(worker.serving.sessions.serve(id, "test", self._write))

    async def _write(self, frame: pb.Frame) -> None:
        self.events.extend(frame.events)
        async with self.news:
            self.news.notify_all()

    async def submit(self, uid: str, prompt: list[int], plan: pb.Plan, **options: object) -> None:
        """Raises BatonError when refused."""
        fallback = options.pop("fallback", pb.FALLBACK_AUTO)
        choices = options.pop("choices", (0,))
        emitted = options.pop("emitted", ())
        deadline_s = float(str(options.pop("deadline_s", HANG_S)))
        tenant = str(options.pop("tenant", ""))
        attempt = pb.Attempt(
            uid=uid,
            attempt=1,
            prompt_ids=prompt,
            emitted_ids=emitted,
            sampling=pb.Sampling(**{"max_tokens": 6, "seed": 1, **options}),
            key_root=bytes(16),
            deadline=time.time() + deadline_s,
            choices=choices,
            model="m",
            tenant=tenant,
        )
        await self.worker.submissions.submit(
            pb.SubmitRequest(session=self.id, attempt=attempt, plan=plan, fallback=fallback, card=CARD)
        )

    def of(self, uid: str) -> list[pb.Event]:
        """What has come for one request."""
        return [e for e in self.events if e.uid == uid]

    def tokens(self, uid: str, choice: int = 0) -> list[int]:
        """Its tokens of one choice so far."""
        return [t for e in self.of(uid) if e.choice == choice for t in e.tokens.ids]

    def over(self, uid: str, choices: int = 1) -> bool:
        """Whether its last event has come."""
        events = self.of(uid)
        ended = any(e.HasField("failure") or e.HasField("handback") for e in events)
        return ended or sum(bool(e.finish) for e in events) == choices

    async def until(self, uid: str, choices: int = 1) -> pb.Event:
        """Wait for its last event."""
        async with asyncio.timeout(HANG_S), self.news:
            await self.news.wait_for(lambda: self.over(uid, choices))
        return self.of(uid)[-1]

    async def first(self, uid: str) -> None:
        """Wait for its first event."""
        async with asyncio.timeout(HANG_S), self.news:
            await self.news.wait_for(lambda: bool(self.of(uid)))

    def attempt(self, uid: str) -> Attempt | None:
        """The live attempt."""
        return self.worker.serving.attempts.get(uid, 1)

    async def close(self) -> None:
        """End the session."""
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


@dataclass
class Pair:
    """Both, and a client of the decode worker."""

    prefill: Worker
    decode: Worker
    client: Client

    def plan(self, *, local: bool = False) -> pb.Plan:
        """Disaggregated over the two."""
        return pb.Plan(mode=pb.MODE_DISAGGREGATED, prefill=self.prefill.target(), local_is_cheapest=local)

    async def idle(self) -> None:
        """Both hold nothing."""
        await self.decode.idle()
        await self.prefill.idle()


@contextlib.asynccontextmanager
async def pair() -> AsyncIterator[Pair]:
    """Both, checked for leaks at the end."""
    async with worker(PREFILL, "prefill-1", 11) as prefill, worker(DECODE, "decode-1", 22) as decode:
        client = Client(decode)
        await asyncio.sleep(0)  # its session opens
        yield Pair(prefill, decode, client)
        for one in (prefill, decode):
            one.engine.gate.set()
        await client.close()
        await decode.idle()
        await prefill.idle()
