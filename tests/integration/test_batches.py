"""Files and batches over real processes: the official client, every way to get one wrong, and kill -9 in its middle."""

from __future__ import annotations

import asyncio
import json
import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI

from tests.integration.asking import KEY
from tests.integration.stack import HANG_S, SERVED, Stack, until
from tests.tiny_model import make_tiny_model
from tests.worker_process import WorkerProcess

pytestmark = [pytest.mark.integration, pytest.mark.slow]

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RESPONSES, EMBEDDINGS = "/v1/responses", "/v1/embeddings"
MONTH_S = 30 * 24 * 3600
Lines = list[dict[str, Any]]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory, api_keys: Path) -> Iterator[Stack]:
    """One of each worker, and a frontend with a key and a directory that holds little."""
    directory = tmp_path_factory.mktemp("batches")
    model = make_tiny_model(directory / "tiny", layers=2, context=1024)
    http = {
        "api_keys_file": api_keys,
        "batch_dir": directory / "kept",
        "max_file_bytes": 4 << 20,
        "batch_dir_bytes": 8 << 20,
    }
    run = Stack(directory, model, kvstore=False, http=http)
    run.start()
    yield run
    run.teardown()


def line(n: int, *, tokens: int = 6, url: str = COMPLETIONS, **body: Any) -> dict[str, Any]:
    asked = {"prompt": f"Line {n}."} if url == COMPLETIONS else {"messages": [{"role": "user", "content": f"{n}?"}]}
    body = {"model": SERVED, "max_tokens": tokens, "seed": n, **asked, **body}
    return {"custom_id": f"line-{n}", "method": "POST", "url": url, "body": body}


def text_of(lines: Lines) -> bytes:
    return "".join(json.dumps(one) + "\n" for one in lines).encode()


def alike(one: Any, other: Any) -> bool:
    """The same, but for the last bits of log probabilities: who else was in a step changes them."""
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, abs_tol=1e-3)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(alike(one[name], other[name]) for name in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(alike, one, other))
    return bool(one == other)


async def start(client: AsyncOpenAI, lines: Lines | bytes, endpoint: Any = COMPLETIONS) -> Any:
    data = lines if isinstance(lines, bytes) else text_of(lines)
    file = await client.files.create(file=("in.jsonl", data), purpose="batch")
    return await client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h")


async def ended(client: AsyncOpenAI, id: str) -> Any:
    async with asyncio.timeout(HANG_S):
        while True:
            batch = await client.batches.retrieve(id)
            if batch.status in ("completed", "failed", "expired", "cancelled"):
                return batch
            await asyncio.sleep(0.05)


async def results(client: AsyncOpenAI, id: str | None) -> dict[str, Any]:
    """By custom id: each is there once."""
    if id is None:
        return {}
    found = [json.loads(one) for one in (await client.files.content(id)).text.splitlines()]
    assert max(Counter(one["custom_id"] for one in found).values()) == 1
    return {one["custom_id"]: one for one in found}


async def refused(client: AsyncOpenAI, data: bytes, endpoint: Any = COMPLETIONS) -> list[tuple[Any, Any, Any]]:
    """(code, line, param) of a batch that cannot be."""
    batch = await ended(client, (await start(client, data, endpoint)).id)
    assert batch.status == "failed"
    assert batch.output_file_id is None
    assert batch.request_counts.completed == batch.request_counts.failed == 0
    await client.files.delete(batch.input_file_id)
    return [(error.code, error.line, error.param) for error in batch.errors.data]


# ---- what it is for


