"""`POST /v1/embeddings`."""

from __future__ import annotations

import asyncio
import secrets
import time

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from services.frontend.asked import Api
from services.frontend.embeddings import PATH
from services.frontend.embeddings.answer import answer
from services.frontend.embeddings.body import read_told
from services.frontend.embeddings.place import embed
from services.frontend.frontend import Frontend
from services.frontend.receiving import Receive, read_as
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
            asked = await read_as(frontend, body, Api.EMBEDDINGS)
        finally:
            body.clear()
            entered.body_read()
        inputs = [prompt.ids for prompt in asked.prompts]
        tokens = sum(map(len, inputs))
        vectors = await embed(frontend.backend, uid, inputs, frontend.context_length(), deadline)
        frontend.metrics.prompt_tokens.inc(tokens)
        made = await asyncio.to_thread(answer, vectors, read_told(asked.told), frontend.model.name, tokens)
        return Response(made, media_type="application/json")

    job = Job(uid, "embeddings", prepare, entered.leave)
    return CompletionResponse(job, frontend.metrics, frontend.requests, frontend.client_stall_s)
