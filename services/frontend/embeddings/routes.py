"""`POST /v1/embeddings`."""

from __future__ import annotations

import secrets
import time

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from services.frontend.embeddings import PATH
from services.frontend.embeddings.make import make, read_inputs
from services.frontend.frontend import Frontend
from services.frontend.receiving import Receive
from services.frontend.respond import CompletionResponse, Job


def add_embeddings(app: FastAPI, frontend: Frontend, receive: Receive) -> None:
    """The route."""

    async def create(request: Request) -> Response:
        return await _create(request, frontend, receive)

    app.add_route(PATH, create, ["POST"])


async def _create(request: Request, frontend: Frontend, receive: Receive) -> Response:
    entered, body = await receive(request, frontend, "embeddings")
    uid = f"emb-{secrets.token_hex(12)}"

    async def prepare() -> Response:
        deadline = time.time() + frontend.request_timeout_s
        try:
            inputs = await read_inputs(frontend, body)
        finally:
            body.clear()
            entered.body_read()
        made = await make(frontend, inputs, uid, deadline)
        frontend.metrics.prompt_tokens.inc(inputs.tokens)
        return Response(made, media_type="application/json")

    job = Job(uid, "embeddings", prepare, entered.leave)
    return CompletionResponse(job, frontend.metrics, frontend.requests, frontend.client_stall_s)
