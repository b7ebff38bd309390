"""A frontend that leaves: it is told before it refuses, what runs may end, and what does not ends with an error."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest

from baton.errors import BatonError, Reason
from baton.model.card import Model
from services.frontend import server as server_module
from services.frontend.drain import Requests
from tests.unit.frontend.peers import HANG_S, Attempt, ScriptedWorker, Stack, running, until
from tests.unit.frontend.test_failures import ids_of

HI = [{"role": "user", "content": "hi"}]


async def stalls(attempt: Attempt) -> None:
    """Three tokens, then nothing."""
    if attempt.message.sampling.seed:
        await attempt.tokens([1000, 1001, 1002], offset=0)


def leaving(stack: Stack, linger_s: float, drain_s: float) -> asyncio.Task[None]:
    assert stack._server is not None
    stack.readiness.draining = True
    return asyncio.create_task(stack._server.leave(stack.frontend.requests, linger_s, drain_s))


async def ask(http: httpx.AsyncClient, stack: Stack, **more: object) -> httpx.Response:
    body = {"model": stack.model.name, "messages": HI, **more}
    return await http.post(f"{stack.url}/v1/chat/completions", json=body)


async def test_while_it_lingers_everything_is_answered_and_every_connection_closed(model: Model) -> None:
    async def plays(attempt: Attempt) -> None:
        await attempt.play(ids_of(model))

    async with running(model, ScriptedWorker("a", plays)) as stack, httpx.AsyncClient(timeout=HANG_S) as http:
        before = await ask(http, stack)
        assert "connection" not in before.headers
        task = leaving(stack, linger_s=HANG_S, drain_s=2 * HANG_S)
        await asyncio.sleep(0)
        ready = await http.get(f"{stack.url}/ready")
        assert (ready.status_code, ready.json()["missing"][0]["part"]) == (503, "draining")
        for reply in (
            await ask(http, stack),
            await ask(http, stack, stream=True),
            await http.get(f"{stack.url}/health"),
        ):
            assert (reply.status_code, reply.headers["connection"]) == (200, "close")
        task.cancel()


async def test_what_runs_may_end_and_nobody_new_comes(model: Model) -> None:
    go = asyncio.Event()

    async def waits(attempt: Attempt) -> None:
        await go.wait()
        await attempt.play(ids_of(model))

    worker = ScriptedWorker("a", waits)
    async with running(model, worker) as stack, httpx.AsyncClient(timeout=HANG_S) as http:
        running_now = [asyncio.create_task(ask(http, stack, stream=stream)) for stream in (True, False)]
        await until(lambda: len(worker.attempts) == 2)
        task = leaving(stack, linger_s=0.0, drain_s=HANG_S)
        await asyncio.sleep(0.05)
        async with httpx.AsyncClient(timeout=HANG_S) as other:
            with pytest.raises(httpx.ConnectError):
                await ask(other, stack)
        assert not task.done()
        go.set()
        streamed, whole = await asyncio.gather(*running_now)
        assert streamed.text.endswith("data: [DONE]\n\n")
        assert whole.json()["choices"][0]["finish_reason"] == "stop"
        await asyncio.wait_for(task, HANG_S)


async def test_who_has_connected_may_still_ask(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a new connection, and on one whose last response began too early to say that it closes."""
    monkeypatch.setattr(server_module, "ASK_S", 3.0)  # for slow machines
    go = asyncio.Event()

    async def waits(attempt: Attempt) -> None:
        await attempt.tokens(ids_of(model)[:3], offset=0)
        await go.wait()
        await attempt.tokens(ids_of(model)[3:], offset=3, finish="stop")

    worker = ScriptedWorker("a", waits)
    async with running(model, worker) as stack, httpx.AsyncClient(timeout=HANG_S) as kept:
        asked = asyncio.create_task(ask(kept, stack, stream=True))
        await until(lambda: stack.metrics.registry.get_sample_value("baton_frontend_ttft_seconds_count") == 1)
        host, _, port = stack.url.removeprefix("http://").partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        await until(lambda: stack.connections() == 2)
        task = leaving(stack, linger_s=0.0, drain_s=HANG_S)
        await asyncio.sleep(0.1)
        go.set()
        assert "connection" not in (await asked).headers
        reply = await ask(kept, stack, stream=True)
        assert (reply.text[-14:], reply.headers["connection"]) == ("data: [DONE]\n\n", "close")
        writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        assert b"connection: close" in await asyncio.wait_for(reader.read(), HANG_S)
        writer.close()
        await asyncio.wait_for(task, HANG_S)


async def test_what_runs_longer_ends_with_one_error(model: Model) -> None:
    worker = ScriptedWorker("a", stalls)
    async with running(model, worker) as stack, httpx.AsyncClient(timeout=HANG_S) as http:
        asked = [ask(http, stack, stream=True, seed=1), ask(http, stack, seed=1), ask(http, stack, stream=True, seed=0)]
        tasks = [asyncio.create_task(one) for one in asked]
        await until(lambda: len(worker.attempts) == 3)
        await until(lambda: stack.metrics.registry.get_sample_value("baton_frontend_ttft_seconds_count") == 2)
        await asyncio.wait_for(leaving(stack, linger_s=0.0, drain_s=0.2), HANG_S)
        begun, whole, waiting = await asyncio.gather(*tasks)
        assert begun.status_code == 200
        events = begun.text.split("\n\n")
        assert json.loads(events[-2].removeprefix("data: "))["error"]["code"] == "draining"
        assert sum("error" in event for event in events) == 1
        assert "[DONE]" not in begun.text
        for refused in (whole, waiting):
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
            assert refused.headers["retry-after"] == "1"
        async with asyncio.timeout(HANG_S):
            for attempt in worker.attempts:
                await attempt.aborted.wait()


async def test_a_limit_ends_what_is_under_way_and_what_comes_later() -> None:
    requests = Requests()

    async def runs() -> None:
        with requests.counted():
            async with requests.limited():
                await asyncio.sleep(HANG_S)

    task = asyncio.create_task(runs())
    await asyncio.sleep(0)
    assert len(requests) == 1
    assert not await requests.finished(0.01)
    requests.end()
    for each in (task, asyncio.create_task(runs())):
        with pytest.raises(BatonError) as ended:
            await asyncio.wait_for(each, HANG_S)
        assert ended.value.reason is Reason.DRAINING
    assert await requests.finished(0.0)


async def test_a_time_out_of_its_own_is_not_taken_for_the_drain() -> None:
    with pytest.raises(TimeoutError):
        async with Requests().limited():
            raise TimeoutError
