"""Wiring of the router process."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import sys
import time

import structlog
from prometheus_client import CollectorRegistry

from baton.errors import BatonError
from baton.observe.logs import setup_logs
from baton.observe.metrics import MetricsServer
from baton.registry import Registry
from baton.rpc.server import RpcServer
from baton.rpc.tasks import Background
from baton.v1 import registry_pb2, router_pb2_grpc
from services.router.costs import Parameters
from services.router.index import PrefixIndex
from services.router.metrics import RouterMetrics
from services.router.quarantine import Quarantine
from services.router.rates import PrefillShare, Rates
from services.router.reservations import Reservations
from services.router.service import RouterService
from services.router.settings import RouterSettings
from services.router.speculation import Speculation
from services.router.workers import Workers

SYNC_S = 3.0
"""How long to wait for the registry before saying ready: a route before that would find nobody."""
GRACE_S = 8.0

_log = structlog.get_logger()


def main() -> None:
    """Be a router until SIGTERM."""
    settings = RouterSettings.parse(sys.argv[1:])
    id = settings.id or f"router-{secrets.token_hex(3)}"
    setup_logs("router", id, settings.log_level, settings.log_json)
    try:
        sys.exit(asyncio.run(run(settings, id)))
    except BatonError as error:
        _log.error("router ends", reason=error.reason.name, message=error.message)
        sys.exit(1)


async def run(settings: RouterSettings, id: str) -> int:
    """Serve until told to stop; the exit code."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, lambda: os._exit(1) if stop.is_set() else stop.set())
    background, collector = Background(id), CollectorRegistry()
    registry = Registry(settings.etcd_endpoints, settings.cluster, background)
    index, reservations, rates, shares = PrefixIndex(settings.max_index_keys), Reservations(), Rates(), PrefillShare()
    speculation = Speculation(index)
    workers = Workers(background, index, reservations, rates, shares, Quarantine(), speculation)
    parameters = Parameters(stall_weight=settings.stall_weight)
    service = RouterService(
        workers, index, speculation, reservations, rates, shares, parameters, registry, RouterMetrics(collector)
    )
    server = RpcServer(settings.host, settings.port)
    server.add(router_pb2_grpc.add_RouterServiceServicer_to_server, service, "baton.v1.RouterService")
    metrics = MetricsServer(settings.host, settings.metrics_port, collector)
    try:
        address = f"{settings.host}:{await server.start()}"
        await metrics.start()
        await registry.start()
        view = registry.view("workers", registry_pb2.Worker, confirm=workers.answers)
        workers.follow(view, registry.view("models", registry_pb2.ModelCard))
        if not await view.synced(SYNC_S):
            _log.warning("ready without the registry: no worker is known yet")
        await registry.register("routers", id, _registration(id, address, metrics.url))
        await server.set_serving(True)
        print(
            json.dumps({"ready": True, "id": id, "address": address, "metrics": metrics.url, "pid": os.getpid()}),
            flush=True,
        )
        await stop.wait()
        return 0
    finally:
        await server.set_serving(False)
        async with asyncio.timeout(GRACE_S):
            # The registration goes first, so that nobody comes any more; calls that are here are answered.
            await registry.close()
            await server.stop(1.0)
            workers.close()
            await background.close()
            await metrics.close()


def _registration(id: str, address: str, metrics_url: str) -> registry_pb2.Router:
    return registry_pb2.Router(
        id=id,
        epoch=secrets.randbits(64) | 1,
        address=address,
        metrics_url=metrics_url,
        started=time.time(),
        pid=os.getpid(),
    )
