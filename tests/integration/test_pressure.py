"""More than the stack can take: clients and frontends that do not read, full pools and queues, large bodies.

What is accepted is right, what is not is refused at once with a time to come back, and nothing grows without bound.
Times are printed; only a hang fails.
"""

from __future__ import annotations

import asyncio
import json
import random
import socket
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.integration.asking import Answer, ask, body, plain_client
from tests.integration.probing import probing
from tests.integration.stack import HANG_S, SERVED, Stack, until
from tests.tiny_model import make_tiny_model

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(600)]

MIB = 1 << 20
LARGE = 27 * MIB
STALL_S = 2.0
GROWTH = 256 * MIB
"""What a process may grow by, whatever is thrown at it."""
PROBE_MS = 2000.0
"""A probe that takes so long, and half of what it was asked beside, has hung."""
WORDS = "all work and no play makes Jack a dull boy"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), layers=2)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory, tiny: Path) -> Iterator[Stack]:
    """One of each, and two frontends that are quick to give a client up."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BATON_CLIENT_STALL_S", str(STALL_S))
        patch.setenv("BATON_MAX_BODY_BYTES", str(64 * MIB))
        stack = Stack(
            tmp_path_factory.mktemp("pressure"),
            tiny,
            kvstore=False,
            frontends={"frontend": "auto", "other": "auto"},
            pool_gib=0.1,
        ).start()
    yield stack
    stack.wake()
    stack.teardown()


@pytest.fixture
def stack(running: Stack) -> Iterator[Stack]:
    """Whole and clean, before and after."""
    running.heal()
    running.settle()
    running.clear_caches()
    yield running
    running.wake()
    running.settle()


@pytest.fixture(scope="module")
def crowded(tmp_path_factory: pytest.TempPathFactory, tiny: Path) -> Iterator[Stack]:
    """Workers with few streams and a small pool."""
    stack = Stack(tmp_path_factory.mktemp("crowded"), tiny, kvstore=False, pool_gib=0.0015, max_streams=4).start()
    yield stack
    stack.teardown()


def prompts(count: int, words: int, seed: int) -> list[str]:
    """Prompts that share nothing but their length."""
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS.split(), k=words)) for _ in range(count)]


async def alone(stack: Stack, asked: list[str], tokens: int, frontend: str = "frontend") -> dict[str, str]:
    """The text of each prompt when nothing else is asked, four at a time."""
    texts: dict[str, str] = {}
    async with plain_client() as client:
        for start in range(0, len(asked), 4):
            some = asked[start : start + 4]
            answers = await asyncio.gather(*(ask(client, stack.url(frontend), prompt, tokens) for prompt in some))
            assert all(answer.status == 200 and not answer.error for answer in answers), answers
            texts |= {prompt: answer.text for prompt, answer in zip(some, answers, strict=True)}
    return texts


def rss(stack: Stack, name: str) -> int:
    """Resident bytes of a process and its children (an engine's memfd counts in each)."""
    process = psutil.Process(stack.processes[name].process.pid)
    return sum(one.memory_info().rss for one in (process, *process.children(recursive=True)))


def not_held_up(probes: dict[str, dict[str, float]], beside_s: float) -> None:
    """Probes were answered meanwhile, not when it was over. On a busy machine both take longer."""
    assert all(times["max"] < max(PROBE_MS, 500 * beside_s) for times in probes.values()), (probes, beside_s)


def refused_well(answer: Answer) -> None:
    """Early, with a reason and a time to come back."""
    assert answer.status in (429, 503), answer
    assert int(answer.headers["retry-after"]) >= 1
    assert answer.error["code"] in ("no_capacity", "decode_unavailable", "prefill_unavailable"), answer.error


# --- who does not read ---


def deaf_client(stack: Stack, max_tokens: int) -> socket.socket:
    """Asks for a long stream of large chunks, and reads no more than its beginning."""
    host, _, port = stack.url().removeprefix("http://").partition(":")
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.settimeout(HANG_S)
    client.connect((host, int(port)))
    messages = [{"role": "user", "content": f"{id(client)} {WORDS}"}]
    asked: dict[str, Any] = {"model": SERVED, "messages": messages, "stream": True, "max_tokens": max_tokens}
    asked |= {"ignore_eos": True, "logprobs": True, "top_logprobs": 20}
    data = json.dumps(asked).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: {host}\r\ncontent-length: {len(data)}\r\n\r\n"
    client.sendall(head.encode() + data)
    assert client.recv(12) == b"HTTP/1.1 200"
    return client


async def test_clients_that_do_not_read_are_cut_off_and_nobody_notices(stack: Stack) -> None:
    asked = prompts(8, 12, seed=1)
    expected = await alone(stack, asked, 200)
    before = rss(stack, "frontend")
    aborts = stack.metric("frontend", "baton_frontend_aborts_total", result="found")
    deaf = [deaf_client(stack, 1800) for _ in range(6)]
    try:
        async with plain_client() as client:
            others = [asyncio.create_task(ask(client, stack.url(), prompt, 200)) for prompt in asked]
            cut = asyncio.to_thread(
                until, lambda: stack.metric("frontend", "baton_frontend_slow_clients_total") >= len(deaf)
            )
            answers = await asyncio.gather(*others)
            await cut
        assert [(a.status, a.error, a.text) for a in answers] == [(200, {}, expected[p]) for p in asked]
        assert stack.metric("frontend", "baton_frontend_aborts_total", result="found") > aborts
        stack.settle()  # while the clients still hold their connections
        assert rss(stack, "frontend") - before < GROWTH
        assert stack.metric("frontend", "baton_frontend_active_requests") == 0
    finally:
        for one in deaf:
            one.close()


async def all_speaking(client: httpx.AsyncClient, stack: Stack, asked: list[str]) -> list[asyncio.Task[Answer]]:
    """A stream of 1500 tokens for each prompt, once all have begun and none has ended."""
    begun: set[int] = set()
    streams = [
        asyncio.create_task(ask(client, stack.url(), prompt, 1500, on_piece=lambda _, i=i: begun.add(i)))
        for i, prompt in enumerate(asked)
    ]
    while len(begun) < len(asked):
        await asyncio.sleep(0.05)
        assert not any(task.done() for task in streams), "too late"
    return streams


async def test_a_frontend_that_does_not_read_costs_its_workers_little(stack: Stack) -> None:
    asked = prompts(5, 10, seed=2)
    expected = await alone(stack, asked, 1500, "other")
    asked *= 10
    before = {name: rss(stack, name) for name in stack.workers()}
    made = sum(stack.metric(n, "baton_worker_output_tokens_total") for n in stack.workers())
    async with plain_client() as client:
        streams = await all_speaking(client, stack, asked)
        stack.stop("frontend")
        stopped = time.monotonic()
        freed = await asyncio.to_thread(stack.settle, HANG_S)
        print(f"a stopped frontend's 50 streams were given up after {freed:.1f} s")
        made = sum(stack.metric(n, "baton_worker_output_tokens_total") for n in stack.workers()) - made
        assert made < len(asked) * 1500, "the streams ended by themselves: the test tests nothing"
        one = await ask(client, stack.url("other"), asked[0], 1500)
        assert one.text == expected[asked[0]], "another frontend is served meanwhile"
        await asyncio.sleep(max(0.0, stopped + 6 - time.monotonic()))
        stack.cont("frontend")
        answers = await asyncio.gather(*streams)
    for name, size in before.items():
        assert rss(stack, name) - size < GROWTH, name
    assert [(a.status, a.error, a.text) for a in answers] == [(200, {}, expected[p]) for p in asked]


async def test_a_worker_that_does_not_read_its_engine_holds_it_back(stack: Stack) -> None:
    """The worker alone is stopped; its engine goes on until nobody takes what it says."""
    asked = prompts(4, 10, seed=3)
    expected = await alone(stack, asked, 1500)
    asked *= 3
    names = stack.workers("decode", "merged")
    before = {name: rss(stack, name) for name in names}
    async with plain_client() as client:
        streams = await all_speaking(client, stack, asked)
        name = max(names, key=lambda n: stack.metric(n, "baton_worker_attempts_total"))
        psutil.Process(stack.processes[name].process.pid).suspend()
        await asyncio.sleep(8)
        size = rss(stack, name)
        psutil.Process(stack.processes[name].process.pid).resume()
        answers = await asyncio.gather(*streams)
    assert size - before[name] < GROWTH
    assert [(a.status, a.error, a.text) for a in answers] == [(200, {}, expected[p]) for p in asked]


# --- full pools and queues ---


async def test_a_full_pool_preempts_or_refuses_and_everyone_is_served_in_the_end(crowded: Stack) -> None:
    """Long prompts that fill the pool at once, and short ones that grow until it is full."""
    long, growing = prompts(12, 130, seed=4), prompts(12, 8, seed=5)
    expected = await alone(crowded, long, 40) | await alone(crowded, growing, 700)
    tries: Counter[str] = Counter()

    async def until_served(client: httpx.AsyncClient, prompt: str, tokens: int) -> Answer:
        hang = time.monotonic() + HANG_S
        while True:
            tries[prompt] += 1
            answer = await ask(client, crowded.url(), prompt, tokens)
            if answer.status == 200:
                return answer
            refused_well(answer)
            assert time.monotonic() < hang, f"never served: {prompt}"
            await asyncio.sleep(int(answer.headers["retry-after"]))

    crowded.clear_caches()
    async with plain_client() as client:
        jobs = [(p, 40) for p in long] + [(p, 700) for p in growing]
        random.Random(6).shuffle(jobs)
        answers = await asyncio.gather(*(until_served(client, prompt, tokens) for prompt, tokens in jobs))
    for (prompt, _), answer in zip(jobs, answers, strict=True):
        assert (answer.error, answer.text) == ({}, expected[prompt])
    await asyncio.sleep(1.5)  # workers show their engines' counters once a second
    preempted = sum(crowded.metric(n, "baton_worker_preemptions_total") for n in crowded.workers())
    refused = sum(tries.values()) - len(jobs)
    by_reason = crowded.metric("frontend", "baton_frontend_requests_total", outcome="no_capacity")
    print(f"full pool: {preempted:.0f} preemptions, {refused} refusals, at most {max(tries.values())} tries")
    assert preempted > 0
    assert by_reason <= refused
    crowded.settle()


async def post_raw(url: str, data: bytes) -> tuple[int, dict[str, str], dict[str, Any], float]:
    """One request on a connection of its own: status, headers, body, seconds."""
    host, _, port = url.removeprefix("http://").partition(":")
    began = time.monotonic()
    async with asyncio.timeout(HANG_S):
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            head = f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\ncontent-length: {len(data)}"
            writer.write(head.encode() + b"\r\n\r\n" + data)
            top, _, rest = (await reader.read()).partition(b"\r\n\r\n")
        finally:
            writer.close()
    lines = top.decode().split("\r\n")
    headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in lines[1:])}
    return int(lines[0].split()[1]), headers, json.loads(rest), time.monotonic() - began


