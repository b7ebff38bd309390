"""Wiring of the store process."""

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

from baton.errors import BatonError, Reason
from baton.kv.arena import Arena
from baton.observe.logs import setup_logs
from baton.observe.metrics import MetricsServer
from baton.registry import Registry, machine_id
from baton.rpc.server import RpcServer
from baton.rpc.tasks import Background
from baton.transfer.port import Peer, Transport
from baton.transfer.transports import Transports, available
from baton.v1 import kvstore_pb2_grpc, registry_pb2
from services.kvstore.events import Events
from services.kvstore.eviction import Watermarks
from services.kvstore.host import HostTier
from services.kvstore.metrics import KvStoreMetrics
from services.kvstore.offers import Offers
from services.kvstore.service import KvStoreService
from services.kvstore.settings import KvStoreSettings

GRACE_S = 8.0
QUARANTINE_CAP = 0.25
"""Above this share of slots waiting for late reads the process ends: the next one has a new epoch and all slots."""
CHECK_S = 1.0

_log = structlog.get_logger()


def main() -> None:
    """Be a store until SIGTERM. Ends through `os._exit`: a transport's own teardown may crash."""
    settings = KvStoreSettings.parse(sys.argv[1:])
    id = settings.id or f"kvstore-{secrets.token_hex(3)}"
    setup_logs("kvstore", id, settings.log_level, settings.log_json)
    code = 1
    try:
        code = asyncio.run(run(settings, id))
    except BatonError as error:
        _log.error("store ends", reason=error.reason.name, message=error.message)
    except BaseException:
        _log.exception("store ends")
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


async def run(settings: KvStoreSettings, id: str) -> int:
    """Serve until told to stop; the exit code."""
    stop: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(
            number, lambda: os._exit(1) if stop.done() else stop.set_result(0)
        )
    epoch, collector, background = secrets.randbits(64) | 1, CollectorRegistry(), Background(id)
    arena = Arena.create(int(settings.capacity_gib * 2**30), "baton-kvstore")
    transports = Transports(_transports(settings))
    await transports.start(arena, id, epoch)
    host = HostTier(arena, id, epoch, Watermarks(settings.high_watermark, settings.low_watermark))
    events = Events(host.keys)
    service_metrics = KvStoreMetrics(collector)
    offers = Offers(host, transports, events, background, service_metrics)
    peer = Peer(id, epoch, arena.size, transports.metadata())
    service = KvStoreService(peer, machine_id(), host, transports, offers, events, background, service_metrics)
    server = RpcServer(settings.host, settings.port)
    server.add(kvstore_pb2_grpc.add_KvStoreServiceServicer_to_server, service, "baton.v1.KvStoreService")
    metrics = MetricsServer(settings.host, settings.metrics_port, collector)
    registry = Registry(settings.etcd_endpoints, settings.cluster, background)
    try:
        address = f"{settings.host}:{await server.start()}"
        await metrics.start()
        await registry.start()
        message = registry_pb2.KvStore(
            id=id,
            epoch=epoch,
            address=address,
            metrics_url=metrics.url,
            host=machine_id(),
            capacity_bytes=arena.size,
            started=time.time(),
            pid=os.getpid(),
        )
        registration = await registry.register("kvstores", id, message)

        async def tell_shape() -> None:
            """The first offer fixes the layout, a clear frees it: the registration says which."""
            while True:
                await host.shape_changed.wait()
                host.shape_changed.clear()
                message.fingerprint = host.shape.fingerprint if host.shape else ""
                await registration.update(message)

        async def watch_quarantine() -> None:
            while True:
                await asyncio.sleep(CHECK_S)
                if host.quarantined > QUARANTINE_CAP * max(1, host.slots) and not stop.done():
                    _log.error("late reads hold too many slots: starting over", slots=host.quarantined)
                    stop.set_result(1)

        background.spawn(tell_shape(), "tell shape")
        background.spawn(watch_quarantine(), "watch quarantine")
        await server.set_serving(True)
        print(
            json.dumps({"ready": True, "id": id, "address": address, "metrics": metrics.url, "pid": os.getpid()}),
            flush=True,
        )
        return await stop
    finally:
        await server.set_serving(False)
        async with asyncio.timeout(GRACE_S):
            await registry.close()
            service.close()
            await server.stop(1.0)
            await background.close()
            await metrics.close()
            await transports.close()


def _transports(settings: KvStoreSettings) -> list[Transport]:
    known = {transport.name: transport for transport in available(settings.host, settings.host)}
    wanted = [name.strip() for name in settings.transports.split(",") if name.strip()]
    unknown = [name for name in wanted if name not in known]
    if unknown or not wanted:
        raise BatonError(Reason.INVALID_REQUEST, f"--transports: not {unknown or wanted}, but of {sorted(known)}")
    return [known[name] for name in wanted]
