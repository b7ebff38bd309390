"""`POST /tokenize`, `POST /detokenize`, `GET /version`."""

from __future__ import annotations

import secrets
from importlib.metadata import version

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from services.frontend.asked import Api
from services.frontend.frontend import Frontend
from services.frontend.receiving import Receive, read_as
from services.frontend.respond import CompletionResponse, Job
from services.frontend.tokens import DETOKENIZE, TOKENIZE


def add_tokens(app: FastAPI, frontend: Frontend, receive: Receive) -> None:
    """The routes."""
    release = version("baton")

    async def tokenize(request: Request) -> Response:
        return await _answer(request, frontend, receive, Api.TOKENIZE)

    async def detokenize(request: Request) -> Response:
        return await _answer(request, frontend, receive, Api.DETOKENIZE)

    async def told_version(_: Request) -> Response:
        return JSONResponse({"version": release})

    app.add_route(TOKENIZE, tokenize, ["POST"])
    app.add_route(DETOKENIZE, detokenize, ["POST"])
    app.add_route("/version", told_version, ["GET"])


async def _answer(request: Request, frontend: Frontend, receive: Receive, api: Api) -> Response:
    endpoint = api.name.lower()
    entered, body = await receive(request, frontend, endpoint)

    async def prepare() -> Response:
        try:
            asked = await read_as(frontend, body, api)
        finally:
            body.clear()
            entered.body_read()
        return Response(asked.told, media_type="application/json")

    job = Job(secrets.token_hex(12), endpoint, prepare, entered.leave)
    return CompletionResponse(job, frontend.metrics, frontend.requests, frontend.client_stall_s)
