"""Wiring of the router process."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from functools import partial

import structlog

from baton.observe.metrics import MetricsServer
from baton.process import ANNOUNCE_S, Process, run_process
from baton.rpc.channel import Channels
from baton.rpc.server import RpcServer
from baton.v1 import registry_pb2, router_pb2_grpc
from services.router.costs import Parameters
from services.router.index import PrefixIndex
from services.router.loads import LoadRates
from services.router.metrics import RouterMetrics
from services.router.prefetch import Prefetcher
from services.router.quarantine import Quarantine
from services.router.rates import PrefillShare, Rates
from services.router.reservations import Reservations
from services.router.service import RouterService
from services.router.settings import RouterSettings
from services.router.speculation import Speculation
from services.router.stores import Stores
from services.router.workers import Workers

SYNC_S = 3.0
"""How long to wait for the registry before saying ready: a route before that would find nobody."""

_log = structlog.get_logger()


def main() -> None:
    """Be a router until SIGTERM."""
    settings = RouterSettings.parse(sys.argv[1:])
    run_process("router", settings, lambda process: _serve(process, settings))


async def _serve(process: Process, settings: RouterSettings) -> None:
    registry = process.registry
    index, reservations, rates, shares = PrefixIndex(settings.max_index_keys), Reservations(), Rates(), PrefillShare()
    speculation = Speculation(index)
    parameters, metrics = Parameters(stall_weight=settings.stall_weight), RouterMetrics(process.collectors)
    workers = Workers(process.background, index, reservations, rates, shares, Quarantine(), speculation, parameters)
    loads, channels = LoadRates(), Channels()
    process.closing(channels.close)
    stores = Stores(process.background, index, loads, Quarantine())
    prefetcher = Prefetcher(process.background, channels, metrics.prefetches)
    service = RouterService(
        workers,
        index,
        speculation,
        reservations,
        rates,
        shares,
        stores,
        loads,
        prefetcher,
        parameters,
        registry,
        metrics,
    )
    server = RpcServer(settings.host, settings.port)
    server.add(router_pb2_grpc.add_RouterServiceServicer_to_server, service, "baton.v1.RouterService")
    process.closing(partial(server.stop, 0))
    figures = MetricsServer(settings.host, settings.metrics_port, process.collectors)
    process.closing(figures.close)

    address = f"{settings.host}:{await server.start()}"
    await figures.start()
    await registry.start()
    view = registry.view("workers", registry_pb2.Worker, confirm=workers.answers)
    workers.follow(view, registry.view("models", registry_pb2.ModelCard))
    view.subscribe(lambda id, worker: loads.forget(id) if worker is None else None)
    kvstores = registry.view("kvstores", registry_pb2.KvStore)
    channels.follow(kvstores)
    stores.follow(kvstores)
    if not await view.synced(SYNC_S):
        _log.warning("ready without the registry: no worker is known yet")
    registration = await registry.register("routers", process.id, _registration(process, address, figures.url))
    await server.set_serving(True)
    process.ready(address, figures.url)

    await process.stopped()
    await server.set_serving(False)
    await registration.withdraw()  # nobody comes any more; who has not heard yet is answered
    await asyncio.sleep(ANNOUNCE_S)
    await server.stop(settings.drain_s)
    workers.close()
    stores.close()


def _registration(process: Process, address: str, metrics_url: str) -> registry_pb2.Router:
    return registry_pb2.Router(
        id=process.id,
        epoch=process.epoch,
        address=address,
        metrics_url=metrics_url,
        started=time.time(),
        pid=os.getpid(),
    )
