"""The whole stack with processes killed, stopped and restarted: what a client sees of it.

Each test leaves the run broken; it is healed, and checked for leaks, before the next one. A random model in f32, which
starts twice as fast as the real one: the text of every answer must be the one that an undisturbed run gives, whatever
broke.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator

import pytest

from baton.registry import Registry
from baton.v1 import registry_pb2
from tests.integration.asking import Answer, ask, body, plain_client
from tests.integration.stack import CLEAN_S, HANG_S, SERVED, Stack, until
from tests.tiny_model import make_tiny_model

pytestmark = [pytest.mark.integration, pytest.mark.slow]

SHORT = [
    "The capital of France is Paris, and the capital of Italy is",
    "Once upon a time, in a small village by the sea, there lived an old fisherman who",
    "List of planets in the solar system, from the sun outwards: Mercury,",
    "Water boils at 100 degrees Celsius because",
]
LONG = [
    f"{name} kept a diary of the voyage, and wrote in it each evening what the day had brought. " * 18
    for name in ("Anna", "Boris", "Clara", "David")
]
TOKENS = 160
"""A second and more of one stream: long enough to be struck in the middle."""


@pytest.fixture(scope="module")
def module_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """One of each; `strict` is a frontend that answers an error rather than run elsewhere."""
    directory = tmp_path_factory.mktemp("failures")
    model = make_tiny_model(directory / "tiny", layers=12, hidden=256)
    frontends = {"frontend": "auto", "strict": "strict"}
    run = Stack(directory, model, frontends=frontends, pool_gib=0.2, chunk_tokens=64).start()
    yield run
    run.wake()
    run.teardown()


@pytest.fixture(scope="module")
def expected(module_stack: Stack) -> dict[str, str]:
    """The text of every prompt in an undisturbed run."""

    async def undisturbed() -> dict[str, str]:
        async with plain_client() as client:
            url = module_stack.url()
            answers = await asyncio.gather(*(ask(client, url, prompt, TOKENS) for prompt in SHORT + LONG))
        return {prompt: _whole(answer).text for prompt, answer in zip(SHORT + LONG, answers, strict=True)}

    return asyncio.run(undisturbed())


@pytest.fixture
def stack(module_stack: Stack, expected: dict[str, str]) -> Iterator[Stack]:
    """The module's run: whole, clean and with cold caches."""
    module_stack.heal()
    module_stack.settle()
    module_stack.clear_caches()
    yield module_stack
    module_stack.wake()
    module_stack.settle()


def _whole(answer: Answer) -> Answer:
    """A complete answer, as asked."""
    assert answer.status == 200, answer
    assert answer.error == {}
    assert (answer.finish, answer.usage["completion_tokens"]) == ("length", TOKENS)
    return answer


def _true(answer: Answer, text: str) -> Answer:
    """A complete answer with the text of the undisturbed run."""
    assert _whole(answer).text == text
    return answer


