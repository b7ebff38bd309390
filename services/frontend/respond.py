"""From a checked request to bytes on the wire: the status held back until the first token, then SSE or one body.

The client is watched all the time: when it goes away, everything that was started for it is aborted.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import structlog
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from baton.errors import BatonError, Reason
from services.frontend.call import Call, IndexedPiece
from services.frontend.chunks import Format
from services.frontend.drain import Requests
from services.frontend.errors import error_response, internal
from services.frontend.metrics import FrontendMetrics

ABORT_EXTENSION = "baton.abort"
"""ASGI extension: its `abort` drops the connection without waiting for the client to read."""

LONG_TOKENS = 512
"""A whole answer of more tokens is written in a thread."""

SSE_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)

_log = structlog.get_logger()


@dataclass(frozen=True)
class Prepared:
    """A checked request with its prompts tokenised."""

    call: Call
    format: Format
    stream: bool
    include_usage: bool
    continuous_usage: bool = False


@dataclass(frozen=True)
class Job:
    """A request whose body is here. `prepare` reads it, and may answer it as well; `leave` is called when all is
    over."""

    uid: str
    endpoint: str
    prepare: Callable[[], Awaitable[Prepared | Response]]
    leave: Callable[[], None]
    refuse: Callable[[BatonError], Response] = error_response
    """How it is answered when it fails before its first byte."""


class CompletionResponse(Response):
    """Runs one job as an ASGI response."""

    def __init__(self, job: Job, metrics: FrontendMetrics, requests: Requests, client_stall_s: float) -> None:
        self._job = job
        self._metrics = metrics
        self._requests = requests
        self._stall_s = client_stall_s
        self._begun = time.monotonic()
        self._streaming: Format | None = None
        self._headers_sent = False
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve it to the end, or until the client has gone."""
        self._metrics.active.inc()
        work = asyncio.create_task(self._serve(scope, receive, send), name=f"request {self._job.uid}")
        gone = asyncio.create_task(disconnected(receive), name=f"watch {self._job.uid}")
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                self._metrics.disconnects.inc()
        finally:
            work.cancel()
            gone.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)
            self._job.leave()
            self._metrics.active.dec()
            self._metrics.duration.observe(time.monotonic() - self._begun)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        call: Call | None = None
        failure: BatonError | None = None
        outcome = "disconnected"
        try:
            async with self._requests.limited():
                with self._metrics.waiting.track_inprogress():
                    prepared = await self._job.prepare()
                    if not isinstance(prepared, Response):
                        call = prepared.call
                        await call.start()
                        first = await call.pieces()
                if isinstance(prepared, Response):
                    self._headers_sent = True
                    await prepared(scope, receive, lambda message: self._send(send, message))
                    outcome = "ok"
                    return
                self._metrics.ttft.observe(time.monotonic() - self._begun)
                if prepared.stream:
                    await self._stream(prepared, first, send)
                else:
                    await self._whole(prepared, first, send)
            outcome = "ok"
        except BatonError as error:
            failure, outcome = error, error.reason.name.lower()
        except asyncio.CancelledError:
            failure = BatonError(Reason.ABORTED, "the client went away")
            raise
        except Exception:
            _log.exception("request failed", uid=self._job.uid)
            failure, outcome = internal(), "internal"
        finally:
            # Workers are told first: whatever the client does next must not keep them busy.
            if call is not None:
                call.close(failure.reason if failure is not None else None)
                count_call(call, self._metrics)
            self._metrics.requests.labels(self._job.endpoint, outcome).inc()
        if failure is not None:
            await self._fail(failure, scope, receive, send)

    async def _stream(self, prepared: Prepared, pieces: list[IndexedPiece], send: Send) -> None:
        call, format = prepared.call, prepared.format
        self._streaming = format
        await self._start(call, send, list(SSE_HEADERS))
        ended = 0
        while True:
            events: list[bytes] = []
            if prepared.continuous_usage:
                format.so_far(call.usage())
            for index, piece, prompt_logprobs in pieces:
                # An echoed prompt's log probabilities are as many as it has tokens: not on the loop.
                write = asyncio.to_thread if prompt_logprobs else _at_once
                events += await write(format.chunks, index, piece, prompt_logprobs)
                if piece.finish:
                    ended += 1
                    last = ended == call.outputs and not prepared.include_usage
                    events.append(format.finish(index, piece.finish, call.story() if last else None))
            if call.finished:
                if prepared.include_usage:
                    events.append(format.usage(call.usage(), call.story()))
                events.append(format.done())
            if events:
                body = b"".join(events)
                await self._send(send, {"type": "http.response.body", "body": body, "more_body": not call.finished})
            if call.finished:
                return
            pieces = await call.pieces()

    async def _whole(self, prepared: Prepared, pieces: list[IndexedPiece], send: Send) -> None:
        call, format = prepared.call, prepared.format
        while True:
            for index, piece, prompt_logprobs in pieces:
                write = asyncio.to_thread if prompt_logprobs else _at_once
                await write(format.collect, index, piece, prompt_logprobs)
            if call.finished:
                break
            pieces = await call.pieces()
        usage = call.usage()
        write = asyncio.to_thread if usage.completion_tokens > LONG_TOKENS else _at_once
        body = await write(format.body, usage, call.story())
        length = str(len(body)).encode()
        await self._start(call, send, [(b"content-type", b"application/json"), (b"content-length", length)])
        await self._send(send, {"type": "http.response.body", "body": body})

    async def _start(self, call: Call, send: Send, headers: list[tuple[bytes, bytes]]) -> None:
        self._headers_sent = True
        headers.append((b"x-baton-route", call.route_header().encode("latin-1", "replace")))
        await self._send(send, {"type": "http.response.start", "status": 200, "headers": headers})

    async def _send(self, send: Send, message: Message) -> None:
        """Send, for as long as the client may take. Raises BatonError(SLOW_CLIENT)."""
        try:
            async with asyncio.timeout(self._stall_s):
                await send(message)
        except TimeoutError:
            raise BatonError(Reason.SLOW_CLIENT, "The client does not read what it asked for.") from None

    async def _fail(self, error: BatonError, scope: Scope, receive: Receive, send: Send) -> None:
        if error.reason is Reason.SLOW_CLIENT:
            self._cut_off(scope)
        elif not self._headers_sent:
            await self._job.refuse(error)(scope, receive, send)
        elif self._streaming is not None:
            # The stream has begun: one error event and no [DONE], so nobody takes it for complete.
            try:
                await self._send(send, {"type": "http.response.body", "body": self._streaming.failed(error)})
            except BatonError:
                self._cut_off(scope)

    def _cut_off(self, scope: Scope) -> None:
        self._metrics.slow_clients.inc()
        abort_connection(scope)


def count_call(call: Call, metrics: FrontendMetrics) -> None:
    """What a call that has ended adds to the counters."""
    usage, story = call.usage(), call.story()
    metrics.prompt_tokens.inc(usage.prompt_tokens)
    metrics.output_tokens.inc(usage.completion_tokens)
    if call.tenant and call.finished:  # as many as there are names in the file of keys
        kinds = {"prompt": usage.prompt_tokens, "cached": story["cached_tokens"], "output": usage.completion_tokens}
        for kind, tokens in kinds.items():
            metrics.tenant_tokens.labels(call.tenant, kind).inc(tokens)
    metrics.kv_bytes.inc(story["kv_bytes"])
    metrics.count_route(story["mode"], story["reasons"])


def abort_connection(scope: Scope) -> None:
    """Drop the connection at once, whatever has not been written or read."""
    extension = scope.get("extensions", {}).get(ABORT_EXTENSION)
    if extension is not None:
        extension["abort"]()


async def _at_once(work: Callable[..., Any], *args: Any) -> Any:
    """What `asyncio.to_thread` does, for work that is not worth a thread."""
    return work(*args)


async def disconnected(receive: Receive) -> None:
    """Wait until the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass
