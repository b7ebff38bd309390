"""A worker process from start to exit: wires the parts, serves, drains.

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
from collections.abc import Callable

import structlog
from prometheus_client import CollectorRegistry

from baton.engine.torch.host import TorchEngine
from baton.errors import BatonError, Reason
from baton.model.card import load_card
from baton.observe.logs import setup_logs
from baton.observe.metrics import MetricsServer
from baton.registry import Registry, machine_id
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
from baton.worker.announce import Announcement
from baton.worker.calibrate import measure_rates
from baton.worker.context import WorkerContext
from baton.worker.drain import drain
from baton.worker.metrics import WorkerMetrics
from baton.worker.registration import worker_message
from baton.worker.role import WorkerRole
from baton.worker.serving import Serving
from baton.worker.settings import WorkerSettings
from baton.worker.warm import Warmer

GRACE_S = 10.0
"""From SIGTERM to the exit."""
DRAIN_S = 7.0
FLUSH_S = 1.0

_log = structlog.get_logger()


def run_worker(role: WorkerRole, settings: WorkerSettings) -> None:
    """Be a worker of that role until SIGTERM or a failure; does not return."""
    id = settings.id or f"{role.name}-{secrets.token_hex(3)}"
    setup_logs(role.name, id, settings.log_level, settings.log_json)
    asyncio.run(_run_and_exit(role, id, settings))


async def _run_and_exit(role: WorkerRole, id: str, settings: WorkerSettings) -> None:
    """Exit from inside the loop: closing the loop would wait for threads and run teardowns that crash."""
    code = 1
    try:
        code = await WorkerRuntime(role, id, settings).run()
    except BatonError as error:
        _log.error("worker ends", reason=error.reason.name, message=error.message)
    except BaseException:
        _log.exception("worker ends")
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


class WorkerRuntime:
    """One for each process."""

    def __init__(self, role: WorkerRole, id: str, settings: WorkerSettings) -> None:
        self._role = role
        self._id = id
        self._settings = settings
        self._epoch = secrets.randbits(64) | 1
        self._collectors = CollectorRegistry()
        self._background = Background(id)
        self._channels = Channels()
        self._registry = Registry(settings.etcd_endpoints, settings.cluster, self._background)
        self._stop: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def run(self) -> int:
        """Serve until told to stop; the exit code. Raises BatonError when it cannot start."""
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal)
        context, rates = await self._start_engine()
        serving = Serving(context, self._end)
        server = RpcServer(self._settings.host, self._settings.port)
        servicer = serving.servicer()
        server.add(worker_pb2_grpc.add_WorkerServiceServicer_to_server, servicer, "baton.v1.WorkerService")
        self._role.add_services(server, serving.runs)
        port = await server.start()
        metrics = MetricsServer(self._settings.host, self._settings.metrics_port, self._collectors)
        await metrics.start()
        address = f"{self._settings.host}:{port}"
        message = worker_message(context, address=address, metrics_url=metrics.url, rates=rates)
        serving.announcement = Announcement(self._registry, self._background, message, lambda: self._end(1))
        serving.spawn_loops()
        await self._registry.start()
        self._background.spawn(serving.announcement.run(), "announce")
        if pb.MODE_DISAGGREGATED in context.modes:
            Warmer(context).follow(self._registry.view("workers", registry_pb2.Worker))
        await server.set_serving(True)
        ready = {"ready": True, "id": self._id, "address": address, "metrics": metrics.url, "pid": os.getpid()}
        print(json.dumps(ready), flush=True)
        _log.info("ready", address=address, epoch=self._epoch, transports=list(message.transports))
        code = await self._stop
        await self._leave(serving, server, code)
        return code

    async def _start_engine(self) -> tuple[WorkerContext, registry_pb2.Rates]:
        settings = self._settings
        transports = Transports(self._transports())
        card = load_card(settings.model, settings.served_name)
        engine = TorchEngine(
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
        starting = asyncio.ensure_future(engine.start())
        await asyncio.wait((starting, self._stop), return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            await engine.close()
            raise BatonError(Reason.ABORTED, "told to stop while the engine was starting")
        spec = starting.result()
        rates = await measure_rates(engine, spec)
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
            metrics=WorkerMetrics(self._collectors),
            background=self._background,
        )
        return context, rates

    def _transports(self) -> list[Transport]:
        known: dict[str, Callable[[], Transport]] = {
            "nixl": lambda: NixlTransport(self._settings.host),
            "tcp": lambda: TcpTransport(self._settings.host),
        }
        names = [name.strip() for name in self._settings.transports.split(",") if name.strip()]
        unknown = [name for name in names if name not in known]
        if unknown or not names:
            raise BatonError(Reason.INVALID_REQUEST, f"--transports: not {unknown or names}, but of {sorted(known)}")
        return [known[name]() for name in names]

    def _on_signal(self) -> None:
        if self._stop.done():
            _log.warning("second signal: leaving now")
            os._exit(1)
        self._end(0)

    def _end(self, code: int) -> None:
        if not self._stop.done():
            self._stop.set_result(code)

    async def _leave(self, serving: Serving, server: RpcServer, code: int) -> None:
        """Drain (when the engine lives), withdraw, close. Bounded as a whole."""
        try:
            async with asyncio.timeout(GRACE_S):
                await server.set_serving(False)
                if code == 0:
                    serving.say_draining()
                    await drain(serving.context, serving.attempts, serving.runs, DRAIN_S)
                await serving.sessions.end_all(FLUSH_S)
                if serving.announcement is not None:
                    await serving.announcement.withdraw()
                await server.stop(FLUSH_S)
                await self._background.close()
                await self._registry.close()
                await self._channels.close()
                await serving.context.transports.close()
                await serving.context.engine.close()
        except TimeoutError:
            _log.error("clean-up took too long", grace_s=GRACE_S)
        _log.info("left", code=code)
