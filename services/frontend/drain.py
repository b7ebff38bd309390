"""How a frontend leaves without cutting a connection.

1. `/ready` says 503 and every response that begins says `Connection: close`, while connections are still accepted:
   balancers need `linger_s` to see it, and clients that keep connections to come back on a new one.
2. The listening socket closes; who is here is answered.
3. `drain_s` after the signal, what still runs is ended: a stream by one error event without `[DONE]`, the rest by 503.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from baton.errors import BatonError, Reason

TELL_S = 1.0
"""How long the clients of what was ended may take to read it."""


class Requests:
    """The HTTP requests under way."""

    def __init__(self) -> None:
        self.draining = False
        """Whether this frontend leaves."""
        self._over = False
        self._open = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._limits: set[asyncio.Timeout] = set()

    def __len__(self) -> int:
        return self._open

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """Around a request, from its head to the last byte of its response."""
        self._open += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._open -= 1
            if not self._open:
                self._idle.set()

    @contextlib.asynccontextmanager
    async def limited(self) -> AsyncIterator[None]:
        """Around what `end` may interrupt. Raises BatonError(DRAINING) then."""
        try:
            async with asyncio.timeout(0 if self._over else None) as limit:
                self._limits.add(limit)
                try:
                    yield
                finally:
                    self._limits.discard(limit)
        except TimeoutError:
            if not limit.expired():
                raise
            raise BatonError(Reason.DRAINING, "This server is being stopped; ask again and another answers.") from None

    async def finished(self, within_s: float) -> bool:
        """Wait until no request is under way; False when that takes longer."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, within_s)):
                await self._idle.wait()
        return not self._open

    def end(self) -> None:
        """Interrupt everything that is limited, now and from now on."""
        self._over = True
        for limit in self._limits:
            limit.reschedule(0)


class CountRequests:
    """ASGI middleware: counts requests, and lets connections end with their response once this frontend leaves."""

    def __init__(self, app: ASGIApp, requests: Requests) -> None:
        self._app = app
        self._requests = requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on."""

        async def closing(message: Message) -> None:
            if self._requests.draining and message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (b"connection", b"close")]
            await send(message)

        with self._requests.counted():
            await self._app(scope, receive, closing)
