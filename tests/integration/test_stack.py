"""The whole stack on the real model, where no process is killed: what is promised of a healthy run."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.integration.asking import Answer, ask, body, openai_client, plain_client
from tests.integration.stack import HANG_S, SERVED, Stack, until
from tests.oracle import oracle as oracle_of
from tests.worker_process import ROOT

pytestmark = [pytest.mark.integration, pytest.mark.slow]

TOKENS = 64
FREED_S = 5.0
"""The promise after a disconnect is 1 s; machines that run tests are slower than that when they like."""
MESSAGES = [{"role": "user", "content": "Explain why the sky is blue, in simple words, to a child. " * 12}]
PROMPTS = [
    "The capital of France is Paris, and the capital of Italy is",
    "def fibonacci(n):\n",
    "Once upon a time, in a small village by the sea, there lived an old fisherman who",
    "Water boils at 100 degrees Celsius because",
    "List of planets in the solar system, from the sun outwards: Mercury,",
    "The quick brown fox jumps over the lazy dog. " * 9 + "Then",
    "Dear Sir or Madam,\n\nI am writing to",
    "In 1969, the first humans walked on the Moon. The mission was called Apollo 11, and its crew were "
    "Neil Armstrong, Buzz Aldrin and Michael Collins. " * 4 + "They",
]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory, model_path: Path) -> Iterator[Stack]:
    """One of each, with a second frontend that takes the disaggregated way or none."""
    run = Stack(tmp_path_factory.mktemp("stack"), model_path, frontends={"frontend": "auto", "strict": "strict"})
    run.start()
    yield run
    run.teardown()


@pytest.fixture(scope="module")
def merged(tmp_path_factory: pytest.TempPathFactory, model_path: Path) -> Iterator[Stack]:
    """Merged alone: no KV ever moves."""
    run = Stack(tmp_path_factory.mktemp("merged"), model_path, prefill=0, decode=0, kvstore=False)
    run.start()
    yield run
    run.teardown()


@pytest.fixture(autouse=True)
def _clean(stack: Stack) -> Iterator[None]:
    yield
    stack.settle()


@dataclass(frozen=True)
class Expected:
    """What transformers says: the prompt's length in tokens, and the text of the tokens that follow."""

    prompt_tokens: int
    text: str


@pytest.fixture(scope="module")
def oracle(model_path: Path) -> dict[str, Expected]:
    """transformers' greedy continuation in f32 of each of PROMPTS, weights and tokenizer read from the same file."""
    import torch
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(model_path.parent), gguf_file=model_path.name)
    model = oracle_of(model_path)
    found = {}
    with torch.inference_mode():
        for prompt in PROMPTS:
            ids = tokenizer(prompt, return_tensors="pt").input_ids
            output, past, new = model(ids, use_cache=True), None, []
            for _ in range(TOKENS):
                new.append(int(output.logits[0, -1].argmax()))
                past = output.past_key_values
                output = model(torch.tensor([[new[-1]]]), past_key_values=past, use_cache=True)
            found[prompt] = Expected(ids.shape[1], tokenizer.decode(new, skip_special_tokens=True))
    return found


async def test_official_client_is_served_disaggregated(stack: Stack) -> None:
    moved = stack.metric("decode-1", "baton_worker_transfer_bytes_total")
    async with openai_client(stack) as client:
        whole = await client.chat.completions.with_raw_response.create(
            model=SERVED, messages=MESSAGES, max_tokens=12, temperature=0
        )
        stack.clear_caches()
        streamed = await client.chat.completions.with_raw_response.create(
            model=SERVED,
            messages=MESSAGES,
            max_tokens=12,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in streamed.parse()]
    reply = whole.parse()
    told = [chunk.model_extra["baton"] for chunk in chunks if "baton" in (chunk.model_extra or {})]
    assert len(told) == 1
    for headers, story in ((whole.headers, reply.model_extra["baton"]), (streamed.headers, told[0])):
        route = headers["x-baton-route"].split("; ")
        assert route[:3] == ["disaggregated", "prefill=prefill-1", "decode=decode-1"]
        assert story["mode"] == "disaggregated"
        assert (story["prefill"], story["worker"]) == ("prefill-1", "decode-1")
        assert story["attempts"] == 1
        assert story["kv_bytes"] > 0
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == reply.choices[0].message.content != ""
    assert chunks[-1].usage == reply.usage
    assert reply.usage.completion_tokens <= 12
    total = reply.model_extra["baton"]["kv_bytes"] + told[0]["kv_bytes"]
    assert stack.metric("decode-1", "baton_worker_transfer_bytes_total") - moved == total
    assert stack.metric("frontend", "baton_frontend_kv_bytes_total") >= total


async def test_disaggregated_equals_transformers(stack: Stack, oracle: dict[str, Expected]) -> None:
    computed = stack.metric("decode-1", "baton_worker_prefill_tokens_computed_total")
    for answer in await _alone_and_together(stack.url("strict"), oracle):
        assert answer.route.startswith("disaggregated")
        assert answer.story["mode"] == "disaggregated"
    # The gauges follow once a second.
    until(lambda: stack.metric("decode-1", "baton_worker_running") == 0)
    await asyncio.sleep(1.5)
    assert stack.metric("decode-1", "baton_worker_prefill_tokens_computed_total") == computed
    assert stack.metric("prefill-1", "baton_worker_prefill_tokens_computed_total") > 0