@pytest.mark.parametrize("url", [CHAT, COMPLETIONS])
async def test_the_official_client_runs_a_batch(client: AsyncOpenAI, url: str) -> None:
    """What a line says is what the same request says by itself; a line that is wrong fails alone."""
    lines = [line(n, url=url, logprobs=n % 2 if url == COMPLETIONS else bool(n % 2)) for n in range(12)]
    lines[3]["body"]["temperature"] = 9
    lines[4]["body"]["model"] = "another"
    lines[5]["body"]["stream"] = True
    data = text_of(lines)
    file = await client.files.create(
        file=("in.jsonl", data), purpose="batch", expires_after={"anchor": "created_at", "seconds": 7200}
    )
    assert file.expires_at == file.created_at + 7200
    assert (file.bytes, file.filename, file.purpose, file.status) == (len(data), "in.jsonl", "batch", "processed")
    assert file.model_dump()["baton"]["lines"] == 12
    assert (await client.files.content(file.id)).content == data
    asked: Any = {"input_file_id": file.id, "endpoint": url, "completion_window": "24h", "metadata": {"of": "mine"}}
    asked |= {"output_expires_after": {"anchor": "created_at", "seconds": 3600}}
    batch = await client.batches.create(**asked)
    assert batch.status in ("validating", "in_progress")
    batch = await ended(client, batch.id)
    assert batch.status == "completed", batch
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (12, 9, 3)
    assert batch.metadata == {"of": "mine"}
    assert batch.created_at <= batch.in_progress_at <= batch.finalizing_at <= batch.completed_at < batch.expires_at
    good, bad = await results(client, batch.output_file_id), await results(client, batch.error_file_id)
    assert set(good) | set(bad) == {one["custom_id"] for one in lines}
    usages = [one["response"]["body"]["usage"] for one in good.values()]
    assert batch.model == SERVED
    assert batch.usage is not None
    assert batch.usage.input_tokens == sum(one["prompt_tokens"] for one in usages) > 0
    assert batch.usage.output_tokens == sum(one["completion_tokens"] for one in usages) > 0
    assert batch.usage.total_tokens == batch.usage.input_tokens + batch.usage.output_tokens
    told = {
        name: (one["response"]["status_code"], one["response"]["body"]["error"]["param"]) for name, one in bad.items()
    }
    assert told == {"line-3": (400, "temperature"), "line-4": (404, "model"), "line-5": (400, "stream")}
    for n in (0, 7):
        answer = good[f"line-{n}"]["response"]
        assert answer["status_code"] == 200
        assert answer["request_id"]
        body = lines[n]["body"]
        alone = await (client.chat.completions if url == CHAT else client.completions).create(**body)
        assert alike(answer["body"]["choices"], json.loads(alone.model_dump_json(exclude_unset=True))["choices"])
        assert answer["body"]["usage"]["completion_tokens"] == alone.usage.completion_tokens
    listed = await client.batches.list(limit=1)
    assert [one.id for one in listed.data] == [batch.id]
    output = await client.files.retrieve(batch.output_file_id or "")
    assert output.purpose == "batch_output"
    assert output.expires_at == output.created_at + 3600
    assert (await client.files.delete(file.id)).deleted
    with pytest.raises(openai.NotFoundError):
        await client.files.content(file.id)


async def test_lists_come_in_pages(client: AsyncOpenAI) -> None:
    files = [await client.files.create(file=("x", b"x"), purpose="batch") for _ in range(5)]
    batches = [
        await client.batches.create(input_file_id=f.id, endpoint="/v1/completions", completion_window="24h")
        for f in files
    ]
    paged = [file.id async for file in client.files.list(limit=2, purpose="batch")]
    assert {f.id for f in files} <= set(paged)
    assert len(paged) == len(set(paged))
    newest = [b.id for b in reversed(batches)]
    assert [batch.id async for batch in client.batches.list(limit=2)][: len(newest)] == newest
    with pytest.raises(openai.BadRequestError):
        await client.batches.list(limit=0)
    with pytest.raises(openai.BadRequestError):
        await client.batches.list(after="batch_nobody")
    for batch in batches:
        assert (await ended(client, batch.id)).status == "failed"


# ---- what can be wrong


async def test_a_file_is_checked_before_anything_runs(client: AsyncOpenAI) -> None:
    good = text_of([line(0)])
    assert await refused(client, b"") == [("empty_file", None, None)]
    assert await refused(client, good + b"{\n" + b"[]\n") == [
        ("invalid_json_line", 2, None),
        ("invalid_value", 3, None),
    ]
    assert await refused(client, good + b"\n" + good) == [("duplicate_custom_id", 3, "custom_id")]
    broken = [line(1) | {"method": "GET"}, line(2) | {"url": "/v1/models"}, line(3, url=CHAT), line(4) | {"body": 7}]
    missing = [{k: v for k, v in line(5).items() if k != name} for name in ("custom_id", "body")]
    assert await refused(client, text_of([*broken, *missing])) == [
        ("invalid_method", 1, "method"),
        ("invalid_url", 2, "url"),
        ("mismatched_url", 3, "url"),
        ("invalid_value", 4, "body"),
        ("missing_required_parameter", 5, "custom_id"),
        ("missing_required_parameter", 6, "body"),
    ]
    many = b"".join(
        b'{"custom_id":"%d","method":"POST","url":"/v1/completions","body":{}}\n' % n for n in range(50_001)
    )
    assert await refused(client, many) == [("too_many_requests", 50_001, "input_file_id")]
    assert await refused(client, b"x" * (2 << 20)) == [("line_too_long", 1, None)]


