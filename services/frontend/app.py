"""The routes. Thin: read the body, check it, hand it over."""

from __future__ import annotations

import asyncio
import secrets
import time
from typing import Any

import msgspec
import structlog
from fastapi import FastAPI
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from baton.errors import BatonError, Reason
from services.frontend.anthropic.routes import add_messages
from services.frontend.api_keys import RequireKey, tenant_of
from services.frontend.asked import check_model
from services.frontend.batches.routes import add_routes
from services.frontend.drain import CountRequests
from services.frontend.embeddings.routes import add_embeddings
from services.frontend.errors import internal
from services.frontend.frontend import Frontend
from services.frontend.gate import Pass
from services.frontend.media_type import check_media_type
from services.frontend.openapi import describe
from services.frontend.refusals import refusal
from services.frontend.request_id import SCOPE_KEY, RequestIds, names, new_request_id
from services.frontend.respond import CompletionResponse, Job, Prepared, abort_connection
from services.frontend.responses.routes import add_responses
from services.frontend.sglang.routes import add_sglang
from services.frontend.tokens.routes import add_tokens
from services.frontend.turnstile import Turnstile

_encode = msgspec.json.Encoder().encode
_log = structlog.get_logger()
EXPOSED_HEADERS = ("x-request-id", "request-id", "x-baton-route", "retry-after")
"""What a page of another origin may read of an answer."""