class Streams:
    """Streams of `prompts` under way at once, that can be waited for by how far they are."""

    def __init__(self, stack: Stack, prompts: list[str], expected: dict[str, str], frontend: str = "frontend") -> None:
        self._prompts = prompts
        self._expected = expected
        self._url = stack.url(frontend)
        self._pieces = [0] * len(prompts)
        self._tasks: list[asyncio.Task[Answer]] = []

    async def __aenter__(self) -> Streams:
        self._client = plain_client()
        client = await self._client.__aenter__()

        async def one(number: int, prompt: str) -> Answer:
            def heard(pieces: int) -> None:
                self._pieces[number] = pieces

            return await ask(client, self._url, prompt, TOKENS, on_piece=heard)

        self._tasks = [asyncio.create_task(one(n, prompt)) for n, prompt in enumerate(self._prompts)]
        return self

    async def __aexit__(self, *error: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._client.__aexit__(None, None, None)

    async def reach(self, condition: Callable[[], object]) -> None:
        """Wait for a moment while every stream is under way."""

        def ended() -> list[Answer]:
            return [task.result() for task in self._tasks if task.done()]

        await asyncio.to_thread(until, lambda: condition() or ended())
        assert not ended(), f"too late: {[(a.route, a.story, a.error) for a in ended()]}"

    async def begun(self, pieces: int = 4) -> None:
        """Every stream has brought that much."""
        await self.reach(lambda: min(self._pieces) >= pieces)

    async def all_true(self) -> list[Answer]:
        """All answers, each with the text of the undisturbed run."""
        async with asyncio.timeout(HANG_S):
            answers = await asyncio.gather(*self._tasks)
        return [_true(a, self._expected[prompt]) for a, prompt in zip(answers, self._prompts, strict=True)]


async def in_thread(work: Callable[[], object]) -> None:
    """Blocking work beside live streams."""
    await asyncio.to_thread(work)


async def test_prefill_gone_then_merged_gone(stack: Stack, expected: dict[str, str]) -> None:
    """Prefill gone: merged or local. Merged gone too: local. Strict: an error. Each counted by its reason."""
    counted = stack.metric("frontend", "baton_frontend_fallbacks_total")
    stack.kill("prefill-1")
    async with plain_client() as client:
        for prompt in SHORT[:2]:  # at once, before anybody has missed it
            answer = _true(await ask(client, stack.url(), prompt, TOKENS), expected[prompt])
            assert answer.story["mode"] in ("merged", "local")
            assert "PREFILL_UNAVAILABLE" in answer.reasons
            assert answer.reasons & {"MERGED_FALLBACK", "LOCAL_FALLBACK", "HANDBACK"}
        assert stack.metric("frontend", "baton_frontend_fallbacks_total", reason="PREFILL_UNAVAILABLE") >= 2
        assert stack.metric("frontend", "baton_frontend_fallbacks_total") >= counted + 4

        stack.kill("merged-1")
        for prompt in SHORT[2:]:
            answer = _true(await ask(client, stack.url(), prompt, TOKENS), expected[prompt])
            assert answer.story["mode"] == "local"
            assert answer.story["worker"] == "decode-1"
        assert stack.metric("frontend", "baton_frontend_fallbacks_total", reason="LOCAL_FALLBACK") >= 2

        for _ in range(2):
            refused = await ask(client, stack.url("strict"), SHORT[0], TOKENS)
            assert refused.status == 503
            assert refused.error["code"] == "prefill_unavailable"
            assert refused.error["type"] == "server_error"
            assert set(refused.error) == {"message", "type", "param", "code"}
            assert int(refused.headers["retry-after"]) >= 1


async def test_prefill_killed_in_mid_transfer(stack: Stack, expected: dict[str, str]) -> None:
    moved = stack.metric("decode-1", "baton_worker_transfer_bytes_total")
    fallbacks = stack.metric("decode-1", "baton_worker_fallbacks_total")
    async with Streams(stack, SHORT + LONG, expected) as streams:
        await streams.reach(lambda: stack.metric("decode-1", "baton_worker_transfer_bytes_total") > moved)
        assert "prefill-1" in stack.findings(), "no run was open any more"
        stack.kill("prefill-1")
        answers = await streams.all_true()
    assert any(answer.story["mode"] != "disaggregated" for answer in answers)
    assert any(answer.reasons & {"KV_LEASE_LOST", "PREFILL_UNAVAILABLE", "KV_TRANSFER_FAILED"} for answer in answers)
    assert stack.metric("decode-1", "baton_worker_fallbacks_total") > fallbacks


async def test_decode_killed_in_mid_stream(stack: Stack, expected: dict[str, str]) -> None:
    async with Streams(stack, SHORT, expected) as streams:
        await streams.begun()
        stack.kill("decode-1")
        answers = await streams.all_true()
    resumed = [answer for answer in answers if "RESUMED" in answer.reasons]
    assert resumed
    assert {answer.story["worker"] for answer in answers} == {"merged-1"}
    assert {answer.story["attempts"] for answer in resumed} == {2}
    assert stack.metric("frontend", "baton_frontend_resumes_total") >= len(resumed)


async def test_engine_of_decode_killed_in_mid_stream(stack: Stack, expected: dict[str, str]) -> None:
    """The worker goes with its engine: nothing is served from a dead engine's pool."""
    async with Streams(stack, SHORT, expected) as streams:
        await streams.begun()
        (engine,) = stack.processes["decode-1"].children()
        os.kill(engine, signal.SIGKILL)
        answers = await streams.all_true()
    assert any("RESUMED" in answer.reasons for answer in answers)
    assert await asyncio.to_thread(stack.processes["decode-1"].process.wait, HANG_S) != 0


async def test_decode_stopped_in_mid_stream_and_continued(stack: Stack, expected: dict[str, str]) -> None:
    """A worker that falls silent loses its streams; when it wakes it doubles nothing and holds nothing."""
    lost = "baton_frontend_sessions_lost_total"
    before = stack.metric("frontend", lost)
    async with Streams(stack, SHORT, expected) as streams:
        await streams.begun()
        stack.stop("decode-1")
        await in_thread(lambda: until(lambda: stack.metric("frontend", lost) > before))
        stack.cont("decode-1")
        answers = await streams.all_true()
    assert any("RESUMED" in answer.reasons for answer in answers)
    await in_thread(stack.wait_usable)
    async with Streams(stack, SHORT, expected, "strict") as streams:
        await streams.all_true()


async def test_kvstore_killed_in_mid_stream(stack: Stack, expected: dict[str, str]) -> None:
    async with Streams(stack, SHORT, expected) as streams:
        await streams.begun()
        stack.kill("kvstore")
        await streams.all_true()
    async with Streams(stack, SHORT, expected, "strict") as streams:
        await streams.all_true()


async def test_merged_killed_in_mid_stream(stack: Stack, expected: dict[str, str]) -> None:
    """What ran merged goes on disaggregated or local."""
    stack.kill("prefill-1", "decode-1")
    async with Streams(stack, SHORT, expected) as streams:
        await streams.begun()
        await in_thread(lambda: _back(stack, "prefill-1", "decode-1"))
        stack.kill("merged-1")
        answers = await streams.all_true()
    assert {answer.story["worker"] for answer in answers} <= {"decode-1", "merged-1"}


def _back(stack: Stack, *names: str) -> None:
    for name in names:
        stack.launch(name)
    for name in names:
        stack.processes[name].wait_ready()
    until(lambda: all(stack.states().get(name) == "serving" for name in names), stack.states)


async def test_sampled_stream_is_resumed_exactly(stack: Stack) -> None:
    """Seeded sampling: noise depends on (seed, index) only, so the resumed text is the undisturbed one."""
    sampling = {"temperature": 0.9, "top_p": 0.95, "seed": 7}
    async with plain_client() as client:
        wanted = _whole(await ask(client, stack.url(), SHORT[1], TOKENS, **sampling)).text
        seen = asyncio.Event()
        task = asyncio.create_task(
            ask(client, stack.url(), SHORT[1], TOKENS, on_piece=lambda n: seen.set() if n == 6 else None, **sampling)
        )
        await asyncio.wait_for(seen.wait(), HANG_S)
        running = [n for n in stack.workers("decode", "merged") if n in stack.findings()]
        stack.kill(*running)
        answer = _whole(await task)
    assert answer.text == wanted
    assert "RESUMED" in answer.reasons


@pytest.mark.parametrize("empty", [False, True], ids=["same data", "empty"])
async def test_etcd_killed_and_restarted(stack: Stack, expected: dict[str, str], empty: bool) -> None:
    pids = {name: pid for name, pid in stack.pids().items() if name != "etcd"}
    async with Streams(stack, SHORT, expected) as streams:
        await streams.begun()
        stack.etcd.kill()
        await streams.all_true()
    async with Streams(stack, SHORT, expected, "strict") as streams:
        await streams.all_true()
    assert stack.missing() == []
    await in_thread(lambda: stack.etcd.restart(empty=empty))
    async with Streams(stack, SHORT, expected) as streams:
        await streams.all_true()
    registry = Registry([stack.etcd.address], "local", None)
    try:
        await registry.start()
        view = registry.view("workers", registry_pb2.Worker)
        await in_thread(lambda: until(lambda: set(stack.workers()) <= set(view.items())))
    finally:
        await registry.close()
    assert {name: pid for name, pid in stack.pids().items() if name != "etcd"} == pids
    # A new process in an old one's place.
    await in_thread(lambda: stack.restart("decode-1"))
    await in_thread(stack.wait_usable)
    async with Streams(stack, SHORT[:1], expected, "strict") as streams:
        (answer,) = await streams.all_true()
    assert answer.story["worker"] == "decode-1"
    assert stack.metric("decode-1", "baton_worker_transfer_bytes_total") == answer.story["kv_bytes"] > 0


async def test_router_killed_and_restarted(stack: Stack, expected: dict[str, str]) -> None:
    async with Streams(stack, SHORT, expected) as streams:
        await streams.begun()
        stack.kill("router")
        async with plain_client() as client:
            for prompt in SHORT[:2]:
                answer = _true(await ask(client, stack.url(), prompt, TOKENS), expected[prompt])
                assert answer.story["mode"] in ("merged", "local")
                assert answer.reasons & {"MERGED_FALLBACK", "LOCAL_FALLBACK"}
            refused = await ask(client, stack.url("strict"), SHORT[0], TOKENS)
            assert (refused.status, refused.error["code"]) == (503, "router_unavailable")
            assert int(refused.headers["retry-after"]) >= 1
        await streams.all_true()
    assert stack.metric("frontend", "baton_frontend_own_choices_total") >= 2
    await in_thread(stack.heal)
    async with Streams(stack, SHORT, expected, "strict") as streams:
        for answer in await streams.all_true():
            assert answer.story["mode"] == "disaggregated"


async def test_prefill_stopped_during_prefill(stack: Stack, expected: dict[str, str]) -> None:
    async with Streams(stack, LONG[:2], expected) as streams:
        await streams.reach(lambda: "prefill-1" in stack.findings())
        stack.stop("prefill-1")
        for answer in await streams.all_true():
            assert answer.story["mode"] in ("merged", "local")
    stack.cont("prefill-1")
    await in_thread(stack.settle)


async def test_ready_names_what_is_missing(stack: Stack) -> None:
    assert stack.missing() == stack.missing("strict") == []
    stack.kill("decode-1", "merged-1")
    until(lambda: bool(stack.missing()))
    (missing,) = stack.missing()
    assert missing["part"] == "worker"
    assert "no decode or merged worker" in missing["why"]
    async with plain_client() as client:
        assert (await client.get(f"{stack.url()}/health")).status_code == 200
        reply = await client.post(f"{stack.url()}/v1/completions", json=body(SHORT[0], 4))
        assert reply.status_code == 503
        assert reply.json()["error"]["code"] == "decode_unavailable"
        assert int(reply.headers["retry-after"]) >= 1
        models = await client.get(f"{stack.url()}/v1/models")
        assert [model["id"] for model in models.json()["data"]] == [SERVED]
    stack.kill("prefill-1")
    until(lambda: "prefill" in {m["part"] for m in stack.missing("strict")}, lambda: stack.missing("strict"))


@pytest.mark.parametrize("name", ["decode-1", "merged-1", "prefill-1"])
async def test_drain_under_load_loses_nothing(stack: Stack, expected: dict[str, str], name: str) -> None:
    """SIGTERM: what runs ends well, here or elsewhere, what comes goes elsewhere, and the process exits with 0."""
    async with Streams(stack, SHORT, expected) as streams:
        await streams.begun(2)
        stack.terminate(name)
        async with Streams(stack, SHORT + LONG[:2], expected) as late:
            await late.all_true()
        await streams.all_true()
    assert await asyncio.to_thread(stack.processes[name].process.wait, HANG_S) == 0


async def test_frontend_killed_frees_everything(stack: Stack, expected: dict[str, str]) -> None:
    """Its clients lose their connections; the workers are clean soon, and another frontend serves."""
    streams = Streams(stack, LONG, expected, "strict")
    async with streams:
        await streams.reach(lambda: "prefill-1" in stack.findings())
        stack.kill("strict")
    await in_thread(lambda: stack.settle(CLEAN_S))
    async with Streams(stack, SHORT[:1], expected) as others:
        await others.all_true()