async def test_requests_for_files_and_batches_are_checked(client: AsyncOpenAI, http: httpx.AsyncClient) -> None:
    async def told(answer: httpx.Response) -> tuple[int, str, str | None]:
        error = answer.json()["error"]
        return answer.status_code, error["code"], error["param"]

    async def post(**body: Any) -> tuple[int, str, str | None]:
        right = {"input_file_id": "file-" + 24 * "0", "endpoint": COMPLETIONS, "completion_window": "24h"}
        return await told(await http.post("/v1/batches", json=right | body))

    file = {"file": ("x.jsonl", b"{}\n")}
    assert await post() == (404, "not_found", "input_file_id")
    assert await post(input_file_id=7) == (400, "invalid_value", "input_file_id")
    for endpoint in ("/v1/models", {}, [], None, 7):
        assert await post(endpoint=endpoint) == (400, "invalid_value", "endpoint")
    assert await post(completion_window="1h") == (400, "invalid_value", "completion_window")
    assert await post(metadata={"a": 1}) == (400, "invalid_value", "metadata")
    early = {"anchor": "created_at", "seconds": 60}
    assert await post(output_expires_after=early) == (400, "invalid_value", "output_expires_after.seconds")
    form = {"purpose": "batch"} | {f"expires_after[{name}]": str(value) for name, value in early.items()}
    answer = await http.post("/v1/files", files=file, data=form)
    assert await told(answer) == (400, "invalid_value", "expires_after[seconds]")
    for path in ("/v1/files/file-x", "/v1/files/..%2Flock", "/v1/files/file-x/content", "/v1/batches/batch_x"):
        assert (await told(await http.get(path)))[:2] == (404, "not_found")
    assert (await told(await http.post("/v1/batches/batch_x/cancel")))[:2] == (404, "not_found")
    assert await told(await http.post("/v1/files", files=file)) == (400, "invalid_value", "purpose")
    for purpose in ("fine-tune", "assistants"):
        answer = await http.post("/v1/files", files=file, data={"purpose": purpose})
        assert await told(answer) == (400, "invalid_value", "purpose")
    answer = await http.post("/v1/files", files={"other": b"x"}, data={"purpose": "batch"})
    assert await told(answer) == (400, "invalid_value", "file")
    assert (await told(await http.post("/v1/files", json={"purpose": "batch"})))[0] == 415
    form = {"content-type": "multipart/form-data; boundary=b"}
    for body in (b"", b"--b\r\nnothing", b"--b\r\ncontent-disposition: form-data; name=file\r\n\r\nhalf"):
        assert (await told(await http.post("/v1/files", content=body, headers=form)))[0] == 400
    answer = await http.post("/v1/files", files={"file": b"x" * (5 << 20)}, data={"purpose": "batch"})
    assert await told(answer) == (413, "request_too_large", "file")
    async with httpx.AsyncClient(base_url=http.base_url, trust_env=False) as nobody:
        assert (await nobody.get("/v1/files")).status_code == 401
        assert (await nobody.post("/v1/files", files=file, data={"purpose": "batch"})).status_code == 401
        assert (await nobody.get("/v1/batches")).status_code == 401


async def test_an_output_cannot_be_an_input(client: AsyncOpenAI) -> None:
    batch = await ended(client, (await start(client, [line(0)])).id)
    with pytest.raises(openai.BadRequestError) as caught:
        await client.batches.create(
            input_file_id=batch.output_file_id, endpoint="/v1/completions", completion_window="24h"
        )
    assert caught.value.param == "input_file_id"


async def test_there_is_room_for_so_much_and_deleting_makes_more(client: AsyncOpenAI, stack: Stack) -> None:
    for file in [file async for file in client.files.list()]:
        await client.files.delete(file.id)
    assert stack.metric("frontend", "baton_frontend_file_bytes") == 0
    kept = [await client.files.create(file=("x", b"x" * (3 << 20)), purpose="batch") for _ in range(2)]
    with pytest.raises(openai.BadRequestError) as caught:
        await client.files.create(file=("x", b"x" * (3 << 20)), purpose="batch")
    assert caught.value.code == "storage_full"
    assert len([file async for file in client.files.list()]) == 2
    for file in kept:
        await client.files.delete(file.id)
    assert stack.metric("frontend", "baton_frontend_file_bytes") == 0


async def test_results_that_do_not_fit_fail_the_batch_and_nothing_else(client: AsyncOpenAI, stack: Stack) -> None:
    sizes = (4 << 20, (4 << 20) - 40_000)
    fills = [await client.files.create(file=("x", b"x" * size), purpose="batch") for size in sizes]
    batch = await ended(client, (await start(client, [line(n) for n in range(100)])).id)
    assert batch.status == "failed"
    assert [error.code for error in batch.errors.data] == ["storage_full"]
    good = await results(client, batch.output_file_id)
    assert 0 < len(good) == batch.request_counts.completed < 100, "what was done is there"
    assert (await client.completions.create(model=SERVED, prompt="x", max_tokens=2)).choices
    for file in fills:
        await client.files.delete(file.id)
    assert (await ended(client, (await start(client, [line(n) for n in range(3)])).id)).status == "completed"
    stack.settle()


# ---- cancel, delete, restart


async def test_a_cancelled_batch_keeps_what_is_done(client: AsyncOpenAI, stack: Stack) -> None:
    lines = [line(n, tokens=2 if n < 5 else 900, ignore_eos=True) for n in range(200)]
    batch = await start(client, lines)
    async with asyncio.timeout(HANG_S):
        while True:
            if (await client.batches.retrieve(batch.id)).request_counts.completed:
                break
            await asyncio.sleep(0.02)
    with pytest.raises(openai.ConflictError) as caught:
        await client.files.delete(batch.input_file_id)
    assert caught.value.code == "file_in_use"
    assert (await client.batches.cancel(batch.id)).status in ("cancelling", "cancelled")
    batch = await ended(client, batch.id)
    assert batch.status == "cancelled"
    assert batch.cancelled_at
    good, bad = await results(client, batch.output_file_id), await results(client, batch.error_file_id)
    assert len(good) == batch.request_counts.completed >= 1
    assert batch.request_counts.failed == 0
    assert len(good) + len(bad) == 200
    assert {one["error"]["code"] for one in bad.values()} == {"batch_cancelled"}
    with pytest.raises(openai.BadRequestError):
        await client.batches.cancel(batch.id)
    assert (await client.files.delete(batch.input_file_id)).deleted
    stack.settle()


@pytest.mark.parametrize("how", ["kill", "terminate"])
def test_a_batch_goes_on_after_a_restart_with_no_line_lost_or_doubled(stack: Stack, how: str) -> None:
    lines = [line(n, tokens=24, ignore_eos=True, temperature=0) for n in range(150)]

    def client() -> openai.OpenAI:
        return openai.OpenAI(
            base_url=f"{stack.url()}/v1", api_key=KEY, http_client=httpx.Client(trust_env=False, timeout=HANG_S)
        )

    with client() as api:
        file = api.files.create(file=("in.jsonl", text_of(lines)), purpose="batch")
        batch = api.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
        for part in (10, 60):
            until(lambda api=api, part=part: api.batches.retrieve(batch.id).request_counts.completed >= part)
            if how == "kill":
                stack.kill("frontend")
            else:
                stack.terminate("frontend")
                assert stack.processes["frontend"].process.wait(HANG_S) == 0
            stack.launch("frontend").wait_ready()
            before = api.batches.retrieve(batch.id)
            assert before.status == "in_progress", "it is not over, and nothing that was done is lost"
            assert part <= before.request_counts.completed < 150
        until(lambda: api.batches.retrieve(batch.id).status == "completed")
        batch = api.batches.retrieve(batch.id)
        assert (batch.request_counts.completed, batch.request_counts.failed) == (150, 0)
        assert batch.usage is not None
        assert batch.usage.output_tokens == 150 * 24
        found = [json.loads(one) for one in api.files.content(batch.output_file_id or "").text.splitlines()]
        assert sorted(one["custom_id"] for one in found) == sorted(one["custom_id"] for one in lines)
        assert all(one["response"]["body"]["usage"]["completion_tokens"] == 24 for one in found)
    stack.wait_usable()
    stack.settle()


def test_a_directory_is_one_frontends(stack: Stack, tmp_path: Path) -> None:
    role, flags = stack._plan["frontend"]
    second = WorkerProcess(role, "second", tmp_path, stack.mark, **{**flags, "port": 0})
    try:
        assert second.process.wait(HANG_S) != 0
        assert "another frontend's" in second.log()
    finally:
        second.stop()


async def test_embeddings_are_lines_too(stack: Stack, client: AsyncOpenAI) -> None:
    """As the same request gives by itself; a line that is wrong fails alone."""
    inputs: list[Any] = [f"Line {n}." * (n + 1) for n in range(10)] + [["several", "inputs"], [5, 6, 7]]
    bodies = [{"model": SERVED, "input": one, "encoding_format": "float"} for one in inputs]
    bodies += [{"model": SERVED, "input": "x", "dimensions": 4}, {"model": SERVED, "input": ""}]
    made = [
        {"custom_id": f"line-{n}", "method": "POST", "url": EMBEDDINGS, "body": body} for n, body in enumerate(bodies)
    ]
    batch = await ended(client, (await start(client, made, EMBEDDINGS)).id)
    counts = batch.request_counts
    assert (batch.status, counts.completed, counts.failed) == ("completed", 13, 1), batch
    for id in (batch.input_file_id, batch.output_file_id, batch.error_file_id):
        file = await client.files.retrieve(id)
        assert file.expires_at == file.created_at + MONTH_S, "as nothing was said"
    good, bad = [await results(client, id) for id in (batch.output_file_id, batch.error_file_id)]
    assert bad["line-13"]["response"]["body"]["error"]["param"] == "input"
    for n, body in enumerate(bodies[:-1]):
        answered = good[f"line-{n}"]["response"]["body"]
        alone = (await client.post("/embeddings", body=body, cast_to=httpx.Response)).json()
        assert alike(answered, alone)
        assert answered["usage"] == alone["usage"]
    assert batch.usage.input_tokens == sum(one["response"]["body"]["usage"]["prompt_tokens"] for one in good.values())
    assert await refused(client, text_of([made[0], line(1)]), EMBEDDINGS) == [("mismatched_url", 2, "url")]
    stack.settle()


async def test_responses_are_lines_too(stack: Stack, client: AsyncOpenAI) -> None:
    """As the same request gives by itself, but that they are not kept; a line that is wrong fails alone."""
    kept = await client.responses.create(model=SERVED, input="First.", max_output_tokens=8)
    more: list[dict[str, Any]] = [
        {},
        {"input": [{"role": "user", "content": "Listed."}], "instructions": "Be brief.", "metadata": {"of": "mine"}},
        {"include": ["message.output_text.logprobs"], "top_logprobs": 2},
        {"previous_response_id": kept.id},
        {"store": True},
        {"temperature": 9},
        {"stream": True},
        {"background": True},
        {"previous_response_id": "resp_" + 24 * "0"},
        {"input": None},
    ]
    bodies = [{"model": SERVED, "input": f"Line {n}.", "max_output_tokens": 6, "temperature": 0} for n in range(10)]
    bodies = [body | one for body, one in zip(bodies, more, strict=True)]
    made = [
        {"custom_id": f"line-{n}", "method": "POST", "url": RESPONSES, "body": body} for n, body in enumerate(bodies)
    ]
    batch = await ended(client, (await start(client, made, RESPONSES)).id)
    counts = batch.request_counts
    assert (batch.status, counts.completed, counts.failed) == ("completed", 5, 5), batch
    good, bad = [await results(client, id) for id in (batch.output_file_id, batch.error_file_id)]
    blamed = {name: one["response"]["body"]["error"]["param"] for name, one in bad.items()}
    names = ("temperature", "stream", "background", "previous_response_id", "input")
    assert blamed == {f"line-{n}": name for n, name in enumerate(names, 5)}
    own = ("id", "created_at", "completed_at", "baton", "output", "store", "usage")
    for n, body in enumerate(bodies[:5]):
        answered = good[f"line-{n}"]["response"]["body"]
        alone = (await client.post("/responses", body=body, cast_to=httpx.Response)).json()
        assert {k: v for k, v in answered.items() if k not in own} == {k: v for k, v in alone.items() if k not in own}
        assert alike([item["content"] for item in answered["output"]], [item["content"] for item in alone["output"]])
        assert answered["usage"]["total_tokens"] == alone["usage"]["total_tokens"]
        assert answered["store"] is False
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(answered["id"])
    usages = [one["response"]["body"]["usage"] for one in good.values()]
    assert batch.usage.input_tokens == sum(one["input_tokens"] for one in usages)
    assert batch.usage.output_tokens == sum(one["output_tokens"] for one in usages)
    stack.settle()


