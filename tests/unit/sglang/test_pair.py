"""The paired upstream, over HTTP, between scripted servers: SGLang itself needs a GPU."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import orjson
import pytest
import uvicorn

from baton.cli.ports import free_port
from baton.engine.sglang.launch.pair import Pair
from baton.engine.sglang.launch.pairing import Bootstrap

HANG_S = 30.0
BODY = {"model": "m", "prompt": [1, 2, 3], "stream": True}
Answer = Callable[["Leg", Any], Awaitable[None]]


class Leg:
    """A server that does what the test says. `asked` are the bodies that came; `hung_up` is set when a client left."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.hung_up = asyncio.Event()
        self.healthy = True
        self.answer: Answer = says(b'data: {"n": 1}\n\n', b"data: [DONE]\n\n")

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["method"] == "GET":
            await head(send, 200 if self.healthy else 500)
            await send({"type": "http.response.body", "body": orjson.dumps({"path": scope["path"]})})
            return
        body = b""
        while (message := await receive()).get("more_body") or message.get("body"):
            body += message["body"]
            if not message.get("more_body"):
                break
        self.asked.append(orjson.loads(body))
        answering = asyncio.ensure_future(self.answer(self, send))
        leaving = asyncio.ensure_future(receive())
        await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not answering.done():
            self.hung_up.set()
        for task in (answering, leaving):
            task.cancel()
        await asyncio.gather(answering, leaving, return_exceptions=True)


async def head(send: Any, status: int, content_type: bytes = b"text/event-stream") -> None:
    await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", content_type)]})


def says(*pieces: bytes, status: int = 200) -> Answer:
    """Answer with these pieces."""

    async def answer(leg: Leg, send: Any) -> None:
        await head(send, status)
        for piece in pieces:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    return answer


def hangs(*pieces: bytes) -> Answer:
    """Say these pieces and then nothing; nothing at all without any."""

    async def answer(leg: Leg, send: Any) -> None:
        for n, piece in enumerate(pieces):
            if not n:
                await head(send, 200)
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await asyncio.Event().wait()

    return answer


@asynccontextmanager
async def serving(app: Any) -> AsyncIterator[str]:
    port = free_port()
    server = uvicorn.Server(uvicorn.Config(app, port=port, lifespan="off", log_level="error"))
    task = asyncio.create_task(server.serve())
    while not server.started:  # noqa: ASYNC110 - uvicorn tells in no other way
        await asyncio.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = server.force_exit = True
        await task


class Stage:
    """A pair, its two legs, and a client."""

    def __init__(self, prefill: Leg, decode: Leg, client: httpx.AsyncClient) -> None:
        self.prefill, self.decode, self.client = prefill, decode, client

    async def ask(self, body: Any = BODY, path: str = "/v1/completions") -> httpx.Response:
        content = body if isinstance(body, bytes) else orjson.dumps(body)
        return await self.client.post(path, content=content)

    async def counted(self) -> str:
        return (await self.client.get("/metrics")).text


@pytest.fixture
async def stage() -> AsyncIterator[Stage]:
    prefill, decode = Leg(), Leg()
    async with serving(prefill) as prefill_url, serving(decode) as decode_url:
        pair = Pair(prefill_url, decode_url, Bootstrap("10.0.0.5", 9001), random.Random(1))
        async with serving(pair) as url, httpx.AsyncClient(base_url=url, timeout=HANG_S, trust_env=False) as client:
            yield Stage(prefill, decode, client)
        await pair.close()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_both_get_the_request_and_decode_answers(stage: Stage, path: str) -> None:
    stage.prefill.answer = says(b'data: {"not": "this"}\n\n')
    for _ in range(2):
        reply = await stage.ask(path=path)
        assert (reply.status_code, reply.content) == (200, b'data: {"n": 1}\n\ndata: [DONE]\n\n')
        assert reply.headers["content-type"] == "text/event-stream"
    assert stage.prefill.asked == stage.decode.asked
    rooms = [body["bootstrap_room"] for body in stage.decode.asked]
    assert len(set(rooms)) == 2
    assert stage.decode.asked[0] | {"bootstrap_room": 0} == {
        **BODY,
        "bootstrap_host": "10.0.0.5",
        "bootstrap_port": 9001,
        "bootstrap_room": 0,
    }
    assert 'outcome="ok"} 2.0' in await stage.counted()


async def test_prefill_refuses(stage: Stage) -> None:
    """Its answer is the answer, and decode does not wait for KV that never comes."""
    stage.prefill.answer = says(b'{"error": {"message": "too long"}}', status=400)
    stage.decode.answer = hangs()
    reply = await stage.ask()
    assert (reply.status_code, reply.json()) == (400, {"error": {"message": "too long"}})
    await asyncio.wait_for(stage.decode.hung_up.wait(), HANG_S)
    assert 'outcome="failed"} 1.0' in await stage.counted()


