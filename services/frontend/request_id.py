"""`x-request-id`: on every answer, whoever gives it."""

from __future__ import annotations

import secrets
import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.frontend.anthropic import owns

MAX_LENGTH = 128
SCOPE_KEY = "baton.request_id"
"""The member of an ASGI scope that has the request's id, also for who answers outside of all middleware."""


def new_request_id() -> str:
    """One of ours."""
    return f"req_{time.time_ns():x}{secrets.token_hex(4)}"


def names(path: str) -> tuple[str, ...]:
    """The headers that tell it. Anthropic's API has a name of its own for it."""
    return ("x-request-id", "request-id") if owns(path) else ("x-request-id",)


class RequestIds:
    """`x-request-id` on every answer: the caller's own, when it is a plain short text, else a new one."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on, with the header added at the start of the response."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = dict(scope["headers"]).get(b"x-request-id", b"")
        fits = 0 < len(given) <= MAX_LENGTH and all(0x21 <= byte < 0x7F for byte in given)
        request_id = scope[SCOPE_KEY] = given.decode() if fits else new_request_id()
        told = [(name.encode(), request_id.encode()) for name in names(scope["path"])]

        async def tagged(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *told]
            await send(message)

        await self._app(scope, receive, tagged)