# ---- beside others


async def test_others_come_first(stack: Stack, client: AsyncOpenAI) -> None:
    """While somebody is served, lines stand still on every other worker; then they go on, and say what they would."""
    lines = [line(n, tokens=400, ignore_eos=True, temperature=0) for n in range(48)]
    batch = await start(client, lines)
    workers = stack.workers("decode", "merged")
    until(lambda: all(stack.metric(name, "baton_worker_batch_running") for name in workers))
    pauses = stack.metric("frontend", "baton_frontend_batch_pauses_total", result="told")
    before = {name: stack.metric(name, "baton_worker_output_tokens_total") for name in workers}
    said = await client.completions.create(
        model=SERVED, prompt="x", max_tokens=400, temperature=0, extra_body={"ignore_eos": True}
    )
    after = {name: stack.metric(name, "baton_worker_output_tokens_total") for name in workers}
    assert said.usage is not None
    assert said.usage.completion_tokens == 400
    # Alone a dozen lines on each of two workers give a token each in a step. Where somebody is served some may go on.
    gave = sorted(after[name] - before[name] for name in workers)
    assert gave[0] < 2 * 400, "who serves nobody else has paused"
    assert gave[1] < 9 * 400
    assert stack.metric("frontend", "baton_frontend_batch_pauses_total", result="told") > pauses
    batch = await ended(client, batch.id)
    assert batch.request_counts.completed == 48
    good = await results(client, batch.output_file_id)
    for n in (0, 7, 47):
        body = {name: value for name, value in lines[n]["body"].items() if name != "ignore_eos"}
        alone = await client.completions.create(**body, extra_body={"ignore_eos": True})
        assert good[f"line-{n}"]["response"]["body"]["choices"][0]["text"] == alone.choices[0].text
    assert all(one["response"]["body"]["usage"]["completion_tokens"] == 400 for one in good.values())
    stack.settle()


async def test_embeddings_give_way_to_others(stack: Stack, client: AsyncOpenAI) -> None:
    """While somebody is served they pause; then they go on."""
    bodies = [{"model": SERVED, "input": [[n + 1] * 500 for _ in range(16)]} for n in range(40)]
    made = [
        {"custom_id": f"line-{n}", "method": "POST", "url": EMBEDDINGS, "body": body} for n, body in enumerate(bodies)
    ]
    batch = await start(client, made, EMBEDDINGS)
    until(lambda: stack.metric("frontend", "baton_frontend_batch_running"))
    pauses = stack.metric("frontend", "baton_frontend_batch_pauses_total", result="told")
    said = await client.completions.create(
        model=SERVED, prompt="x", max_tokens=200, temperature=0, extra_body={"ignore_eos": True}
    )
    assert said.usage is not None
    assert said.usage.completion_tokens == 200
    assert stack.metric("frontend", "baton_frontend_batch_pauses_total", result="told") > pauses
    until(lambda: stack.metric("frontend", "baton_frontend_batch_running"))
    await client.batches.cancel(batch.id)
    assert (await ended(client, batch.id)).status == "cancelled"
    stack.settle()


def test_without_a_directory_there_are_none(stack: Stack, tmp_path: Path) -> None:
    role, flags = stack._plan["frontend"]
    none = {name: flag for name, flag in flags.items() if name != "batch_dir"}
    with WorkerProcess(role, "none", tmp_path, stack.mark, **{**none, "port": 0}) as plain:
        headers = {"authorization": f"Bearer {KEY}"}
        for path in ("/v1/files", "/v1/batches"):
            answer = httpx.get(f"http://{plain.address}{path}", headers=headers, trust_env=False)
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")
            assert "--batch-dir" in answer.json()["error"]["message"]
