"""Every service in turn is told to leave and started again, under load: nobody notices.

The client is a plain one: a list of frontends, and another one of it only when a connection was refused before a byte
was sent. Weights are in f32: the text of every answer must be that of an undisturbed run.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest

from tests.integration.asking import Answer, ask, body, plain_client
from tests.integration.stack import HANG_S, Stack, until
from tests.tiny_model import make_tiny_model

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

DRAIN_S = 2
"""Of the workers: shorter than the long streams, so that these are moved."""
SHORT, LONG, ENDLESS = 40, 1000, 4000
RESUMES = "baton_frontend_resumes_total"
PROMPTS = [f"{word} " * n for word, n in (("alpha", 3), ("beta", 30), ("gamma", 90), ("delta", 1), ("epsilon", 60))]
FRONTENDS = ("frontend-a", "frontend-b")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers, random weights."""
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), layers=2, context=8192)


@pytest.fixture
def stack(tmp_path: Path, model: Path) -> Iterator[Stack]:
    """Two of everything that may be two."""
    run = Stack(
        tmp_path,
        model,
        prefill=2,
        decode=2,
        merged=1,
        routers=2,
        frontends=dict.fromkeys(FRONTENDS, "auto"),
        http={"drain_s": 60},
        drain_s=DRAIN_S,
    ).start()
    yield run
    run.teardown()


@pytest.fixture(scope="module")
def module_trio(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Stack]:
    """One worker of each role. `hasty` is a frontend with little patience, `strict` one that insists on hand-over."""
    run = Stack(
        tmp_path_factory.mktemp("trio"),
        model,
        kvstore=False,
        frontends={"frontend": "auto", "strict": "strict", "hasty": "auto"},
        http={"drain_s": 1},
        drain_s=1,
    ).start()
    yield run
    run.teardown()


@pytest.fixture
def trio(module_trio: Stack) -> Iterator[Stack]:
    """The same, whole and clean."""
    module_trio.heal()
    yield module_trio
    module_trio.wake()
    module_trio.settle()


class Client:
    """Asks the frontends of a list, each request another one first."""

    def __init__(self, stack: Stack, http: httpx.AsyncClient) -> None:
        self._stack = stack
        self._http = http
        self._turn = itertools.count()
        self.refused = 0

    async def stream(self, prompt: str, tokens: int) -> Answer:
        """A streamed completion."""
        async for url in self._urls():
            try:
                return await ask(self._http, url, prompt, tokens)
            except httpx.ConnectError:
                self.refused += 1
        raise AssertionError("every frontend refuses connections")

    async def whole(self, prompt: str, tokens: int) -> Answer:
        """One that is not streamed."""
        async for url in self._urls():
            try:
                reply = await self._http.post(f"{url}/v1/completions", json=body(prompt, tokens))
            except httpx.ConnectError:
                self.refused += 1
                continue
            said = reply.json()
            if reply.status_code != 200:
                return Answer(reply.status_code, error=said["error"])
            (choice,) = said["choices"]
            return Answer(200, "", [choice["text"]], choice["finish_reason"], said["baton"], said["usage"])
        raise AssertionError("every frontend refuses connections")

    async def _urls(self) -> AsyncIterator[str]:
        first = next(self._turn) % len(FRONTENDS)
        for name in (*FRONTENDS[first:], *FRONTENDS[:first]):
            # A frontend that starts is in nobody's list yet.
            if self._stack.processes[name].address:
                yield self._stack.url(name)


class Load:
    """Requests, always some under way, until it is left; each answer is checked."""

    def __init__(self, client: Client, expected: dict[tuple[str, int], str]) -> None:
        self._client = client
        self._expected = expected
        self._tasks: list[asyncio.Task[None]] = []
        self._over = False
        self.wrong: list[str] = []
        self.answered: Counter[str] = Counter()
        self.resumed = 0

    async def __aenter__(self) -> Load:
        lines = [(n, SHORT, n % 2 == 0) for n in range(6)] + [(n, LONG, True) for n in range(3)]
        self._tasks = [asyncio.create_task(self._go_on(*line)) for line in lines]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._over = True
        async with asyncio.timeout(HANG_S):
            await asyncio.gather(*self._tasks)

    async def _go_on(self, start: int, tokens: int, streamed: bool) -> None:
        ask_one = self._client.stream if streamed else self._client.whole
        for n in itertools.count(start):
            if self._over:
                return
            prompt = PROMPTS[n % len(PROMPTS)]
            try:
                answer = await ask_one(prompt, tokens)
            except Exception as error:
                self.wrong.append(f"{time.strftime('%X')} {type(error).__name__}: {error}")
                continue
            self.answered[f"{'long' if tokens == LONG else 'short'} {'stream' if streamed else 'body'}"] += 1
            if answer.status != 200 or answer.error or answer.text != self._expected[prompt, tokens]:
                self.wrong.append(
                    f"{time.strftime('%X')} {answer.status} {answer.error} {answer.story} {answer.text!r}"
                )
            elif "RESUMED" in answer.reasons:
                self.resumed += 1