async def test_merged_equals_transformers(merged: Stack, oracle: dict[str, Expected]) -> None:
    for answer in await _alone_and_together(merged.url(), oracle):
        assert answer.route.startswith("merged")
        assert answer.story["kv_bytes"] == 0


async def _alone_and_together(url: str, oracle: dict[str, Expected]) -> list[Answer]:
    async with plain_client() as client:
        alone = [await ask(client, url, prompt, TOKENS) for prompt in PROMPTS]
        together = await asyncio.gather(*(ask(client, url, prompt, TOKENS) for prompt in PROMPTS))
    for answers in (alone, together):
        for prompt, answer in zip(PROMPTS, answers, strict=True):
            assert answer.text == oracle[prompt].text
            assert answer.finish == "length"
            assert answer.usage["completion_tokens"] == TOKENS
            assert answer.usage["prompt_tokens"] == oracle[prompt].prompt_tokens
    return [*alone, *together]


async def test_200_concurrent_streams_all_complete_none_mixed(stack: Stack, merged: Stack) -> None:
    prompts = [f"Number {n * 7919 % 1000}, then {n * 104729 % 997}: write the next numbers.\n{n}," for n in range(200)]
    few = asyncio.Semaphore(8)
    async with plain_client() as client:

        async def expected(prompt: str) -> str:
            async with few:
                return (await ask(client, merged.url(), prompt, 6)).text

        wanted = await asyncio.gather(*map(expected, prompts))
        answers = await asyncio.gather(*(ask(client, stack.url(), prompt, 6) for prompt in prompts))
    assert len(set(wanted)) > 100, "the prompts would not show a mix-up"
    assert [a.error for a in answers if a.error] == []
    assert [(a.text, a.usage["completion_tokens"]) for a in answers] == [(text, 6) for text in wanted]


@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize("moment", ["prefill", "decode"])
def test_client_that_leaves_frees_everything(stack: Stack, streamed: bool, moment: str) -> None:
    """A request that would run for long is gone everywhere soon after its client is."""
    stack.clear_caches()
    host, port = stack.processes["strict"].address.rsplit(":", 1)
    prompt = "A long story about the sea and the wind, told by many voices. " * (110 if moment == "prefill" else 8)
    produced = stack.metric("decode-1", "baton_worker_output_tokens_total")
    disconnects = stack.metric("strict", "baton_frontend_disconnects_total")
    with socket.create_connection((host, int(port)), timeout=HANG_S) as client:
        client.sendall(_http_post(body(prompt, 500, stream=streamed)))
        if moment == "prefill":
            until(lambda: "prefill-1" in stack.findings())
        else:
            until(lambda: stack.metric("decode-1", "baton_worker_output_tokens_total") >= produced + 5)
            if streamed:
                assert client.recv(65536).startswith(b"HTTP/1.1 200 OK")
        assert "decode-1" in stack.findings()
    stack.settle(FREED_S)
    assert stack.metric("strict", "baton_frontend_disconnects_total") == disconnects + 1
    assert stack.metric("decode-1", "baton_worker_output_tokens_total") < produced + 400
    for name in stack.workers():
        until(lambda name=name: stack.metric(name, "baton_worker_running") == 0)
        assert stack.metric(name, "baton_worker_leases") == 0


def _http_post(content: dict[str, object]) -> bytes:
    import orjson

    data = orjson.dumps(content)
    head = f"POST /v1/completions HTTP/1.1\r\nhost: baton\r\ncontent-length: {len(data)}\r\n\r\n"
    return head.encode() + data


async def test_stop_strings_never_leak(stack: Stack) -> None:
    """Whatever stop string is cut out of the text, what comes is exactly what lies before it."""
    prompt = PROMPTS[2]
    async with plain_client() as client:
        whole = (await ask(client, stack.url(), prompt, 40)).text
        # One token, a part of one, across tokens, and one whose beginning appears before it.
        for begin, length in ((10, 1), (24, 3), (37, 9), (60, 25)):
            stop = whole[begin : begin + length]
            answer = await ask(client, stack.url(), prompt, 40, stop=[stop, "never to be seen"])
            assert answer.text == whole[: whole.index(stop)], stop
            assert answer.finish == "stop"
            reply = await client.post(f"{stack.url()}/v1/completions", json=body(prompt, 40, stop=stop))
            assert reply.json()["choices"][0]["text"] == whole[: whole.index(stop)]
        # A stop string that begins at the very end and never completes is not held back for ever.
        almost = await ask(client, stack.url(), prompt, 40, stop=whole[-3:] + "\0")
        assert almost.text == whole
        assert almost.finish == "length"


@pytest.mark.parametrize("role", ["frontend", "router", "kvstore"])
def test_port_in_use_is_one_clear_line(stack: Stack, model_path: Path, role: str) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        port = str(held.getsockname()[1])
        flags = ["--port", port, "--etcd", stack.etcd.address, "--cluster", "elsewhere"]
        flags += ["--model", str(model_path)] if role == "frontend" else []
        ended = subprocess.run(
            [sys.executable, "-m", f"services.{role}", *flags],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
            env={**os.environ, **stack.mark},
        )
    assert ended.returncode != 0
    assert "Traceback" not in ended.stderr
    assert [line for line in ended.stderr.splitlines() if port in line and "in use" in line], ended.stderr
