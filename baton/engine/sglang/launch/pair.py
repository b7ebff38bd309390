"""The paired upstream: one OpenAI-compatible server in front of an SGLang prefill and an SGLang decode server.

A request goes to both (`pairing.py`); what decode answers is passed on byte for byte, what prefill answers is read and
thrown away. If one leg fails before the first byte, the other one is hung up on, which is how SGLang aborts, and the
failure is the answer: decode would wait for its prefill for minutes. A client that leaves ends both legs.
`/v1/models` and `/health` answer what decode answers, and only while prefill answers too: a probe is one of the pair.
"""

from __future__ import annotations

import argparse
import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from contextlib import asynccontextmanager
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httpx
import orjson
import uvicorn
from prometheus_client import CollectorRegistry, Counter, generate_latest

from baton.engine.sglang.launch.pairing import Bootstrap, new_room, paired

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
T = TypeVar("T")

CONNECT_S = 3.0
SILENT_S = 600.0
"""How long a leg may say nothing: a long prompt behind a long queue. Who asks us is less patient than that."""
PROBE_S = 5.0
MAX_BODY_BYTES = 64 << 20
MAX_ERROR_BYTES = 1 << 20
RELAYED = ("/v1/completions", "/v1/chat/completions")


class LegError(Exception):
    """A leg did not do its part: the status and the body to answer."""

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(f"{status}: {body[:200]!r}")
        self.status = status
        self.body = body


class Pair:
    """An ASGI application. `prefill` and `decode` are base URLs."""

    def __init__(self, prefill: str, decode: str, bootstrap: Bootstrap, source: random.Random) -> None:
        self._prefill = prefill.rstrip("/")
        self._decode = decode.rstrip("/")
        self._bootstrap = bootstrap
        self._source = source
        self._http = httpx.AsyncClient(
            timeout=httpx.Timeout(SILENT_S, connect=CONNECT_S),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
            headers={"accept-encoding": "identity"},
            trust_env=False,
        )
        self._collectors = CollectorRegistry()
        self._requests = Counter(
            "baton_sglang_pair_requests", "Requests by how they ended.", ["outcome"], registry=self._collectors
        )

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer one HTTP request."""
        if scope["type"] != "http":
            return
        path, method = scope["path"], scope["method"]
        try:
            if method == "POST" and path in RELAYED:
                await self._until_gone(self._relay(path, await _body(receive), send), receive)
            elif method == "GET" and path in ("/health", "/v1/models"):
                await _answer(send, 200, await self._probe(path))
            elif method == "GET" and path == "/metrics":
                await _answer(send, 200, generate_latest(self._collectors), "text/plain; version=0.0.4")
            else:
                raise LegError(404, _error(f"{method} {path} is not here", "not_found"))
        except LegError as error:
            await _answer(send, error.status, error.body)

    async def close(self) -> None:
        """Close every connection. Idempotent."""
        await self._http.aclose()

    async def _relay(self, path: str, body: bytes, send: Send) -> None:
        """Ask both, pass on what decode says. Raises LegError while nothing was passed on."""
        content = self._pair_up(body)
        prefill = asyncio.create_task(self._ask_prefill(path, content), name="prefill leg")
        began = False
        outcome = "client_gone"
        try:
            async with self._asked(self._decode, path, content, prefill) as reply:
                async for piece in _pieces(reply, prefill):
                    if not began:
                        began = True
                        await send(_head(200, reply.headers.get("content-type", "application/json")))
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
            outcome = "ok"
            if not began:
                await send(_head(200, "application/json"))
            await send({"type": "http.response.body", "body": b""})
        except LegError as error:
            outcome = "failed"
            if not began:
                raise
            await send({"type": "http.response.body", "body": b"data: " + error.body + b"\n\n"})
        finally:
            self._requests.labels(outcome).inc()
            prefill.cancel()
            await asyncio.gather(prefill, return_exceptions=True)

    def _pair_up(self, body: bytes) -> bytes:
        try:
            said = orjson.loads(body)
            if not isinstance(said, dict):
                raise ValueError("the body must be a JSON object")
            return orjson.dumps(paired(said, self._bootstrap, new_room(self._source)))
        except ValueError as error:
            self._requests.labels("refused").inc()
            raise LegError(400, _error(str(error), "invalid_value", "invalid_request_error")) from None

    async def _ask_prefill(self, path: str, content: bytes) -> None:
        """The prefill leg, to its end. Raises LegError."""
        async with self._asked(self._prefill, path, content, None) as reply:
            async for _ in _pieces(reply, None):
                pass

    @asynccontextmanager
    async def _asked(
        self, base: str, path: str, content: bytes, other: asyncio.Task[None] | None
    ) -> AsyncIterator[httpx.Response]:
        """The answer of one server, its body still to come; hung up on at the end. Raises LegError."""
        headers = {"content-type": "application/json"}
        request = self._http.build_request("POST", base + path, content=content, headers=headers)
        try:
            reply = await _unless_failed(self._http.send(request, stream=True), other)
        except httpx.HTTPError as error:
            raise LegError(502, _error(f"{base}: {error!r}", "upstream_unavailable")) from error
        try:
            if reply.status_code != 200:
                raise LegError(reply.status_code, await _error_body(reply))
            yield reply
        finally:
            await reply.aclose()

    async def _probe(self, path: str) -> bytes:
        """Decode's answer, when prefill answers too. Raises LegError 503 otherwise."""
        answer = b""
        for base in (self._prefill, self._decode):
            try:
                async with asyncio.timeout(PROBE_S):
                    reply = await self._http.get(base + path)
            except (httpx.HTTPError, TimeoutError) as error:
                raise LegError(503, _error(f"{base}{path}: {error!r}", "upstream_unavailable")) from error
            if reply.status_code != 200:
                raise LegError(503, _error(f"{base}{path} answers {reply.status_code}", "upstream_unavailable"))
            answer = reply.content
        return answer

    async def _until_gone(self, work: Awaitable[None], receive: Receive) -> None:
        """`work` to its end, or until the client has left. Raises what it raises."""
        working = asyncio.ensure_future(work)
        leaving = asyncio.ensure_future(_left(receive))
        try:
            await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (working, leaving):
                task.cancel()
            results = await asyncio.gather(working, leaving, return_exceptions=True)
        if isinstance(results[0], Exception):
            raise results[0]


