"""Wiring of the store process."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from functools import partial

import structlog

from baton.errors import BatonError, Reason
from baton.kv.arena import Arena
from baton.observe.metrics import MetricsServer
from baton.process import ANNOUNCE_S, Process, run_process
from baton.registry import Registration, View, machine_id
from baton.rpc.server import RpcServer
from baton.transfer.port import Peer, Transport
from baton.transfer.transports import Transports, available
from baton.v1 import kvstore_pb2_grpc, registry_pb2
from services.kvstore.eviction import Watermarks
from services.kvstore.host import HostTier
from services.kvstore.metrics import KvStoreMetrics
from services.kvstore.nvme.tier import NvmeTier
from services.kvstore.offers import Offers
from services.kvstore.service import KvStoreService
from services.kvstore.settings import KvStoreSettings
from services.kvstore.store import Store
from services.kvstore.tiers import lower_tiers

QUARANTINE_CAP = 0.25
"""Above this share of slots waiting for late reads the process ends: the next one has a new epoch and all slots."""
CHECK_S = 1.0
FLUSH_S = 1.0

_log = structlog.get_logger()


def main() -> None:
    """Be a store until SIGTERM."""
    settings = KvStoreSettings.parse(sys.argv[1:])
    run_process("kvstore", settings, lambda process: _serve(process, settings))


async def _serve(process: Process, settings: KvStoreSettings) -> None:
    background, registry = process.background, process.registry
    arena = Arena.create(int(settings.capacity_gib * 2**30), "baton-kvstore")
    transports = Transports(_transports(settings))
    process.closing(transports.close)
    await transports.start(arena, process.id, process.epoch)
    metrics = KvStoreMetrics(process.collectors)
    marks = Watermarks(settings.high_watermark, settings.low_watermark)
    host = HostTier(arena, process.id, process.epoch, marks, settings.quotas)
    below = await lower_tiers(settings, marks, metrics)
    for tier in below.tiers:
        process.closing(tier.close)
    store = Store(host, below.tiers, below.missing, background, metrics, settings.ttl_s, settings.layout_rest_s)
    offers = Offers(store, transports, background, metrics)
    peer = Peer(process.id, process.epoch, arena.size, transports.metadata())
    service = KvStoreService(peer, machine_id(), store, transports, offers, background, metrics)
    figures = MetricsServer(settings.host, settings.metrics_port, process.collectors)
    process.closing(figures.close)
    server = RpcServer(settings.host, settings.port)
    server.add(kvstore_pb2_grpc.add_KvStoreServiceServicer_to_server, service, "baton.v1.KvStoreService")
    process.closing(partial(server.stop, 0))

    address = f"{settings.host}:{await server.start()}"
    await figures.start()
    await registry.start()
    message = _registration(process, address, figures.url, arena.size)
    message.fingerprint = store.fingerprint
    registration = await registry.register("kvstores", process.id, message)
    background.spawn(_tell_shape(store, registration, message), "tell shape")
    background.spawn(store.writeback.run(), "write-behind")
    workers = registry.view("workers", registry_pb2.Worker)
    background.spawn(_keep_house(store, workers), "expire, give way and tell speeds")
    for nvme in below.scans:
        background.spawn(_scan(nvme, host), "scan")
    background.spawn(service.beat(), "heartbeats")
    background.spawn(_watch_quarantine(host, process), "watch quarantine")
    await server.set_serving(True)
    process.ready(address, figures.url)

    code = await process.stopped()
    await server.set_serving(False)
    await registration.withdraw()
    if code == 0:
        await asyncio.sleep(ANNOUNCE_S)
        await service.drain(settings.drain_s - ANNOUNCE_S)
    service.close()
    await server.stop(FLUSH_S)


async def _tell_shape(store: Store, registration: Registration, message: registry_pb2.KvStore) -> None:
    """What a restart finds, or the first offer, fixes the layout, a clear frees it: the registration says which."""
    while True:
        await store.host.shape_changed.wait()
        store.host.shape_changed.clear()
        if message.fingerprint != store.fingerprint:
            message.fingerprint = store.fingerprint
            await registration.update(message)


async def _keep_house(store: Store, workers: View[registry_pb2.Worker]) -> None:
    while True:
        await asyncio.sleep(CHECK_S)
        store.expire()
        store.give_way(worker.fingerprint for worker in workers.items().values())
        store.tell_speeds()


async def _scan(nvme: NvmeTier, host: HostTier) -> None:
    """The store serves meanwhile; the index fills as the scan goes."""
    began = time.monotonic()
    found = await nvme.scan()
    host.shape_changed.set()  # nothing may be there of the layout that the disk told
    _log.info("scanned", seconds=round(time.monotonic() - began, 2), **found.counts())


async def _watch_quarantine(host: HostTier, process: Process) -> None:
    while True:
        await asyncio.sleep(CHECK_S)
        if host.quarantined > QUARANTINE_CAP * max(1, host.slots):
            _log.error("late reads hold too many slots: starting over", slots=host.quarantined)
            process.end(1)
            return


def _registration(process: Process, address: str, metrics_url: str, capacity: int) -> registry_pb2.KvStore:
    return registry_pb2.KvStore(
        id=process.id,
        epoch=process.epoch,
        address=address,
        metrics_url=metrics_url,
        host=machine_id(),
        capacity_bytes=capacity,
        started=time.time(),
        pid=os.getpid(),
    )


def _transports(settings: KvStoreSettings) -> list[Transport]:
    known = {transport.name: transport for transport in available(settings.host, settings.host)}
    wanted = [name.strip() for name in settings.transports.split(",") if name.strip()]
    unknown = [name for name in wanted if name not in known]
    if unknown or not wanted:
        raise BatonError(Reason.INVALID_REQUEST, f"--transports: not {unknown or wanted}, but of {sorted(known)}")
    return [known[name] for name in wanted]
