"""`/v1/responses`: made, kept, fetched, cancelled, deleted."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from services.frontend.api_keys import tenant_of
from services.frontend.asked import Asked
from services.frontend.call import Ask
from services.frontend.errors import invalid
from services.frontend.frontend import Frontend
from services.frontend.gate import Pass
from services.frontend.respond import CompletionResponse, Job, Prepared
from services.frontend.responses.background import Runs
from services.frontend.responses.body import read_told
from services.frontend.responses.follow import FollowResponse
from services.frontend.responses.format import PREFIX, Final
from services.frontend.responses.items import identified
from services.frontend.responses.prepare import format_of, read
from services.frontend.responses.run import Run
from services.frontend.responses.store import Kept, with_ids

PATH = "/v1/responses"
PAGE, MAX_PAGE = 20, 100
Receive = Callable[[Request, Frontend, str], Awaitable[tuple[Pass, bytearray]]]
"""Lets a request in and takes its body."""

_encode = msgspec.json.Encoder().encode


def add_responses(app: FastAPI, frontend: Frontend, receive: Receive) -> None:
    """The routes of responses."""
    responses = Responses(frontend, receive)
    app.add_route(PATH, responses.create, ["POST"])
    app.add_route(f"{PATH}/{{id}}", responses.retrieve, ["GET"])
    app.add_route(f"{PATH}/{{id}}", responses.delete, ["DELETE"])
    app.add_route(f"{PATH}/{{id}}/cancel", responses.cancel, ["POST"])
    app.add_route(f"{PATH}/{{id}}/input_items", responses.input_items, ["GET"])


class Responses:
    """The endpoints. Responses are kept by this process, and gone with it."""

    def __init__(self, frontend: Frontend, receive: Receive) -> None:
        self._frontend = frontend
        self._receive = receive
        self.store = frontend.responses
        self.runs = Runs(frontend)

    async def create(self, request: Request) -> Response:
        """`POST /v1/responses`."""
        entered, body = await self._receive(request, self._frontend, "responses")
        held = contextlib.ExitStack()
        held.callback(entered.leave)
        uid, tenant, frontend = secrets.token_hex(12), tenant_of(request), self._frontend

        async def prepare() -> Prepared | Response:
            try:
                begun = time.time()
                asked, asks, earlier = await read(frontend, body, tenant)
            finally:
                body.clear()
                entered.body_read()
            return self._prepared(uid, tenant, begun, asked, asks, earlier, held)

        job = Job(uid, "responses", prepare, held.close)
        return CompletionResponse(job, frontend.metrics, frontend.requests, frontend.client_stall_s)

    async def retrieve(self, request: Request) -> Response:
        """`GET /v1/responses/{id}`, as it is now; or, with `stream`, the events of one in the background."""
        kept = self._kept(request)
        if request.query_params.get("stream") not in ("true", "True", "1"):
            return _json(kept.response)
        if kept.run is None:
            raise invalid("Only responses that were created with 'background' can be streamed again.", "stream")
        after = _number(request.query_params, "starting_after", -1, 0, 1 << 31)
        frontend = self._frontend
        return FollowResponse(kept.run.log, after, frontend.metrics, frontend.client_stall_s)

    async def cancel(self, request: Request) -> Response:
        """`POST /v1/responses/{id}/cancel`: one in the background; what has ended stays as it is."""
        kept = self._kept(request)
        if kept.run is None:
            text = "Only responses that were created with 'background' can be cancelled: end others by disconnecting."
            raise invalid(text, "id")
        await kept.run.cancel()
        return _json(self.store.get(kept.id, kept.tenant).response)

    async def delete(self, request: Request) -> Response:
        """`DELETE /v1/responses/{id}`: it is forgotten, and cancelled when it runs."""
        kept = self._kept(request)
        if kept.run is not None:
            await kept.run.cancel()
        self.store.delete(kept.id)
        return _json(_encode({"id": kept.id, "object": "response", "deleted": True}))

    async def input_items(self, request: Request) -> Response:
        """`GET /v1/responses/{id}/input_items`: page by page, the newest first unless told otherwise."""
        kept, query = self._kept(request), request.query_params
        limit = _number(query, "limit", PAGE, 1, MAX_PAGE)
        order = query.get("order", "desc")
        if order not in ("asc", "desc"):
            raise invalid("'order' must be asc or desc.", "order")
        return _json(await asyncio.to_thread(_page, kept.input, limit, order == "desc", query.get("after")))

    def _kept(self, request: Request) -> Kept:
        """The response that a path names. Raises BatonError(NOT_FOUND)."""
        return self.store.get(request.path_params["id"], tenant_of(request))

    def _prepared(
        self,
        uid: str,
        tenant: str,
        begun: float,
        asked: Asked,
        asks: list[Ask],
        earlier: tuple[bytes, ...],
        held: contextlib.ExitStack,
    ) -> Prepared | Response:
        frontend, told, options = self._frontend, read_told(asked.told), asked.options
        if told.background:
            self.runs.check()
        items = _members(identified(told.items, uid))
        run = Run() if told.background else None

        def keep(final: Final) -> None:
            output = _members(final.response["output"])
            last = _encode(final.response)
            self.store.put(Kept(PREFIX + uid, final.status, last, items, output, earlier, run, tenant))

        format = format_of(frontend, uid, begun, asked, told, keep if told.store and run is None else None)
        call = frontend.call(uid, asks, options, begun, promised=told.background)
        if run is None:
            return Prepared(call, format, options.stream, include_usage=True)
        now = _encode(format.object("in_progress"))
        self.store.put(Kept(format.id, "in_progress", now, items, b"", earlier, run, tenant))
        self.runs.start(run, call, format, keep, held.pop_all())
        if options.stream:
            return FollowResponse(run.log, -1, frontend.metrics, frontend.client_stall_s)
        return _json(_encode(format.object("queued")))


def _page(items: bytes, limit: int, newest_first: bool, after: str | None) -> bytes:
    """One page of items. Raises BatonError(INVALID_REQUEST): `after` is none of them."""
    found = with_ids(items)
    ids = [id for id, _ in found]
    order = list(range(len(ids)))
    if newest_first:
        order.reverse()
    if after is not None:
        if after not in ids:
            raise invalid(f"'after' is no item of this response: '{after[:80]}'.", "after")
        order = order[order.index(ids.index(after)) + 1 :]
    page = order[:limit]
    return _encode(
        {
            "object": "list",
            "data": [found[i][1] for i in page],
            "first_id": ids[page[0]] if page else None,
            "last_id": ids[page[-1]] if page else None,
            "has_more": len(order) > len(page),
        }
    )


def _members(items: list[dict[str, Any]]) -> bytes:
    """Items as the inside of a JSON list."""
    return _encode(items)[1:-1]


def _number(query: Mapping[str, str], name: str, default: int, low: int, high: int) -> int:
    given = query.get(name)
    if given is None:
        return default
    if not given.isascii() or not given.isdigit() or len(given) > 20 or not low <= int(given) <= high:
        raise invalid(f"'{name}' must be an integer of at least {low} and at most {high}.", name)
    return int(given)


def _json(body: bytes) -> Response:
    return Response(body, media_type="application/json")