async def test_two_thousand_at_once(crowded: Stack) -> None:
    """Two workers of 32 jobs each, a frontend of 1024 requests: most are refused, soon, and the rest is right."""
    asked = prompts(20, 6, seed=7)
    expected = await alone(crowded, asked, 12)
    before = {name: rss(crowded, name) for name in ("frontend", *crowded.workers())}
    began = time.monotonic()
    with probing(crowded.url(), "probes among 2000 requests") as probes:
        answers = await asyncio.gather(
            *(post_raw(crowded.url(), json.dumps(body(asked[i % 20], 12)).encode()) for i in range(2000))
        )
        took = time.monotonic() - began
    statuses = Counter(status for status, *_ in answers)
    codes = Counter(answer["error"]["code"] for status, _, answer, _ in answers if status != 200)
    refused = sorted(seconds for status, *_, seconds in answers if status != 200)
    print(f"2000 at once: {dict(statuses)}, {dict(codes)}")
    router = {n: crowded.metric("frontend", f"baton_frontend_{n}_total") for n in ("router_failures", "own_choices")}
    print(f"router calls that failed, requests placed without: {router}")
    print(f"refused within s: p50 {refused[len(refused) // 2]:.2f}, max {refused[-1]:.2f}")
    for i, (status, headers, answer, _) in enumerate(answers):
        if status == 200:
            assert answer["choices"][0]["text"] == expected[asked[i % 20]]
            assert answer["choices"][0]["finish_reason"] == "length"
        else:
            assert status in (429, 503), answer
            assert int(headers["retry-after"]) >= 1
    assert statuses[200] >= 32
    assert set(codes) <= {"no_capacity", "decode_unavailable"}
    for name, size in before.items():
        assert rss(crowded, name) - size < GROWTH, name
    not_held_up(probes, took)
    crowded.settle()


# --- large bodies ---


def large_bodies() -> dict[str, tuple[str, bytes, int, str]]:
    """27 MB of every kind: path, body, status, code."""
    head = f'{{"model":"{SERVED}",'.encode()
    text = (WORDS + " ").encode()
    message = head + b'"messages":[{"role":"user","content":"' + text * (LARGE // len(text)) + b'"}]}'
    return {
        "text": (
            "/v1/completions",
            head + b'"prompt":"' + text * (LARGE // len(text)) + b'"}',
            400,
            "context_length_exceeded",
        ),
        "token ids": (
            "/v1/completions",
            head + b'"prompt":[1' + b",123" * (LARGE // 4) + b"]}",
            400,
            "context_length_exceeded",
        ),
        "one message": ("/v1/chat/completions", message, 400, "context_length_exceeded"),
        "nesting": (
            "/v1/completions",
            head + b'"prompt":' + b"[" * 100_000 + b" " * LARGE + b"]" * 100_000 + b"}",
            400,
            "invalid_value",
        ),
        "small lists": (
            "/v1/completions",
            head + b'"prompt":[[]' + b",[]" * (LARGE // 3) + b"]}",
            400,
            "invalid_value",
        ),
        "ignored": ("/v1/completions", head + b'"prompt":"hi","user":"' + b"x" * LARGE + b'"}', 200, ""),
    }


async def test_probes_and_streams_go_on_while_large_bodies_are_read(stack: Stack) -> None:
    asked = prompts(6, 10, seed=8)
    expected = await alone(stack, asked, 300)
    before = rss(stack, "frontend")
    async with plain_client() as client:
        for kind, (path, data, status, code) in large_bodies().items():
            streams = [asyncio.create_task(ask(client, stack.url(), prompt, 300)) for prompt in asked]
            with probing(stack.url(), f"probes beside 27 MB of {kind}") as probes:
                began = time.monotonic()
                reply = await client.post(
                    f"{stack.url()}{path}", content=data, headers={"content-type": "application/json"}
                )
                took = time.monotonic() - began
                print(f"{kind}: {reply.status_code} after {took:.2f} s")
            assert reply.status_code == status, reply.text[:500]
            assert code in ("", reply.json().get("error", {}).get("code"))
            not_held_up(probes, took)
            assert not any(times["unready"] for times in probes.values()), kind
            answers = await asyncio.gather(*streams)
            assert [(a.error, a.text) for a in answers] == [({}, expected[p]) for p in asked]
    frontend = psutil.Process(stack.processes["frontend"].process.pid).memory_info().rss
    print(f"the frontend grew by {(frontend - before) / MIB:.0f} MiB")
    assert frontend - before < GROWTH


async def test_more_large_bodies_than_can_be_read_are_refused(stack: Stack) -> None:
    """Twelve of 27 MB at once: some are read, each gets its answer or a time to come back."""
    path, data, status, _ = large_bodies()["ignored"]
    began = time.monotonic()
    with probing(stack.url(), "probes beside 12 bodies of 27 MB") as probes:
        async with plain_client() as client:
            replies = await asyncio.gather(
                *(
                    client.post(f"{stack.url()}{path}", content=data, headers={"content-type": "application/json"})
                    for _ in range(12)
                )
            )
        took = time.monotonic() - began
    statuses = Counter(reply.status_code for reply in replies)
    print(f"12 large bodies: {dict(statuses)}")
    assert set(statuses) <= {status, 429}
    assert statuses[status] >= 1
    assert all(int(reply.headers["retry-after"]) >= 1 for reply in replies if reply.status_code == 429)
    not_held_up(probes, took)
