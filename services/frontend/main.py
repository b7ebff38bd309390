"""Wiring of the frontend process."""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import uvloop
from prometheus_client import ProcessCollector

from baton.model.card import load_model
from baton.process import Process, run_process
from baton.rpc.channel import Channels
from baton.v1 import registry_pb2, worker_pb2
from services.frontend.api_keys import ApiKeys
from services.frontend.app import create_app
from services.frontend.batches.answer import CHAT, RESPONSES, Answerer
from services.frontend.batches.batches import Batches
from services.frontend.batches.idle import ARRIVING_S
from services.frontend.batches.lane import Lane
from services.frontend.batches.look import Look
from services.frontend.batches.metrics import BatchMetrics
from services.frontend.batches.pauses import Pauses
from services.frontend.drain import Requests
from services.frontend.embeddings.make import make, read_inputs
from services.frontend.frontend import Frontend
from services.frontend.gate import Gate
from services.frontend.lately import LONG_AWAY_S
from services.frontend.metrics import FrontendMetrics
from services.frontend.reader import BodyReader
from services.frontend.ready import CardKeeper, Readiness
from services.frontend.request import Backend
from services.frontend.respond import Prepared
from services.frontend.responses.prepare import prepare_line
from services.frontend.responses.store import ResponseStore
from services.frontend.route import RouterClient
from services.frontend.server import listen, make_server
from services.frontend.sessions import Sessions
from services.frontend.settings import FrontendSettings

BODIES_HELD = 8
"""Bodies of the largest size that may be held at once until they are read."""


def main() -> None:
    """Be a frontend until SIGTERM."""
    settings = FrontendSettings.parse(sys.argv[1:])
    run_process("frontend", settings, lambda process: _serve(process, settings), uvloop.new_event_loop)


async def _serve(process: Process, settings: FrontendSettings) -> None:
    model = load_model(settings.model, settings.served_name)
    sock = listen(settings.host, settings.port)
    address = f"{settings.host}:{sock.getsockname()[1]}"
    url, metrics_url = f"http://{address}", f"http://{address}/metrics"
    background, registry, channels = process.background, process.registry, Channels()
    process.closing(channels.close)
    ProcessCollector(registry=process.collectors)
    metrics = FrontendMetrics(process.collectors)
    sessions = Sessions(process.id, model.name, channels, background, metrics, lambda worker: router.failed(worker))
    workers = registry.view("workers", registry_pb2.Worker, confirm=sessions.answers)
    routers = registry.view("routers", registry_pb2.Router)
    channels.follow(workers)
    channels.follow(routers)
    router = RouterClient(routers, workers, sessions.live(), channels, metrics)
    card = CardKeeper(model.card, registry)
    fallback = worker_pb2.FALLBACK_STRICT if settings.fallback == "strict" else worker_pb2.FALLBACK_AUTO
    readiness = Readiness(model.name, registry, workers, routers, router, sessions, card, fallback)
    bodies = BodyReader(model, metrics, settings.tool_parser, settings.reasoning_parser)
    process.closing(bodies.close)
    bodies.reading.voices.grammars.warm()
    backend = Backend(
        card=model.card,
        eos_ids=model.generation.eos_ids,
        prompts=bodies.reading.prompts,
        router=router,
        sessions=sessions,
        background=background,
        metrics=metrics,
        fallback=fallback,
        resume_patience_s=settings.resume_patience_s,
        ttft_slo_s=settings.ttft_slo_s,
    )
    requests = Requests()
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
        responses=ResponseStore(metrics.responses_evicted, metrics.responses_bytes),
        requests=requests,
        api_keys=ApiKeys(Path(settings.api_keys_file)) if settings.api_keys_file else None,
        cors_origins=settings.origins,
    )
    if settings.batch_dir:
        look = Look(model.name, workers, sessions.live(), backend.placed)
        pauses = partial(Pauses, workers, sessions.stub, background)
        frontend = await _with_batches(process, settings, frontend, look, pauses)
    server = make_server(create_app(frontend), settings.client_stall_s, metrics.slow_clients.inc)
    # What is here now stays: without it each full collection walks the vocabulary and holds up the loop.
    gc.collect()
    gc.freeze()

    await registry.start()
    unfollow = sessions.follow(workers)
    background.spawn(card.run(), "model card")
    background.spawn(router.run(), "reports")
    registration = await registry.register("frontends", process.id, _registration(process, url))
    serving = background.spawn(server.serve(sockets=[sock]), "http")
    serving.add_done_callback(lambda _: process.end(1))
    await server.listening.wait()
    process.ready(address, metrics_url)

    await process.stopped()
    readiness.draining = True
    await registration.withdraw()
    if frontend.batches is not None:
        await frontend.batches.stop()
    await server.leave(requests, settings.linger_s, settings.drain_s)
    await serving
    unfollow()
    await router.flush()


async def _with_batches(
    process: Process,
    settings: FrontendSettings,
    frontend: Frontend,
    look: Look,
    pauses: Callable[[BatchMetrics], Pauses],
) -> Frontend:
    """The frontend with its files and batches, which go on from where they stand."""
    metrics, gate = BatchMetrics(process.collectors), frontend.gate
    lane = Lane(look, lambda: time.monotonic() - gate.entered_at < ARRIVING_S, pauses(metrics), metrics)
    gate.on_enter = lane.hurry

    async def generate(endpoint: str, body: bytes, uid: str, tenant: str, timeout_s: float) -> Prepared:
        if endpoint == RESPONSES:
            return await prepare_line(frontend, body, uid, tenant, timeout_s, lane.turn)
        chat = endpoint == CHAT
        return await frontend.prepare(body, uid, tenant, chat=chat, timeout_s=timeout_s, turns=lane.turn)

    answerer = Answerer(
        generate,
        lambda body: read_inputs(frontend, body, LONG_AWAY_S),
        lambda inputs, uid, timeout_s: make(frontend, inputs, uid, time.time() + timeout_s, lane.turn),
        metrics,
    )
    batches = Batches(
        Path(settings.batch_dir),
        frontend.model.name,
        settings.max_file_bytes,
        settings.batch_dir_bytes,
        answerer,
        lambda: lane.lines,
        process.background,
        metrics,
    )
    process.closing(batches.close)
    await batches.open()
    process.background.spawn(lane.run(), "batch lane")
    return replace(frontend, batches=batches)


def _registration(process: Process, url: str) -> registry_pb2.Frontend:
    return registry_pb2.Frontend(id=process.id, epoch=process.epoch, url=url, started=time.time(), pid=os.getpid())
