"""One model on engines side by side: torch prefill and decode in float32, torch merged in bfloat16, llama.cpp's server.

Requests go everywhere, what breaks in one goes on in another, what one cannot do goes to those that can, and why a
request ran where it ran is told.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from baton.model.tokenizer import load_tokenizer
from baton.v1 import worker_pb2 as pb
from tests.integration.asking import Answer, ask, body, plain_client
from tests.integration.stack import CLEAN_S, HANG_S, Stack, until
from tests.llama_server import MODEL, LlamaServer
from tests.worker_process import ROOT, WorkerProcess, frontend

pytestmark = [pytest.mark.integration, pytest.mark.slow]

UP = "upstream-1"
STREAMING = {"decode-1", "merged-1", UP}
PROMPT = "The history of the lighthouse begins with"


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory, model_path: Path) -> Iterator[LlamaServer]:
    server = LlamaServer(tmp_path_factory.mktemp("llama"), model_path)
    server.start()
    try:
        yield server
    finally:
        server.kill()


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory, model_path: Path, llama: LlamaServer) -> Iterator[Stack]:
    upstream = {
        "engine": "openai",
        "upstream": llama.url,
        "model": MODEL,
        "tokenizer": model_path,
        "stall_s": 20,
        "max_streams": 8,
    }
    stack = Stack(
        tmp_path_factory.mktemp("fleet"),
        model_path,
        merged=0,
        kvstore=False,
        max_streams=3,
        extra={"merged-1": ("merged", {"dtype": "bfloat16", "pool_gib": 0.2}), UP: ("merged", upstream)},
    )
    stack.start()
    yield stack
    stack.teardown()


@pytest.fixture
def stack(fleet: Stack, llama: LlamaServer) -> Iterator[Stack]:
    """Everybody there and well; nothing is left behind."""
    if llama._process is None:
        llama.start()
    llama.cont()
    llama.wait_ready()
    fleet.heal()
    yield fleet
    if llama._process is not None:
        llama.cont()
    fleet.wake()
    fleet.settle()


async def explained(stack: Stack, prompt: str = PROMPT, **more: Any) -> dict[str, Any]:
    async with plain_client() as client:
        reply = await client.post(f"{stack.url()}/v1/baton/explain", json=body(prompt, 32, **more))
        assert reply.status_code == 200, reply.text
        return dict(reply.json())


async def several(
    stack: Stack, count: int, tokens: int, meanwhile: Callable[[set[int]], None] = lambda _: None, **more: object
) -> list[Answer]:
    """So many streams at once, more than any engine takes. `meanwhile` hears, with each piece, who has begun."""
    begun: set[int] = set()

    async with plain_client() as client:

        async def one(n: int) -> Answer:
            def heard(pieces: int) -> None:
                if pieces >= 3:
                    begun.add(n)
                meanwhile(begun)

            return await ask(client, stack.url(), f"{n}. {PROMPT}", tokens, on_piece=heard, **more)

        return list(await asyncio.gather(*(one(n) for n in range(count))))


def whole(answers: list[Answer], tokens: int) -> None:
    """Every one has come to its end, with all its tokens."""
    for answer in answers:
        assert not answer.error, answer
        assert answer.finish == "length"
        assert answer.text
        # Of a text that another engine went on with, the tokens are counted by both.
        slack = 2 if "RESUMED" in answer.reasons else 0
        assert abs(answer.usage["completion_tokens"] - tokens) <= slack, answer


def by_worker(answers: list[Answer]) -> dict[str, list[Answer]]:
    """Answers by where they began."""
    found: dict[str, list[Answer]] = {}
    for answer in answers:
        where = next(name for name in STREAMING if f"={name}" in answer.route)
        found.setdefault(where, []).append(answer)
    return found


async def test_requests_go_everywhere(stack: Stack) -> None:
    answers = await several(stack, 9, 24)
    whole(answers, 24)
    assert set(by_worker(answers)) == STREAMING
    assert "merged" in {answer.story["mode"] for answer in answers}


async def test_an_upstreams_answer_is_what_the_server_says(stack: Stack, llama: LlamaServer, model_path: Path) -> None:
    ids = load_tokenizer(model_path).encode(PROMPT, add_special=False)
    direct = llama.complete(ids, 24)
    async with frontend(stack.processes[UP]) as client:
        plan = pb.Plan(mode=pb.MODE_MERGED, worker=pb.Target(id=UP))
        for uid in ("direct-1", "direct-2"):
            reply = await client.submit(client.attempt(uid, ids, max_tokens=24), plan)
            assert not reply.HasField("failure"), reply
            text, tokens = "", 0
            async for event in client.events(uid):
                assert event.offset == len(text)
                text, tokens = text + event.text, event.text_tokens
                if event.finish:
                    break
            assert (text, tokens) == (direct["choices"][0]["text"], direct["usage"]["completion_tokens"])
            assert 0 <= event.route.cached_tokens <= len(ids)
            assert event.route.computed_tokens == len(ids) - event.route.cached_tokens
        assert event.route.cached_tokens > 0, "the server keeps prompts, and tells so"


async def test_a_killed_upstream_loses_no_stream_and_comes_back(stack: Stack, llama: LlamaServer) -> None:
    def kill(begun: set[int]) -> None:
        if len(begun) == 9:
            llama.kill()

    answers = await several(stack, 9, 96, kill)
    whole(answers, 96)
    began_there = by_worker(answers)[UP]
    moved = [answer for answer in began_there if "RESUMED" in answer.reasons]
    assert moved, "some had ended, not all"
    assert all(answer.story["worker"] != UP for answer in moved)
    until(lambda: stack.states()[UP] == "quarantined", stack.states)
    plan = await explained(stack)
    (candidate,) = [one for one in plan["candidates"] if one["worker"] == UP]
    assert "QUARANTINED" in candidate["excluded"]
    whole(await several(stack, 3, 8), 8)
    llama.start()
    llama.wait_ready()
    until(lambda: stack.states()[UP] == "serving", stack.states)


async def test_a_stopped_upstream_loses_no_stream_and_comes_back(stack: Stack, llama: LlamaServer) -> None:
    stopped: list[float] = []

    def stop(begun: set[int]) -> None:
        if len(begun) == 9 and not stopped:
            stopped.append(time.monotonic())
            llama.stop()

    answers = await several(stack, 9, 96, stop)
    whole(answers, 96)
    assert any("RESUMED" in answer.reasons for answer in by_worker(answers)[UP])
    llama.cont()
    until(lambda: stack.states()[UP] == "serving", stack.states)


@pytest.mark.parametrize("name", ["decode-1", "merged-1", UP])
async def test_any_worker_may_be_killed(stack: Stack, name: str) -> None:
    def kill(begun: set[int]) -> None:
        if len(begun) == 9 and stack.processes[name].process.poll() is None:
            stack.kill(name)

    answers = await several(stack, 9, 96, kill)
    whole(answers, 96)
    assert any("RESUMED" in answer.reasons for answer in by_worker(answers)[name]), "some had ended, not all"


async def test_who_leaves_frees_the_upstream(stack: Stack, llama: LlamaServer) -> None:
    """Its connection is closed, and so the server computes for nobody."""

    async def leave(client: httpx.AsyncClient, n: int) -> None:
        asked = body(f"{n}. {PROMPT}", 1000, stream=True)
        async with client.stream("POST", f"{stack.url()}/v1/completions", json=asked) as reply:
            async for _ in reply.aiter_lines():
                if llama.busy():
                    return

    async with plain_client() as client:
        await asyncio.gather(*(leave(client, n) for n in range(9)))
    until(lambda: llama.busy() == 0, within_s=CLEAN_S)
    stack.settle()


async def test_what_the_upstream_cannot_do_goes_to_others(stack: Stack) -> None:
    plan = await explained(stack, logprobs=2)
    (candidate,) = [one for one in plan["candidates"] if one["worker"] == UP]
    assert candidate["excluded"] == f"LACKS: {UP} cannot do logprobs"
    answers = await several(stack, 7, 8, logprobs=2)
    whole(answers, 8)
    assert UP not in by_worker(answers)


def test_kv_that_lies_otherwise_is_refused_at_registration(stack: Stack, model_path: Path) -> None:
    """Of the same engine: with both values named. (Merged workers never hand over: merged-1 has another dtype.)"""
    flags = {"model": model_path, "served_name": "smollm2-135m-instruct", "etcd": stack.etcd.address, "pool_gib": 0.2}
    odd = WorkerProcess("prefill", "prefill-odd", stack.directory, stack.mark, dtype="bfloat16", **flags)
    try:
        assert odd.process.wait(HANG_S) == 1
        assert "KV_LAYOUT_MISMATCH" in odd.log()
        assert "dtype: bfloat16 != float32" in odd.log()
        assert "prefill-odd" not in stack.states()
    finally:
        odd.stop()


def test_one_command_joins_an_upstream(stack: Stack, llama: LlamaServer, model_path: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "baton.cli.main", "merged", "--engine", "openai", "--upstream", llama.url]
    command += ["--model", MODEL, "--tokenizer", str(model_path), "--etcd", stack.etcd.address]
    command += ["--served-name", "smollm2-135m-instruct", "--id", "by-hand"]
    environment = {**os.environ, "BATON_HOME": str(tmp_path), **stack.mark}
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment)
    try:
        until(lambda: stack.states().get("by-hand") == "serving", lambda: (tmp_path / "log").read_text())
        process.terminate()
        assert process.wait(HANG_S) == 0
        until(lambda: "by-hand" not in stack.states(), stack.states)
    finally:
        process.kill()
        process.wait()
