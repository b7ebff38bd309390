"""One name for two requests that live at the same time."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from baton.v1 import worker_pb2 as pb
from tests.faults.conftest import Fleet, Oracle
from tests.faults.fleet import LOCAL, handed_over, prompt, real_run
from tests.integration.asking import body, plain_client
from tests.scripted_prefill import run_request
from tests.worker_process import frontend, settle

pytestmark = pytest.mark.integration


@pytest.mark.parametrize("frontend_name", ["frontend", "strict"])
@pytest.mark.parametrize("stream", [False, True])
async def test_two_http_requests_with_one_id(fleet: Fleet, frontend_name: str, stream: bool) -> None:
    """A client's id is a label: each gets its own answer, and the label back."""
    url = f"{fleet.stack.url(frontend_name)}/v1/completions"
    prompts = [f"{name} has the same name as somebody else" for name in ("Anna", "Boris", "Anna", "Clara")]

    async with plain_client() as client:

        async def one(text: str, id: str) -> httpx.Response:
            asked = body(text, 24, stream=stream)
            return await client.post(url, json=asked, headers={"x-request-id": id})

        alone = [await one(text, f"own-{i}") for i, text in enumerate(prompts)]
        shared = await asyncio.gather(*(one(text, "shared") for text in prompts))
    assert [r.status_code for r in shared] == [200] * len(prompts)
    assert {r.headers["x-request-id"] for r in shared} == {"shared"}
    assert [_text(r, stream) for r in shared] == [_text(r, stream) for r in alone]


def _text(reply: httpx.Response, stream: bool) -> str:
    import json

    if not stream:
        text: str = reply.json()["choices"][0]["text"]
        return text
    lines = [line.removeprefix("data: ") for line in reply.text.splitlines() if line]
    assert lines[-1] == "[DONE]"
    return "".join(choice["text"] for line in lines[:-1] for choice in json.loads(line)["choices"])


@pytest.mark.parametrize("plan", ["local", "handed over"])
async def test_one_attempt_submitted_twice(fleet: Fleet, greedy: Oracle, plan: str) -> None:
    """In the same instant, by one frontend and by two: one runs, unharmed, the other is told so."""
    how = LOCAL if plan == "local" else handed_over(fleet.prefill)
    async with frontend(fleet.decode) as one, frontend(fleet.decode) as other:
        for i in range(20):
            uid, ids = f"twice-{plan}-{i}", prompt(80, plan, i)
            second = one if i % 2 else other
            replies = await asyncio.gather(
                one.submit(one.attempt(uid, ids), how), second.submit(second.attempt(uid, ids), how)
            )
            refused = [r.HasField("failure") for r in replies]
            assert sorted(refused) == [False, True], replies
            assert replies[refused.index(True)].failure.reason == "DUPLICATE_REQUEST"
            winner, loser = (one, second) if refused[1] else (second, one)
            if winner is not loser:
                assert not await loser.abort(uid), "a stranger's attempt could be aborted"
            assert (await winner.collect(uid)).tokens == {0: greedy(ids, 16)}
            await settle(fleet.decode)


async def test_one_attempt_run_twice_on_prefill(fleet: Fleet) -> None:
    """The second Run is refused; the first goes on and ends well."""
    async with frontend(fleet.decode) as decode:
        request = run_request(decode.attempt("run twice", prompt(900, "run twice")), decode.described)

    async def told() -> list[pb.RunEvent]:
        events = []
        async with real_run(fleet.prefill, request) as run:
            async for event in run:
                events.append(event)
                if event.HasField("done"):
                    await asyncio.sleep(0.2)  # hold it while the other is refused
                    break
        return events

    first, second = sorted(await asyncio.gather(told(), told()), key=len, reverse=True)
    assert [e.failure.reason for e in second] == ["DUPLICATE_REQUEST"]
    assert first[0].HasField("accepted")
    assert first[-1].HasField("done")
    await settle(fleet.prefill)