async def _unless_failed(awaitable: Awaitable[T], other: asyncio.Task[None] | None) -> T:
    """What it brings, unless the other leg fails before that: then that leg's LegError."""
    task = asyncio.ensure_future(awaitable)
    try:
        while not task.done():
            running = {other} if other is not None and not other.done() else set()
            await asyncio.wait({task, *running}, return_when=asyncio.FIRST_COMPLETED)
            if other is not None and other.done() and not other.cancelled() and (error := other.exception()):
                await _hang_up(task)
                raise error
        return task.result()
    finally:
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def _hang_up(task: asyncio.Future[T]) -> None:
    """A reply that came in the moment in which the other leg failed has nobody else to close it."""
    if task.done() and not task.cancelled() and task.exception() is None:
        reply = task.result()
        if isinstance(reply, httpx.Response):
            await reply.aclose()


async def _pieces(reply: httpx.Response, other: asyncio.Task[None] | None) -> AsyncIterator[bytes]:
    """The body, piece by piece. Until the first one the other leg's failure ends it. Raises LegError."""
    pieces = reply.aiter_raw()
    try:
        first = await _unless_failed(anext(pieces, b""), other)
        if first:
            yield first
        async for piece in pieces:
            yield piece
    except httpx.HTTPError as error:
        raise LegError(502, _error(f"{reply.url.host}: {error!r}", "upstream_unavailable")) from error


async def _error_body(reply: httpx.Response) -> bytes:
    body = b""
    try:
        async with asyncio.timeout(PROBE_S):
            async for piece in reply.aiter_raw():
                body += piece
                if len(body) > MAX_ERROR_BYTES:
                    break
    except (httpx.HTTPError, TimeoutError):
        pass
    return body[:MAX_ERROR_BYTES] or _error(f"{reply.url.host} answers {reply.status_code}", "upstream_failed")


async def _body(receive: Receive) -> bytes:
    """The request's body. Raises LegError for one that is too large."""
    body = bytearray()
    while True:
        message = await receive()
        body += message.get("body", b"")
        if len(body) > MAX_BODY_BYTES:
            raise LegError(413, _error(f"a body has at most {MAX_BODY_BYTES} bytes", "request_too_large"))
        if not message.get("more_body"):
            return bytes(body)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _answer(send: Send, status: int, body: bytes, content_type: str = "application/json") -> None:
    await send(_head(status, content_type))
    await send({"type": "http.response.body", "body": body})


def _head(status: int, content_type: str) -> Message:
    headers = [(b"content-type", content_type.encode())]
    return {"type": "http.response.start", "status": status, "headers": headers}


def _error(message: str, code: str, kind: str = "server_error") -> bytes:
    return orjson.dumps({"error": {"message": message, "type": kind, "param": None, "code": code}})


def main() -> None:
    """Serve until told to stop."""
    parser = argparse.ArgumentParser(prog="python -m baton.engine.sglang.launch.pair", description=__doc__)
    parser.add_argument("--prefill", required=True, help="URL of the prefill server")
    parser.add_argument("--decode", required=True, help="URL of the decode server")
    parser.add_argument("--bootstrap-port", type=int, default=8998, help="the prefill server's bootstrap port")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    flags = parser.parse_args()
    bootstrap = Bootstrap(urlsplit(flags.prefill).hostname or "127.0.0.1", flags.bootstrap_port)
    pair = Pair(flags.prefill, flags.decode, bootstrap, random.SystemRandom())
    uvicorn.run(pair, host=flags.host, port=flags.port, lifespan="off", log_level="warning")


if __name__ == "__main__":
    main()
