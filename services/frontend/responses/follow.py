"""A run's events as an HTTP answer, for as long as the client listens: that it goes away ends nothing."""

from __future__ import annotations

import asyncio

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from baton.errors import BatonError
from services.frontend.errors import error_event
from services.frontend.metrics import FrontendMetrics
from services.frontend.respond import SSE_HEADERS, abort_connection, disconnected
from services.frontend.responses.run import Log


class FollowResponse(Response):
    """Events behind number `after`. A client that does not read for `stall_s` is cut off."""

    def __init__(self, log: Log, after: int, metrics: FrontendMetrics, stall_s: float) -> None:
        self._log = log
        self._after = after
        self._metrics = metrics
        self._stall_s = stall_s
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Tell it to the end, or until the client has gone."""
        work = asyncio.create_task(self._tell(scope, send), name="follow")
        gone = asyncio.create_task(disconnected(receive), name="watch follow")
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            work.cancel()
            gone.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)

    async def _tell(self, scope: Scope, send: Send) -> None:
        try:
            await self._send(send, {"type": "http.response.start", "status": 200, "headers": list(SSE_HEADERS)})
            try:
                async for events in self._log.follow(self._after):
                    await self._send(send, {"type": "http.response.body", "body": events, "more_body": True})
                rest = b""
            except BatonError as error:
                rest = error_event(error)
            await self._send(send, {"type": "http.response.body", "body": rest})
        except TimeoutError:
            self._metrics.slow_clients.inc()
            abort_connection(scope)

    async def _send(self, send: Send, message: dict[str, object]) -> None:
        async with asyncio.timeout(self._stall_s):
            await send(message)
