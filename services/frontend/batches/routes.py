"""`/v1/files` and `/v1/batches`."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, Protocol, TypeVar

import msgspec
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from baton.errors import BatonError, Reason
from services.frontend.api_keys import tenant_of
from services.frontend.batches.answer import ENDPOINTS
from services.frontend.batches.batches import Batches
from services.frontend.batches.expiry import read_form_expiry, read_output_expiry
from services.frontend.batches.files import UPLOAD, File, check_id
from services.frontend.batches.form import boundary_of, read_form
from services.frontend.errors import invalid
from services.frontend.frontend import Frontend
from services.frontend.gate import Pass
from services.frontend.respond import abort_connection
from services.frontend.schema import parse_json

MAX_BODY_BYTES = 64 << 10
MAX_PAIRS, MAX_KEY, MAX_VALUE = 16, 64, 512
"""Of metadata."""
PIECE = 256 << 10
UPLOAD_S = 3600.0
"""The longest that an upload may take."""

_encode = msgspec.json.Encoder().encode
Handler = Callable[[Request], Awaitable[Response]]
TakeBody = Callable[[Request, Frontend, str], Awaitable[tuple[Pass, bytearray]]]


class _Shown(Protocol):
    @property
    def id(self) -> str: ...

    def shown(self) -> dict[str, Any]: ...


T = TypeVar("T", bound=_Shown)


def add_routes(app: FastAPI, frontend: Frontend, take_body: TakeBody) -> None:
    """Add them; each says so when this frontend keeps no files."""

    def batches() -> Batches:
        if frontend.batches is None:
            raise BatonError(Reason.NOT_FOUND, "This server keeps no files and runs no batches (--batch-dir).")
        return frontend.batches

    def named(request: Request) -> File:
        return batches().files.get(check_id(request.path_params["id"], "file-"), tenant_of(request))

    async def upload(request: Request) -> Response:
        return _json((await _upload(request, batches(), frontend)).shown())

    async def files(request: Request) -> Response:
        query = request.query_params
        order = query.get("order") or "desc"
        if order not in ("asc", "desc"):
            raise invalid("'order' must be asc or desc.", "order")
        theirs = batches().files.all(tenant_of(request))
        found = [file for file in theirs if query.get("purpose") in (None, "", file.purpose)]
        return _page(request, found if order == "desc" else found[::-1], 10_000, 10_000)

    async def file(request: Request) -> Response:
        return _json(named(request).shown())

    async def delete(request: Request) -> Response:
        id = check_id(request.path_params["id"], "file-")
        await batches().files.delete(id, tenant_of(request))
        batches().count()
        return _json({"id": id, "object": "file", "deleted": True})

    async def content(request: Request) -> Response:
        return FileContent(named(request), batches(), frontend)

    async def create(request: Request) -> Response:
        there = batches()
        entered, body = await take_body(request, frontend, "batches")
        try:
            asked = read_create(body)
        finally:
            entered.leave()
        return _json((await there.create(*asked, tenant=tenant_of(request))).shown())

    async def every(request: Request) -> Response:
        return _page(request, batches().all(tenant_of(request)), 20, 100)

    async def batch(request: Request) -> Response:
        id = check_id(request.path_params["id"], "batch_")
        return _json(batches().get(id, tenant_of(request)).shown())

    async def cancel(request: Request) -> Response:
        id = check_id(request.path_params["id"], "batch_")
        return _json((await batches().cancel(id, tenant_of(request))).shown())

    app.add_route("/v1/files", _by_method(GET=files, POST=upload), ["GET", "POST"])
    app.add_route("/v1/files/{id}", _by_method(GET=file, DELETE=delete), ["GET", "DELETE"])
    app.add_route("/v1/files/{id}/content", content, ["GET"])
    app.add_route("/v1/batches", _by_method(GET=every, POST=create), ["GET", "POST"])
    app.add_route("/v1/batches/{id}", batch, ["GET"])
    app.add_route("/v1/batches/{id}/cancel", cancel, ["POST"])


def _by_method(**handlers: Handler) -> Handler:
    """One route for a path: `Allow` then names all of its methods."""

    async def handle(request: Request) -> Response:
        return await handlers["GET" if request.method == "HEAD" else request.method](request)

    return handle


def read_create(body: bytes | bytearray) -> tuple[str, str, dict[str, str] | None, int]:
    """(input_file_id, endpoint, metadata, seconds that its results stay) of a request for a batch.

    Raises BatonError with the field at fault.
    """
    if len(body) > MAX_BODY_BYTES:
        raise BatonError(Reason.REQUEST_TOO_LARGE, f"The body is larger than {MAX_BODY_BYTES} bytes.")
    raw = parse_json(body)
    file_id = raw.get("input_file_id")
    if not isinstance(file_id, str) or not file_id:
        raise invalid("You must provide 'input_file_id'.", "input_file_id")
    endpoint = raw.get("endpoint")
    if not isinstance(endpoint, str) or endpoint not in ENDPOINTS:
        raise invalid(f"'endpoint' must be one of {', '.join(ENDPOINTS)}.", "endpoint")
    if raw.get("completion_window") != "24h":
        raise invalid("'completion_window' must be 24h.", "completion_window")
    metadata = raw.get("metadata")
    if metadata is not None:
        _check_metadata(metadata)
    return file_id, endpoint, metadata, read_output_expiry(raw.get("output_expires_after"))


def _check_metadata(metadata: Any) -> None:
    if not isinstance(metadata, dict) or len(metadata) > MAX_PAIRS:
        raise invalid(f"'metadata' must be an object of at most {MAX_PAIRS} pairs.", "metadata")
    for key, value in metadata.items():
        if len(key) > MAX_KEY or not isinstance(value, str) or len(value) > MAX_VALUE:
            text = f"'metadata' takes names of {MAX_KEY} characters and texts of {MAX_VALUE}."
            raise invalid(text, "metadata")


async def _upload(request: Request, batches: Batches, frontend: Frontend) -> File:
    boundary = boundary_of(request.headers)
    upload = batches.files.upload(tenant_of(request))
    try:
        form = await read_form(boundary, _parts(request, frontend), upload)
        purpose = form.fields.get("purpose", "")
        if purpose != UPLOAD:
            raise invalid("'purpose' must be batch: files are kept for batches only.", "purpose")
        seconds = read_form_expiry(form.fields)
        assert form.filename is not None
        return await upload.keep(form.filename, purpose, seconds)
    finally:
        upload.close()
        batches.count()


async def _parts(request: Request, frontend: Frontend) -> AsyncIterator[bytes]:
    """The body as it comes; a client that stops sending it is cut off."""
    parts = aiter(request.stream())
    deadline = time.monotonic() + UPLOAD_S
    try:
        while True:
            async with asyncio.timeout(min(frontend.client_stall_s, deadline - time.monotonic())):
                part = await anext(parts, None)
            if part is None:
                return
            yield part
    except TimeoutError:
        frontend.metrics.slow_clients.inc()
        abort_connection(request.scope)
        raise BatonError(Reason.SLOW_CLIENT, "The client does not send the file that it began.") from None


class FileContent(Response):
    """A file's bytes, read as the client takes them."""

    def __init__(self, file: File, batches: Batches, frontend: Frontend) -> None:
        self._file = file
        self._path = batches.files.path(file.id)
        self._frontend = frontend
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it all, or drop the connection in its middle."""
        try:
            fd = await asyncio.to_thread(os.open, self._path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            raise BatonError(Reason.NOT_FOUND, f"No such File object: {self._file.id}", param="id") from None
        try:
            size = str(self._file.bytes).encode()
            headers = [(b"content-type", b"application/octet-stream"), (b"content-length", size)]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            sent = 0
            while sent < self._file.bytes:
                piece = await asyncio.to_thread(os.pread, fd, PIECE, sent)
                if not piece:
                    abort_connection(scope)  # cut short on the disk: not to be taken for the whole
                    return
                sent += len(piece)
                async with asyncio.timeout(self._frontend.client_stall_s):
                    more = sent < self._file.bytes
                    await send({"type": "http.response.body", "body": piece, "more_body": more})
            if not self._file.bytes:
                await send({"type": "http.response.body", "body": b""})
        except TimeoutError:
            self._frontend.metrics.slow_clients.inc()
            abort_connection(scope)
        finally:
            os.close(fd)


def _page(request: Request, items: Sequence[T], default: int, most: int) -> Response:
    """A page of a list: `limit` of them, those behind the one that `after` names."""
    query = request.query_params
    text = query.get("limit") or str(default)
    limit = int(text) if text.isdecimal() and len(text) < 9 else 0
    if not 1 <= limit <= most:
        raise invalid(f"'limit' must be a whole number from 1 to {most}.", "limit")
    start = 0
    if after := query.get("after"):
        start = next((n for n, item in enumerate(items, 1) if item.id == after), 0)
        if not start:
            raise invalid(f"'after' names nothing that is here: {after[:80]}", "after")
    page = items[start : start + limit]
    return _json(
        {
            "object": "list",
            "data": [item.shown() for item in page],
            "first_id": page[0].id if page else None,
            "last_id": page[-1].id if page else None,
            "has_more": len(items) > start + limit,
        }
    )


def _json(value: Any) -> Response:
    return Response(_encode(value), media_type="application/json")
