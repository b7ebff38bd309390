"""The way to one OpenAI-compatible server over HTTP: its models, and completions as they stream.

Every failure comes out as a BatonError. Leaving a completion early closes its connection, which is how such servers
are told to stop.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import orjson

from baton.engine.openai.failures import from_event, from_status
from baton.engine.openai.sse import EventParser, TooLargeError
from baton.errors import BatonError, Reason

CONNECT_S = 3.0
WRITE_S = 10.0
MODELS_S = 5.0
MAX_ANSWER_BYTES = 1 << 20
"""Of an answer that is not streamed: a list of models, an error."""
KEPT_CONNECTIONS = 64
UPSTREAM = "the upstream"
_DONE = b"[DONE]"


class Upstream:
    """`url` with or without `/v1`; `model` is what the server calls it."""

    def __init__(self, url: str, model: str, *, api_key: str = "") -> None:
        self.url = base_url(url)
        self.model = model
        headers = {"accept-encoding": "identity"} | ({"authorization": f"Bearer {api_key}"} if api_key else {})
        self._http = httpx.AsyncClient(
            headers=headers,
            timeout=httpx.Timeout(None, connect=CONNECT_S, write=WRITE_S),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=KEPT_CONNECTIONS),
            verify=ssl.create_default_context(),
            trust_env=False,
        )

    async def describe(self, within_s: float = MODELS_S) -> dict[str, Any]:
        """What `/v1/models` says of our model: also the probe that it is there and takes our key.

        Raises BatonError: DECODE_UNAVAILABLE (not reached, not in time), UNAUTHORIZED, MODEL_NOT_FOUND, ENGINE_FAILED.
        """
        try:
            async with asyncio.timeout(within_s), self._http.stream("GET", f"{self.url}/models") as reply:
                body = await _whole(reply)
        except TimeoutError:
            raise BatonError(Reason.DECODE_UNAVAILABLE, f"{self.url} did not answer in {within_s:g} s") from None
        except httpx.HTTPError as error:
            raise _unreached(self.url, error) from error
        if reply.status_code in (401, 403):
            raise BatonError(Reason.UNAUTHORIZED, f"{self.url} refuses our key ({reply.status_code})")
        if reply.status_code != 200:
            raise from_status(reply.status_code, body)
        found = _models(body)
        for model in found:
            if model.get("id") == self.model:
                return model
        names = ", ".join(str(model.get("id")) for model in found[:8]) or "none"
        raise BatonError(Reason.MODEL_NOT_FOUND, f"{self.url} has no model {self.model!r}, but {names}")

    @asynccontextmanager
    async def completion(self, body: dict[str, Any], first_s: float, stall_s: float) -> AsyncIterator[Chunks]:
        """One streamed completion. `first_s` is how long its first chunk may take, `stall_s` each further one.

        Raises BatonError as failures.py says; chunks raise it as well. Clients read these messages: they do not say
        where the server is.
        """
        request = self._http.build_request("POST", f"{self.url}/completions", content=orjson.dumps(body))
        request.headers["content-type"] = "application/json"
        try:
            async with asyncio.timeout(first_s):
                reply = await self._http.send(request, stream=True)
        except TimeoutError:
            raise BatonError(Reason.DECODE_UNAVAILABLE, f"{UPSTREAM} did not answer in {first_s:g} s") from None
        except httpx.HTTPError as error:
            raise _unreached(UPSTREAM, error) from error
        try:
            if reply.status_code != 200:
                raise from_status(reply.status_code, await self._error_body(reply))
            yield Chunks(reply, first_s, stall_s)
        finally:
            await reply.aclose()

    async def close(self) -> None:
        """Close every connection. Idempotent."""
        await self._http.aclose()

    async def _error_body(self, reply: httpx.Response) -> bytes:
        try:
            async with asyncio.timeout(MODELS_S):
                return await _whole(reply)
        except (TimeoutError, httpx.HTTPError):
            return b""


class Chunks:
    """The chunks of one stream, in order. `complete` is whether it ended as it should: with `[DONE]`."""

    def __init__(self, reply: httpx.Response, first_s: float, stall_s: float) -> None:
        self.complete = False
        self._pieces = reply.aiter_raw()
        self._parser = EventParser()
        self._ready: list[bytes] = []
        self._patience_s = first_s
        self._stall_s = stall_s

    async def next(self, within_s: float | None = None) -> dict[str, Any] | None:
        """The next chunk; None at the end of the stream. `within_s` in place of the stream's own patience.

        Raises BatonError: ENGINE_FAILED for silence, a broken connection or what is no chunk; what an error in the
        stream says.
        """
        patience_s = self._patience_s if within_s is None else within_s
        try:
            async with asyncio.timeout(patience_s):
                while not self._ready:
                    piece = await anext(self._pieces, None)
                    if piece is None:
                        return None
                    self._ready = list(self._parser.feed(piece))[::-1]
        except TimeoutError:
            raise self._failed(f"was silent for {patience_s:g} s") from None
        except httpx.HTTPError as error:
            raise self._failed(f"broke off: {type(error).__name__} {error}".rstrip()) from error
        except TooLargeError as error:
            raise self._failed(f"sent {error}") from error
        self._patience_s = self._stall_s
        data = self._ready.pop()
        if data == _DONE:
            self.complete = True
            return None
        return self._chunk(data)

    def _chunk(self, data: bytes) -> dict[str, Any]:
        try:
            chunk = orjson.loads(data)
        except orjson.JSONDecodeError as error:
            raise self._failed(f"sent what is no JSON: {data[:80]!r}") from error
        if not isinstance(chunk, dict):
            raise self._failed(f"sent what is no chunk: {data[:80]!r}")
        if chunk.get("error"):
            raise from_event(chunk["error"])
        return chunk

    def _failed(self, what: str) -> BatonError:
        return BatonError(Reason.ENGINE_FAILED, f"{UPSTREAM} {what}")


def _unreached(who: str, error: httpx.HTTPError) -> BatonError:
    return BatonError(Reason.DECODE_UNAVAILABLE, f"{who}: {type(error).__name__}: {error}".rstrip(": "))


def base_url(url: str) -> str:
    """The API's root: `/v1` is added to a bare host. Raises BatonError(INVALID_REQUEST) for what is no HTTP URL."""
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise BatonError(Reason.INVALID_REQUEST, f"--upstream: {url} is no URL: {error}", param="upstream") from None
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise BatonError(Reason.INVALID_REQUEST, f"--upstream: {url} is no http(s) URL", param="upstream")
    if parsed.userinfo:
        raise BatonError(
            Reason.INVALID_REQUEST, "--upstream: no user or password in it, but in --api-key-file", param="upstream"
        )
    return f"{url.rstrip('/')}/v1" if parsed.path in ("", "/") else url.rstrip("/")


async def _whole(reply: httpx.Response) -> bytes:
    body = bytearray()
    async for piece in reply.aiter_raw():
        body += piece
        if len(body) > MAX_ANSWER_BYTES:
            break
    return bytes(body[:MAX_ANSWER_BYTES])


def _models(body: bytes) -> list[dict[str, Any]]:
    try:
        answer = orjson.loads(body)
        found = answer["data"] if isinstance(answer, dict) else answer
        return [model for model in found if isinstance(model, dict)]
    except (orjson.JSONDecodeError, KeyError, TypeError) as error:
        said = body[:80].decode(errors="replace")
        raise BatonError(Reason.ENGINE_FAILED, f"/v1/models answers no list of models, but {said!r}") from error
