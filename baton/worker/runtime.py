"""Wiring of a worker process: prefill, decode and merged are this one, each with its role.

A dead engine ends the process, and its epoch with it: live attempts fail at once (their frontends resume them
elsewhere), the registration goes, and a supervisor starts a new process.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from baton.errors import BatonError, Reason
from baton.observe.metrics import MetricsServer
from baton.process import Process, run_process
from baton.registry import machine_id
from baton.rpc.channel import Channels
from baton.rpc.codec import peer_to_pb
from baton.rpc.server import RpcServer
from baton.transfer.nixl.transport import NixlTransport
from baton.transfer.port import Peer, Transport
from baton.transfer.tcp.transport import TcpTransport
from baton.transfer.transports import Transports
from baton.v1 import registry_pb2, worker_pb2_grpc
from baton.v1 import worker_pb2 as pb
from baton.worker.announce import Announcement
from baton.worker.calibrate import measure_rates
from baton.worker.context import WorkerContext
from baton.worker.engines import choose_engine
from baton.worker.metrics import WorkerMetrics
from baton.worker.registration import worker_message
from baton.worker.role import WorkerRole
from baton.worker.serving import Serving
from baton.worker.settings import WorkerSettings
from baton.worker.warm import Warmer

FLUSH_S = 1.0


def run_worker(role: WorkerRole, settings: WorkerSettings) -> None:
    """Be a worker of that role until SIGTERM or a failure; does not return."""
    run_process(role.name, settings, lambda process: _serve(process, role, settings))


async def _serve(process: Process, role: WorkerRole, settings: WorkerSettings) -> None:
    context, rates = await _start_engine(process, role, settings)
    serving = Serving(context, process.end)
    server = RpcServer(settings.host, settings.port)
    server.add(worker_pb2_grpc.add_WorkerServiceServicer_to_server, serving.servicer(), "baton.v1.WorkerService")
    role.add_services(server, serving.runs)
    process.closing(partial(server.stop, 0))
    figures = MetricsServer(settings.host, settings.metrics_port, process.collectors)
    process.closing(figures.close)

    address = f"{settings.host}:{await server.start()}"
    await figures.start()
    message = worker_message(context, address=address, metrics_url=figures.url, rates=rates)
    announcement = serving.announcement = Announcement(process.registry, message, lambda: process.end(1))
    serving.spawn_loops()
    await process.registry.start()
    process.background.spawn(announcement.run(), "announce")
    if context.fingerprint:
        serving.stores.follow(process.registry.view("kvstores", registry_pb2.KvStore))
    if pb.MODE_DISAGGREGATED in context.modes:
        Warmer(context).follow(process.registry.view("workers", registry_pb2.Worker))
    await server.set_serving(True)
    process.ready(address, figures.url)

    code = await process.stopped()
    await server.set_serving(False)
    if code == 0:
        await serving.drain(settings.drain_s)
    await announcement.withdraw()
    await serving.sessions.end_all(FLUSH_S)
    await server.stop(FLUSH_S)


async def _start_engine(
    process: Process, role: WorkerRole, settings: WorkerSettings
) -> tuple[WorkerContext, registry_pb2.Rates]:
    transports, channels = Transports(_transports(settings)), Channels()
    chosen = choose_engine(process, role, settings)
    engine, card = chosen.engine, chosen.card
    for close in (engine.close, transports.close, channels.close):
        process.closing(close)
    spec = await engine.start()
    rates = await measure_rates(engine, spec)
    arena = engine.arena
    if arena is not None and spec.fingerprint is not None:
        await transports.start(arena, process.id, process.epoch, slot_bytes=spec.fingerprint.block_bytes)
    peer = Peer(process.id, process.epoch, arena.size if arena is not None else 0, transports.metadata())
    context = WorkerContext(
        id=process.id,
        role=role.role,
        modes=role.modes,
        epoch=process.epoch,
        engine=engine,
        spec=spec,
        transports=transports,
        peer=peer_to_pb(peer, host=machine_id()),
        card=card,
        channels=channels,
        metrics=WorkerMetrics(process.collectors),
        background=process.background,
        device=f"cpu:{settings.core}" if settings.core is not None else "",
    )
    return context, rates


def _transports(settings: WorkerSettings) -> list[Transport]:
    known: dict[str, Callable[[], Transport]] = {
        "nixl": lambda: NixlTransport(settings.host),
        "tcp": lambda: TcpTransport(settings.host),
    }
    names = [name.strip() for name in settings.transports.split(",") if name.strip()]
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        raise BatonError(Reason.INVALID_REQUEST, f"--transports: not {unknown or names}, but of {sorted(known)}")
    return [known[name]() for name in names]
