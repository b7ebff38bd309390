"""A worker process from start to exit: wires the parts, registers, serves, drains.

A dead engine ends the process, and its epoch with it: live attempts fail at once (their frontends resume them
elsewhere), the registration goes, and a supervisor starts a new process. Exit is `os._exit` after the clean-up: NIXL's
own teardown crashes.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import sys
import time
from dataclasses import dataclass

import structlog
from prometheus_client import CollectorRegistry

from baton.engine.torch.host import TorchEngine
from baton.errors import BatonError, Reason
from baton.model.card import load_card
from baton.observe.logs import setup_logs
from baton.observe.metrics import MetricsServer
from baton.registry import Registration, Registry, machine_id
from baton.rpc.channel import Channels
from baton.rpc.codec import peer_to_pb
from baton.rpc.server import RpcServer
from baton.rpc.tasks import Background
from baton.transfer.nixl.transport import NixlTransport
from baton.transfer.port import Peer, Transport
from baton.transfer.tcp.transport import TcpTransport
from baton.transfer.transports import Transports
from baton.v1 import registry_pb2, worker_pb2_grpc
from baton.v1 import worker_pb2 as pb
from baton.worker.attempts import Attempts
from baton.worker.calibrate import measure_rates
from baton.worker.context import WorkerContext
from baton.worker.drain import drain
from baton.worker.metrics import WorkerMetrics
from baton.worker.registration import worker_message
from baton.worker.role import WorkerRole
from baton.worker.run import Runs
from baton.worker.service import WorkerServicer
from baton.worker.sessions import Session, Sessions
from baton.worker.settings import WorkerSettings
from baton.worker.submit import Submissions
from baton.worker.watch import Watchers

GRACE_S = 10.0
"""From SIGTERM to the exit."""
DRAIN_S = 7.0
FLUSH_S = 1.0
QUARANTINE_CAP = 0.5
"""Share of the pool that late reads may hold before the process starts over with a new epoch."""
CHECK_S = 1.0

_log = structlog.get_logger()


def run_worker(role: WorkerRole, settings: WorkerSettings) -> None:
    """Be a worker of that role until SIGTERM or a failure; does not return."""
    id = settings.id or f"{role.name}-{secrets.token_hex(3)}"
    setup_logs(role.name, id, settings.log_level, settings.log_json)
    code = 1
    try:
        code = asyncio.run(WorkerRuntime(role, id, settings).run())
    except BatonError as error:
        _log.error("worker ends", reason=error.reason.name, message=error.message)
    except BaseException:
        _log.exception("worker ends")
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


@dataclass
class _Parts:
    """What serves requests, once the engine is there."""

    context: WorkerContext
    sessions: Sessions
    attempts: Attempts
    runs: Runs
    watchers: Watchers


class WorkerRuntime:
    """One for each process."""

    def __init__(self, role: WorkerRole, id: str, settings: WorkerSettings) -> None:
        self._role = role
        self._id = id
        self._settings = settings
        self._epoch = secrets.randbits(64) | 1
        self._metrics_registry = CollectorRegistry()
        self._background = Background(id)
        self._channels = Channels()
        self._registry = Registry(settings.etcd_endpoints, settings.cluster, self._background)
        self._registration: Registration | None = None
        self._message = registry_pb2.Worker()
        self._stop: asyncio.Future[int] | None = None

    async def run(self) -> int:
        """Serve until told to stop; the exit code. Raises BatonError when it cannot start."""
        stop = self._stop = asyncio.get_running_loop().create_future()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal)
        card = load_card(self._settings.model, self._settings.served_name)
        engine = self._engine()
        starting = asyncio.ensure_future(engine.start())
        await asyncio.wait((starting, stop), return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            await engine.close()
            return 0
        spec = starting.result()
        rates = await measure_rates(engine, spec)
        transports = Transports(self._transports())
        await transports.start(engine.arena, self._id, self._epoch, slot_bytes=spec.fingerprint.block_bytes)
        peer = Peer(self._id, self._epoch, engine.arena.size, transports.metadata())
        context = WorkerContext(
            id=self._id,
            role=self._role.role,
            modes=self._role.modes,
            epoch=self._epoch,
            engine=engine,
            spec=spec,
            transports=transports,
            peer=peer_to_pb(peer, host=machine_id()),
            card=card,
            channels=self._channels,
            metrics=WorkerMetrics(self._metrics_registry),
            background=self._background,
        )
        parts = self._parts(context)
        server = RpcServer(self._settings.host, self._settings.port)
        servicer = WorkerServicer(
            context,
            parts.sessions,
            parts.attempts,
            Submissions(context, parts.sessions, parts.attempts, parts.watchers),
            parts.runs,
            parts.watchers,
            lambda: self._message,
            lambda: self._say_draining(parts),
        )
        server.add(worker_pb2_grpc.add_WorkerServiceServicer_to_server, servicer, "baton.v1.WorkerService")
        self._role.add_services(server, parts.runs)
        port = await server.start()
        metrics = MetricsServer(self._settings.host, self._settings.metrics_port, self._metrics_registry)
        await metrics.start()
        self._message = worker_message(
            context, address=f"{self._settings.host}:{port}", metrics_url=metrics.url, rates=rates
        )
        self._spawn_loops(parts)
        await self._registry.start()
        self._background.spawn(self._announce(card), "announce")
        server.set_serving(True)
        self._say_ready()
        code = await stop
        await self._leave(parts, server, code)
        return code

    def _engine(self) -> TorchEngine:
        settings = self._settings
        return TorchEngine(
            settings.model,
            dtype=settings.dtype,
            arena_bytes=int(settings.pool_gib * 2**30),
            max_streams=settings.max_streams,
            chunk_tokens=settings.chunk_tokens,
            threads=settings.threads,
            core=settings.core,
            epoch=self._epoch,
            owner=self._id,
        )

    def _transports(self) -> list[Transport]:
        known = {"nixl": NixlTransport, "tcp": lambda: TcpTransport(self._settings.host)}
        names = [name.strip() for name in self._settings.transports.split(",") if name.strip()]
        unknown = [name for name in names if name not in known]
        if unknown or not names:
            raise BatonError(Reason.INVALID_REQUEST, f"--transports: not {unknown or names}, but of {sorted(known)}")
        return [known[name]() for name in names]

    def _parts(self, context: WorkerContext) -> _Parts:
        def heartbeat() -> pb.Heartbeat:
            return _heartbeat(context)

        def end_session(session: Session) -> None:
            for attempt in attempts.of(session):
                attempt.abort()

        watchers = Watchers(self._epoch, lambda: _load(context), context.metrics)
        attempts = Attempts(context.metrics, watchers.changed)
        sessions = Sessions(self._epoch, context.metrics, heartbeat, end_session)
        return _Parts(context, sessions, attempts, Runs(context, watchers), watchers)

    def _spawn_loops(self, parts: _Parts) -> None:
        spawn = self._background.spawn
        spawn(parts.sessions.beat(), "heartbeats")
        spawn(parts.watchers.tick(), "load")
        spawn(self._follow_tokens(parts), "engine events")
        spawn(self._follow_cache(parts), "cache events")
        spawn(self._check(parts.context), "checks")

    async def _follow_tokens(self, parts: _Parts) -> None:
        """Every step's tokens to their sessions. The engine's end is ours."""
        try:
            async for events in parts.context.engine.events():
                parts.attempts.dispatch(events)
            error = BatonError(Reason.ENGINE_FAILED, "the engine's events ended")
        except BatonError as failed:
            error = failed
        except Exception as failed:
            _log.exception("engine events could not be passed on")
            error = BatonError(Reason.INTERNAL, f"{type(failed).__name__} while passing tokens on")
        _log.error("the engine is gone: this epoch ends", reason=error.reason.name, message=error.message)
        for attempt in parts.attempts:
            attempt.send_failure(error)
        self._end(1)

    async def _follow_cache(self, parts: _Parts) -> None:
        try:
            await parts.watchers.follow(parts.context.engine)
        except BatonError as error:
            _log.warning("cache events ended", reason=error.reason.name, message=error.message)

    async def _check(self, context: WorkerContext) -> None:
        """Show the engine's state, and start over when late reads hold too much of the pool."""
        while True:
            await asyncio.sleep(CHECK_S)
            stats = context.engine.stats()
            context.metrics.engine(stats)
            if stats.blocks_total and stats.blocks_quarantined > QUARANTINE_CAP * stats.blocks_total:
                _log.error("late reads hold too much of the pool: starting over", blocks=stats.blocks_quarantined)
                self._end(1)

    async def _announce(self, card: registry_pb2.ModelCard) -> None:
        """Claim the model's card, then register; etcd may be away for as long as it likes."""
        while True:
            try:
                standing = await self._registry.claim_card(card)
                break
            except BatonError as error:
                _log.warning("the model's card is not claimed yet", message=error.message)
        fields = [d.name for d in card.DESCRIPTOR.fields if getattr(card, d.name) != getattr(standing, d.name)]
        if fields:
            _log.error("another model is served under this name", model=card.model, differs=fields, standing=standing)
            self._end(1)
            return
        self._registration = await self._registry.register("workers", self._id, self._message)

    def _say_draining(self, parts: _Parts) -> None:
        self._message.draining = True
        parts.watchers.changed()
        if self._registration is not None:
            self._background.spawn(self._update(self._registration), "say draining")

    async def _update(self, registration: Registration) -> None:
        await registration.update(self._message)

    def _say_ready(self) -> None:
        ready = {
            "ready": True,
            "id": self._id,
            "address": self._message.address,
            "metrics": self._message.metrics_url,
            "pid": os.getpid(),
        }
        print(json.dumps(ready), flush=True)
        _log.info("ready", address=self._message.address, epoch=self._epoch)

    def _on_signal(self) -> None:
        if self._stop is not None and self._stop.done():
            _log.warning("second signal: leaving now")
            os._exit(1)
        self._end(0)

    def _end(self, code: int) -> None:
        if self._stop is not None and not self._stop.done():
            self._stop.set_result(code)

    async def _leave(self, parts: _Parts, server: RpcServer, code: int) -> None:
        """Drain (when the engine lives), withdraw, close. Bounded as a whole."""
        try:
            async with asyncio.timeout(GRACE_S):
                server.set_serving(False)
                if code == 0:
                    parts.context.draining = True
                    self._say_draining(parts)
                    await drain(parts.context, parts.attempts, parts.runs, DRAIN_S)
                if self._registration is not None:
                    await self._registration.withdraw()
                await parts.sessions.end_all(FLUSH_S)
                await server.stop(FLUSH_S)
                await self._background.close()
                await self._registry.close()
                await self._channels.close()
                await parts.context.transports.close()
                await parts.context.engine.close()
        except TimeoutError:
            _log.error("clean-up took too long", grace_s=GRACE_S)
        _log.info("left", code=code)


def _heartbeat(context: WorkerContext) -> pb.Heartbeat:
    stats = context.engine.stats()
    return pb.Heartbeat(
        time=time.time(),
        step_started=stats.step_started,
        step_predicted_s=stats.step_predicted_s,
        running=stats.running,
        waiting=stats.waiting,
        draining=context.draining,
    )


def _load(context: WorkerContext) -> pb.Load:
    stats = context.engine.stats()
    return pb.Load(
        running=stats.running,
        waiting=stats.waiting,
        queued_prefill_tokens=stats.queued_prefill_tokens,
        blocks_total=stats.blocks_total,
        blocks_free=stats.blocks_free,
        prefill_tok_s=stats.prefill_tok_s,
        decode_step_s=stats.decode_step_s,
        draining=context.draining,
    )