async def test_decode_refuses(stage: Stage) -> None:
    stage.prefill.answer = hangs()
    stage.decode.answer = says(b'{"error": {"message": "busy"}}', status=503)
    reply = await stage.ask()
    assert (reply.status_code, reply.json()) == (503, {"error": {"message": "busy"}})
    await asyncio.wait_for(stage.prefill.hung_up.wait(), HANG_S)


async def test_prefill_breaks_after_decode_has_begun_to_wait(stage: Stage) -> None:
    async def breaks(leg: Leg, send: Any) -> None:
        await head(send, 200)
        await send({"type": "http.response.body", "body": b"data: 1", "more_body": True})
        raise ConnectionError("the server's end of it")

    async def waits(leg: Leg, send: Any) -> None:
        await head(send, 200)
        await asyncio.Event().wait()

    stage.prefill.answer, stage.decode.answer = breaks, waits
    reply = await stage.ask()
    assert reply.status_code == 502
    assert reply.json()["error"]["code"] == "upstream_unavailable"
    await asyncio.wait_for(stage.decode.hung_up.wait(), HANG_S)


async def test_prefill_is_not_there(stage: Stage) -> None:
    stage.decode.answer = hangs()
    async with serving(stage.decode) as decode_url:
        pair = Pair(f"http://127.0.0.1:{free_port()}", decode_url, Bootstrap("h", 1), random.Random(1))
        async with serving(pair) as url, httpx.AsyncClient(base_url=url, timeout=HANG_S, trust_env=False) as client:
            assert (await client.post("/v1/completions", content=orjson.dumps(BODY))).status_code == 502
            assert (await client.get("/v1/models")).status_code == 503
        await pair.close()


async def test_decode_breaks_in_mid_stream(stage: Stage) -> None:
    """An error event, for a stream cannot change its status; never an end that looks like one."""

    async def breaks(leg: Leg, send: Any) -> None:
        await head(send, 200)
        await send({"type": "http.response.body", "body": b'data: {"n": 1}\n\n', "more_body": True})
        await asyncio.sleep(0.05)
        raise ConnectionError("gone")

    stage.decode.answer = breaks
    reply = await stage.ask()
    first, error, rest = reply.content.split(b"\n\n")
    assert first == b'data: {"n": 1}'
    assert orjson.loads(error.removeprefix(b"data: "))["error"]["code"] == "upstream_unavailable"
    assert not rest


async def test_a_client_that_leaves_ends_both_legs(stage: Stage) -> None:
    stage.prefill.answer = hangs()
    stage.decode.answer = hangs(b'data: {"n": 1}\n\n')
    async with stage.client.stream("POST", "/v1/completions", content=orjson.dumps(BODY)) as reply:
        assert await anext(reply.aiter_raw()) == b'data: {"n": 1}\n\n'
    for leg in (stage.prefill, stage.decode):
        await asyncio.wait_for(leg.hung_up.wait(), HANG_S)


async def test_a_client_that_leaves_before_the_first_byte_ends_both_legs(stage: Stage) -> None:
    stage.prefill.answer = stage.decode.answer = hangs()
    with pytest.raises(httpx.ReadTimeout):
        await stage.client.post("/v1/completions", content=orjson.dumps(BODY), timeout=0.3)
    for leg in (stage.prefill, stage.decode):
        await asyncio.wait_for(leg.hung_up.wait(), HANG_S)
    assert 'outcome="client_gone"} 1.0' in await stage.counted()


async def test_the_probe_is_one_of_both(stage: Stage) -> None:
    for path in ("/health", "/v1/models"):
        assert (await stage.client.get(path)).json() == {"path": path}
    stage.prefill.healthy = False
    for path in ("/health", "/v1/models"):
        assert (await stage.client.get(path)).status_code == 503


@pytest.mark.parametrize(
    ("body", "said"), [(b"{", "unexpected"), (b"[]", "JSON object"), ({"bootstrap_room": 5}, "bootstrap_room is set")]
)
async def test_bad_bodies_reach_nobody(stage: Stage, body: Any, said: str) -> None:
    reply = await stage.ask(body)
    assert reply.status_code == 400
    assert said in reply.json()["error"]["message"]
    assert stage.prefill.asked == stage.decode.asked == []


async def test_what_is_not_here(stage: Stage) -> None:
    assert (await stage.client.get("/v1/completions")).status_code == 404
    assert (await stage.client.post("/generate", content=b"{}")).status_code == 404