def create_app(frontend: Frontend) -> FastAPI:
    """The ASGI application over a wired frontend."""
    app = FastAPI(title="Baton", openapi_url=None, docs_url=None, redoc_url=None)
    if frontend.api_keys is not None:
        app.add_middleware(RequireKey, keys=frontend.api_keys, refused=frontend.metrics.unauthorized)
    if frontend.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=frontend.cors_origins,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=EXPOSED_HEADERS,
        )
    app.add_middleware(RequestIds)
    app.add_middleware(CountRequests, requests=frontend.requests)
    app.add_middleware(Turnstile)

    described = describe(frontend.model.name, keys=frontend.api_keys is not None)

    async def chat(request: Request) -> Response:
        return await _complete(request, frontend, chat=True)

    async def completions(request: Request) -> Response:
        return await _complete(request, frontend, chat=False)

    async def explain(request: Request) -> Response:
        return await _explain(request, frontend)

    async def models(_: Request) -> Response:
        return _json({"object": "list", "data": [frontend.model_object()]})

    async def model(request: Request) -> Response:
        check_model(request.path_params["model"], frontend.model.name)
        return _json(frontend.model_object())

    async def openapi(_: Request) -> Response:
        return _json(described)

    async def health(_: Request) -> Response:
        return _json({"status": "ok"})

    async def ready(_: Request) -> Response:
        missing = frontend.readiness.missing()
        frontend.metrics.ready.set(not missing)
        body = {"ready": not missing, "missing": [{"part": m.part, "why": m.why} for m in missing]}
        return _json(body, 503 if missing else 200)

    async def metrics(_: Request) -> Response:
        frontend.metrics.ready.set(not frontend.readiness.missing())
        return Response(generate_latest(frontend.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    app.add_route("/v1/chat/completions", chat, ["POST"])
    app.add_route("/v1/completions", completions, ["POST"])
    add_responses(app, frontend, _receive)
    add_messages(app, frontend, _receive)
    add_embeddings(app, frontend, _receive)
    add_tokens(app, frontend, _receive)
    add_sglang(app, frontend, _receive)
    app.add_route("/v1/baton/explain", explain, ["POST"])
    app.add_route("/v1/models", models, ["GET"])
    app.add_route("/v1/models/{model:path}", model, ["GET"])
    add_routes(app, frontend, _receive)
    app.add_route("/openapi.json", openapi, ["GET"])
    app.add_route("/health", health, ["GET"])
    app.add_route("/ready", ready, ["GET"])
    app.add_route("/metrics", metrics, ["GET"])

    app.add_exception_handler(BatonError, _on_baton_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(ClientDisconnect, _on_disconnect)
    app.add_exception_handler(Exception, _on_fault)
    return app


async def _complete(request: Request, frontend: Frontend, *, chat: bool) -> Response:
    endpoint = request.url.path.removeprefix("/v1/")
    entered, body = await _receive(request, frontend, endpoint)
    uid = secrets.token_hex(12)

    async def prepare() -> Prepared:
        try:
            return await frontend.prepare(body, uid, tenant_of(request), chat=chat)
        finally:
            body.clear()  # the request lives on without it
            entered.body_read()

    return CompletionResponse(
        Job(uid, endpoint, prepare, entered.leave), frontend.metrics, frontend.requests, frontend.client_stall_s
    )


async def _explain(request: Request, frontend: Frontend) -> Response:
    endpoint = request.url.path.removeprefix("/v1/")
    entered, body = await _receive(request, frontend, endpoint)
    outcome = "ok"
    try:
        return _json(await frontend.explain(body, secrets.token_hex(12), tenant_of(request)))
    except BatonError as error:
        outcome = error.reason.name.lower()
        raise
    finally:
        entered.leave()
        frontend.metrics.requests.labels(endpoint, outcome).inc()


async def _receive(request: Request, frontend: Frontend, endpoint: str) -> tuple[Pass, bytearray]:
    """Let a request in and take its body. What is returned is to be left; nothing is held after a raise."""
    entered: Pass | None = None
    try:
        entered = frontend.gate.enter()
        check_media_type(request.headers)
        body = await _read_body(request, frontend, entered)
    except BaseException as error:
        if entered is not None:
            entered.leave()
        if isinstance(error, BatonError):
            frontend.metrics.requests.labels(endpoint, error.reason.name.lower()).inc()
        raise
    return entered, body


async def _read_body(request: Request, frontend: Frontend, entered: Pass) -> bytearray:
    """The body, refused as soon as it is known to be too large; a client that stops sending it is cut off."""
    limit = frontend.max_body_bytes
    too_large = BatonError(Reason.REQUEST_TOO_LARGE, f"The body is larger than {limit} bytes.")
    length = request.headers.get("content-length", "")
    if length.isdigit():
        if int(length) > limit:
            raise too_large
        entered.body(int(length))
    body = bytearray()
    parts = aiter(request.stream())
    deadline = time.monotonic() + frontend.request_timeout_s
    try:
        while True:
            async with asyncio.timeout(min(frontend.client_stall_s, deadline - time.monotonic())):
                part = await anext(parts, None)
            if part is None:
                return body
            body += part
            if len(body) > limit:
                raise too_large
            entered.body(len(body))
    except TimeoutError:
        frontend.metrics.slow_clients.inc()
        abort_connection(request.scope)
        raise BatonError(Reason.SLOW_CLIENT, "The client does not send the body that it began.") from None


def _json(value: Any, status: int = 200) -> Response:
    return Response(_encode(value), status_code=status, media_type="application/json")


async def _on_baton_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, BatonError)
    return refusal(request.scope, error)


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = request.url.path
    if error.status_code == 404:
        return refusal(request.scope, BatonError(Reason.NOT_FOUND, f"Unknown URL: {request.method} {path}"))
    if error.status_code == 405:
        refused = BatonError(Reason.METHOD_NOT_ALLOWED, f"{request.method} is not allowed for {path}")
        return refusal(request.scope, refused, dict(error.headers or {}))
    return refusal(request.scope, BatonError(Reason.INVALID_REQUEST, str(error.detail)))


async def _on_disconnect(_: Request, __: Exception) -> Response:
    # Nobody is there to read it.
    return Response(status_code=499)


async def _on_fault(request: Request, error: Exception) -> Response:
    _log.error("unexpected failure", path=request.url.path, exc_info=error)
    scope = request.scope
    id = scope.setdefault(SCOPE_KEY, new_request_id())  # this answer is given outside of RequestIds
    return refusal(scope, internal(), dict.fromkeys(names(scope["path"]), id))