async def undisturbed(client: Client) -> dict[tuple[str, int], str]:
    """The text of each prompt at each length."""
    found = {}
    for prompt in PROMPTS:
        for tokens in (SHORT, LONG):
            answer = await client.stream(prompt, tokens)
            assert (answer.status, answer.error, answer.usage["completion_tokens"]) == (200, {}, tokens)
            found[prompt, tokens] = answer.text
    return found


async def test_every_service_in_turn(stack: Stack) -> None:
    async with plain_client() as http:
        client = Client(stack, http)
        load = Load(client, await undisturbed(client))
        codes = {}
        async with load:
            for name in list(stack.processes):
                began = time.monotonic()
                before = sum(load.answered.values())
                stack.terminate(name)
                codes[name] = await asyncio.to_thread(stack.processes[name].process.wait, HANG_S)
                left = time.monotonic() - began
                stack.launch(name)
                await asyncio.to_thread(stack.processes[name].wait_ready)
                await asyncio.to_thread(stack.wait_usable)
                took = time.monotonic() - began
                answered = sum(load.answered.values()) - before
                print(f"{name}: left in {left:.1f} s, back after {took:.1f} s, {answered} answers meanwhile")
    print(json.dumps({**load.answered, "resumed": load.resumed, "refused connections": client.refused}))
    assert load.wrong == []
    assert codes == dict.fromkeys(stack.processes, 0)


async def test_streams_longer_than_the_grace_period_are_moved(trio: Stack) -> None:
    """What still runs then goes on elsewhere, and the worker leaves."""
    prompts = PROMPTS[:3]
    async with plain_client() as http:
        wanted = [answer.text for answer in await asyncio.gather(*(ask(http, trio.url(), p, ENDLESS) for p in prompts))]
        moved = trio.metric("frontend", RESUMES, reason="DRAINING")
        begun: set[int] = set()
        tasks = [
            asyncio.create_task(ask(http, trio.url(), p, ENDLESS, on_piece=lambda _, n=n: begun.add(n)))
            for n, p in enumerate(prompts)
        ]
        await asyncio.to_thread(until, lambda: len(begun) == len(tasks))
        name = next(name for name in trio.findings() if name in ("decode-1", "merged-1"))
        trio.terminate(name)
        answers = await asyncio.gather(*tasks)
        assert [answer.text for answer in answers] == wanted
        assert await asyncio.to_thread(trio.processes[name].process.wait, HANG_S) == 0
        assert {answer.story["worker"] for answer in answers} == {"decode-1", "merged-1"} - {name}
        resumed = [answer for answer in answers if "RESUMED" in answer.reasons]
        assert len(resumed) == trio.metric("frontend", RESUMES, reason="DRAINING") - moved > 0


async def test_a_prefill_that_leaves_finishes_the_runs_it_has(trio: Stack) -> None:
    prompts = [f"{n} " + "omega " * 300 for n in range(4)]
    async with plain_client() as http:
        tasks = [asyncio.create_task(ask(http, trio.url("strict"), prompt, SHORT)) for prompt in prompts]
        await asyncio.to_thread(until, lambda: "prefill-1" in trio.findings())
        trio.terminate("prefill-1")
        for answer in await asyncio.gather(*tasks):
            assert (answer.status, answer.finish, answer.story["mode"]) == (200, "length", "disaggregated")
    assert await asyncio.to_thread(trio.processes["prefill-1"].process.wait, HANG_S) == 0


async def test_a_frontend_ends_what_takes_too_long_with_an_error(trio: Stack) -> None:
    async with plain_client() as http:
        begun = asyncio.Event()
        streamed = asyncio.create_task(
            ask(http, trio.url("hasty"), PROMPTS[0], ENDLESS, on_piece=lambda _: begun.set())
        )
        whole = asyncio.create_task(http.post(f"{trio.url('hasty')}/v1/completions", json=body(PROMPTS[1], ENDLESS)))
        await asyncio.wait_for(begun.wait(), HANG_S)
        trio.terminate("hasty")
        answer = await streamed
        assert (answer.status, answer.error["code"], answer.finish) == (200, "draining", "")
        refused = await whole
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
        assert int(refused.headers["retry-after"]) >= 1
    assert await asyncio.to_thread(trio.processes["hasty"].process.wait, HANG_S) == 0
    await asyncio.to_thread(trio.settle)
