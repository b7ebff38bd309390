"""uvicorn's HTTP parser with what it lacks: bounds on a request's head, and errors in the shape of all others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from baton.errors import BatonError, Reason
from services.frontend.errors import error_body
from services.frontend.request_id import new_request_id
from services.frontend.respond import ABORT_EXTENSION

MAX_HEAD_BYTES = 64 << 10
"""Of one request's line and headers. The parser copies what it has of a header with each piece that arrives: one header
of 90 MB took 10 s of this loop (measured)."""


class HttpProtocol(HttpToolsProtocol):
    """One connection. A head that is too large is answered with 431, one that does not come is cut off: `head_s` after
    the connection was made, or after its first byte when it is not the first. `slow` is called then.

    Offers `baton.abort`: closing waits until everything is written, which a client that does not read prevents.
    """

    def __init__(self, *wiring: Any, head_s: float, slow: Callable[[], None], **more: Any) -> None:
        super().__init__(*wiring, **more)
        self._head_s = head_s
        self._slow = slow
        self._in_head = True
        self._head_bytes = 0
        self._waiting: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._have_head()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        while self._in_head and data and not self.transport.is_closing():
            part, data = data[: MAX_HEAD_BYTES - self._head_bytes], data[MAX_HEAD_BYTES - self._head_bytes :]
            self._head_bytes += len(part)
            super().data_received(part)
            if self._in_head and self._head_bytes >= MAX_HEAD_BYTES:
                self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, f"The head exceeds {MAX_HEAD_BYTES} bytes.")
                return
        if data and not self.transport.is_closing():
            super().data_received(data)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["extensions"] = {ABORT_EXTENSION: {"abort": self.transport.abort}}
        if not self._in_head:
            self._in_head, self._head_bytes = True, 0
            self._wait_for_head()

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._have_head()
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse(HTTPStatus.BAD_REQUEST, msg)

    def _wait_for_head(self) -> None:
        self._have_head()
        self._waiting = asyncio.get_running_loop().call_later(self._head_s, self._cut_off)

    def _have_head(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None

    def _cut_off(self) -> None:
        self._slow()
        self.transport.abort()

    def _refuse(self, status: HTTPStatus, message: str) -> None:
        content = error_body(BatonError(Reason.INVALID_REQUEST, message))
        head = f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-type: application/json\r\n"
        head += f"x-request-id: {new_request_id()}\r\n"
        head += f"content-length: {len(content)}\r\nconnection: close\r\n\r\n"
        self.transport.write(head.encode() + content)
        self.transport.close()
