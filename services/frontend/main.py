"""Wiring of the frontend process."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import secrets
import signal
import sys
import time

import structlog
import uvloop
from prometheus_client import CollectorRegistry, ProcessCollector

from baton.errors import BatonError
from baton.model.card import Model, load_model
from baton.model.errors import ModelError
from baton.observe.logs import setup_logs
from baton.registry.registry import Registry
from baton.rpc.channel import Channels
from baton.rpc.tasks import Background
from baton.v1 import registry_pb2, worker_pb2
from services.frontend.app import create_app
from services.frontend.frontend import Frontend
from services.frontend.gate import Gate
from services.frontend.metrics import FrontendMetrics
from services.frontend.reader import BodyReader
from services.frontend.ready import CardKeeper, Readiness
from services.frontend.request import Backend
from services.frontend.route import RouterClient
from services.frontend.server import Server, listen, make_server
from services.frontend.sessions import Sessions
from services.frontend.settings import FrontendSettings

CLOSE_S = 3.0
BODIES_HELD = 8
"""Bodies of the largest size that may be held at once until they are read."""

_log = structlog.get_logger()


def main() -> None:
    """Be a frontend until SIGTERM."""
    settings = FrontendSettings.parse(sys.argv[1:])
    id = settings.id or f"frontend-{secrets.token_hex(3)}"
    setup_logs("frontend", id, settings.log_level, settings.log_json)
    try:
        model = load_model(settings.model, settings.served_name)
        uvloop.run(run(settings, id, model))
    except ModelError as error:
        _log.error("frontend ends: the model cannot be used", error=str(error))
        sys.exit(1)
    except BatonError as error:
        _log.error("frontend ends", reason=error.reason.name, message=error.message)
        sys.exit(1)


async def run(settings: FrontendSettings, id: str, model: Model) -> None:
    """Serve until told to stop."""
    sock = listen(settings.host, settings.port)
    address = f"{settings.host}:{sock.getsockname()[1]}"
    background, channels = Background(id), Channels()
    collector = CollectorRegistry()
    ProcessCollector(registry=collector)
    metrics = FrontendMetrics(collector)
    registry = Registry(settings.etcd_endpoints, settings.cluster, background)
    sessions = Sessions(id, model.name, channels, background, metrics)
    workers = registry.view("workers", registry_pb2.Worker, confirm=sessions.answers)
    routers = registry.view("routers", registry_pb2.Router)
    router = RouterClient(routers, workers, sessions.live(), channels, metrics)
    card = CardKeeper(model.card, registry)
    fallback = worker_pb2.FALLBACK_STRICT if settings.fallback == "strict" else worker_pb2.FALLBACK_AUTO
    readiness = Readiness(model.name, registry, workers, routers, router, sessions, card, fallback)
    bodies = BodyReader(model, metrics)
    backend = Backend(
        card=model.card,
        key_root=model.key_root(),
        eos_ids=model.generation.eos_ids,
        prompts=bodies.reading.prompts,
        router=router,
        sessions=sessions,
        background=background,
        metrics=metrics,
        fallback=fallback,
    )
    frontend = Frontend(
        model=model,
        backend=backend,
        bodies=bodies,
        gate=Gate(settings.max_requests, BODIES_HELD * settings.max_body_bytes, metrics),
        readiness=readiness,
        metrics=metrics,
        request_timeout_s=settings.request_timeout_s,
        client_stall_s=settings.client_stall_s,
        max_body_bytes=settings.max_body_bytes,
        created=int(time.time()),
    )
    server = make_server(create_app(frontend))
    # What is here now stays: without it each full collection walks the vocabulary and holds up the loop.
    gc.collect()
    gc.freeze()
    _stop_on_signal(server, readiness)
    try:
        await registry.start()
        unfollow = sessions.follow(workers)
        background.spawn(card.run(), "model card")
        background.spawn(router.run(), "reports")
        url = f"http://{address}"
        await registry.register("frontends", id, _registration(id, url))
        serving = asyncio.create_task(server.serve(sockets=[sock]), name="http")
        background.spawn(_announce(server, id, address), "ready line")
        await serving
        unfollow()
        await router.flush()
    finally:
        sock.close()
        async with asyncio.timeout(CLOSE_S):
            await registry.close()
            await background.close()
            await channels.close()
        await bodies.close()


async def _announce(server: Server, id: str, address: str) -> None:
    """The ready line, once HTTP is answered. `/ready` says whether completions can be."""
    await server.listening.wait()
    metrics = f"http://{address}/metrics"
    line = {"ready": True, "id": id, "address": address, "metrics": metrics, "pid": os.getpid()}
    print(json.dumps(line), flush=True)


def _stop_on_signal(server: Server, readiness: Readiness) -> None:
    """The first signal drains (new probes see it), the second ends at once."""

    def stop() -> None:
        if readiness.draining:
            os._exit(1)
        readiness.draining = True
        server.should_exit = True

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop)


def _registration(id: str, url: str) -> registry_pb2.Frontend:
    return registry_pb2.Frontend(id=id, epoch=secrets.randbits(64) | 1, url=url, started=time.time(), pid=os.getpid())
