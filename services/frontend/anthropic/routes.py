"""`/v1/messages` and `/v1/messages/count_tokens`."""

from __future__ import annotations

import functools
import secrets
import time
from collections.abc import Awaitable, Callable

import msgspec
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from baton.errors import BatonError
from services.frontend.anthropic import PATH
from services.frontend.anthropic.body import read_told
from services.frontend.anthropic.format import MessageFormat
from services.frontend.api_keys import tenant_of
from services.frontend.asked import Api
from services.frontend.frontend import Frontend
from services.frontend.gate import Pass
from services.frontend.refusals import refusal
from services.frontend.request_id import SCOPE_KEY
from services.frontend.respond import CompletionResponse, Job, Prepared

Receive = Callable[[Request, Frontend, str], Awaitable[tuple[Pass, bytearray]]]
"""Lets a request in and takes its body."""

_encode = msgspec.json.Encoder().encode


def add_messages(app: FastAPI, frontend: Frontend, receive: Receive) -> None:
    """The routes of messages."""

    async def create(request: Request) -> Response:
        return await _create(request, frontend, receive)

    async def count(request: Request) -> Response:
        return await _count(request, frontend, receive)

    app.add_route(PATH, create, ["POST"])
    app.add_route(f"{PATH}/count_tokens", count, ["POST"])


async def _create(request: Request, frontend: Frontend, receive: Receive) -> Response:
    entered, body = await receive(request, frontend, "messages")
    uid = secrets.token_hex(12)

    async def prepare() -> Prepared:
        begun = time.time()
        try:
            asked, asks = await frontend.read(body, Api.MESSAGES, tenant_of(request))
        finally:
            body.clear()
            entered.body_read()
        format = MessageFormat(
            uid,
            frontend.model.name,
            voice=asked.voice,
            prompt_tokens=len(asked.prompts[0].ids),
            omit=read_told(asked.told).omit,
            request_id=request.scope.get(SCOPE_KEY, ""),
        )
        call = frontend.call(uid, asks, asked.options, begun)
        return Prepared(call, format, asked.options.stream, include_usage=True)

    job = Job(uid, "messages", prepare, entered.leave, functools.partial(refusal, request.scope))
    return CompletionResponse(job, frontend.metrics, frontend.requests, frontend.client_stall_s)


async def _count(request: Request, frontend: Frontend, receive: Receive) -> Response:
    """How many tokens the prompt of a body has, were it asked."""
    endpoint = "messages/count_tokens"
    entered, body = await receive(request, frontend, endpoint)
    outcome = "ok"
    try:
        asked, _ = await frontend.read(body, Api.COUNT, tenant_of(request))
        return Response(_encode({"input_tokens": len(asked.prompts[0].ids)}), media_type="application/json")
    except BatonError as error:
        outcome = error.reason.name.lower()
        raise
    finally:
        entered.leave()
        frontend.metrics.requests.labels(endpoint, outcome).inc()
