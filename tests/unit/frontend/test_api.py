"""The official client against the real app, with a scripted worker behind it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest

from baton.errors import BatonError, Reason
from baton.model.card import Model
from baton.v1 import registry_pb2, worker_pb2
from tests.unit.frontend.peers import HANG_S, Attempt, ScriptedWorker, Stack, running, until

EOS = 2
HI: list[Any] = [{"role": "user", "content": "hi"}]
TEXT = "Hello 😀 wörld, this is a test."

pytestmark = pytest.mark.timeout(60)


def says(model: Model, text: str = TEXT, *, eos: bool = True, pause_s: float = 0.0) -> Any:
    """A script: every choice says `text`."""
    ids = model.tokenizer.encode(text, add_special=False) + ([EOS] if eos else [])

    async def script(attempt: Attempt) -> None:
        for choice in attempt.message.choices:
            await attempt.play(ids, choice=choice, finish="stop" if eos else "length", pause_s=pause_s)

    return script


def budget(model: Model, text: str) -> int:
    """The `max_tokens` that ends an answer after `text`."""
    return len(model.tokenizer.encode(text, add_special=False))


@pytest.fixture
async def stack(model: Model) -> AsyncIterator[Stack]:
    async with running(model, ScriptedWorker("merged-1", says(model))) as stack:
        yield stack


def client(stack: Stack) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="x", max_retries=0, timeout=HANG_S)


async def test_chat_whole(stack: Stack, model: Model) -> None:
    raw = await client(stack).chat.completions.with_raw_response.create(model=model.name, messages=HI)
    answer = raw.parse()
    assert answer.choices[0].message.content == TEXT
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len(model.tokenizer.encode(TEXT, add_special=False)) + 1
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert raw.headers["x-baton-route"] == "merged; worker=merged-1; reasons=MERGED_CHEAPEST"
    assert raw.headers["x-request-id"]
    extra = answer.model_extra or {}
    assert extra["baton"] == {
        "mode": "merged",
        "reasons": ["MERGED_CHEAPEST"],
        "attempts": 1,
        "kv_bytes": 1000,
        "store": "",
        "stored_tokens": 0,
        "cached_tokens": 0,
        "worker": "merged-1",
        "prefill": "",
    }


async def test_a_fault_of_ours_names_the_request(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(stack.frontend.readiness, "missing", missing)
    async with httpx.AsyncClient(timeout=HANG_S) as http:
        told = await http.get(f"{stack.url}/ready", headers={"x-request-id": "mine"})
        made = await http.get(f"{stack.url}/ready")
    assert (told.status_code, told.json()["error"]["code"]) == (500, "internal_error")
    assert told.headers["x-request-id"] == "mine"
    assert made.headers["x-request-id"].startswith("req_")


async def test_chat_stream(stack: Stack, model: Model) -> None:
    stream = await client(stack).chat.completions.create(
        model=model.name, messages=HI, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].delta.role for c in chunks[1:-1]] == [None] * (len(chunks) - 2)
    texts = [c.choices[0].delta.content or "" for c in chunks[:-1]]
    assert "".join(texts) == TEXT
    assert len(texts) > 5
    assert not any("\ufffd" in text for text in texts)
    assert [c.choices[0].finish_reason for c in chunks[:-1]] == [None] * (len(chunks) - 2) + ["stop"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert all(c.usage is None and "usage" in c.model_fields_set for c in chunks[:-1])
    assert (chunks[-1].model_extra or {})["baton"]["mode"] == "merged"
    assert len({c.id for c in chunks}) == 1


async def test_sse_framing_ends_with_done_and_the_story_is_in_the_last_chunk(stack: Stack, model: Model) -> None:
    async with httpx.AsyncClient(timeout=HANG_S) as http:
        body = {"model": model.name, "messages": HI, "stream": True}
        response = await http.post(f"{stack.url}/v1/chat/completions", json=body, headers={"x-request-id": "mine"})
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["x-request-id"] == "mine"
    events = response.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    last = json.loads(events[-3].removeprefix("data: "))
    assert last["baton"]["attempts"] == 1
    assert last["choices"][0]["finish_reason"] == "stop"
    assert "usage" not in last
    assert all("baton" not in json.loads(e.removeprefix("data: ")) for e in events[:-3])


async def test_several_choices(stack: Stack, model: Model) -> None:
    answer = await client(stack).chat.completions.create(model=model.name, messages=HI, n=3)
    assert [c.index for c in answer.choices] == [0, 1, 2]
    assert [c.message.content for c in answer.choices] == [TEXT] * 3
    stream = await client(stack).chat.completions.create(model=model.name, messages=HI, n=3, stream=True)
    texts, roles, ends = [""] * 3, [0] * 3, [0] * 3
    async for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            roles[choice.index] += choice.delta.role is not None
            ends[choice.index] += choice.finish_reason is not None
    assert (texts, roles, ends) == ([TEXT] * 3, [1] * 3, [1] * 3)


async def test_stop_strings_end_the_attempt_and_never_leak(stack: Stack, model: Model) -> None:
    stack.workers[0].script = says(model, pause_s=0.01)
    stream = await client(stack).chat.completions.create(
        model=model.name, messages=HI, stream=True, stop=["rld, th", "zzz"]
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == "Hello 😀 wö"
    assert chunks[-1].choices[0].finish_reason == "stop"
    async with asyncio.timeout(HANG_S):
        await stack.workers[0].attempts[0].aborted.wait()


async def test_sampling_reaches_the_worker(stack: Stack, model: Model) -> None:
    await client(stack).chat.completions.create(
        model=model.name,
        messages=HI,
        temperature=0.5,
        top_p=0.9,
        seed=-5,
        max_completion_tokens=100,
        presence_penalty=1.0,
        frequency_penalty=-1.0,
        logit_bias={"7": 5},
        logprobs=True,
        top_logprobs=2,
        extra_body={"top_k": 4, "min_p": 0.1, "repetition_penalty": 1.1, "min_tokens": 3, "ignore_eos": True,
                    "stop_token_ids": [9]},
    )  # fmt: skip
    submit = stack.workers[0].attempts[0].submit
    sampling = submit.attempt.sampling
    assert sampling.seed == (1 << 64) - 5
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.9, 4, 0.1)
    assert (sampling.max_tokens, sampling.min_tokens, sampling.ignore_eos) == (100, 3, True)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (1.0, -1.0, 1.1)
    assert dict(sampling.logit_bias) == {7: 5.0}
    assert list(sampling.stop_token_ids) == [9]
    assert sampling.logprobs == 2
    assert submit.card == model.card
    assert submit.attempt.key_root == model.key_root()
    prompt = model.template.render(HI)
    assert list(submit.attempt.prompt_ids) == model.tokenizer.encode(prompt, add_special=False)


async def test_without_a_seed_one_is_made_and_budgets_fill_the_context(stack: Stack, model: Model) -> None:
    await client(stack).chat.completions.create(model=model.name, messages=HI)
    await client(stack).chat.completions.create(model=model.name, messages=HI)
    first, second = (attempt.message for attempt in stack.workers[0].attempts)
    assert first.sampling.seed != second.sampling.seed
    assert first.sampling.max_tokens == model.context_length - len(first.prompt_ids)
    assert first.sampling.temperature == 1.0


async def test_logprobs_in_chat(model: Model) -> None:
    ids = model.tokenizer.encode("a😀", add_special=False)

    async def script(attempt: Attempt) -> None:
        for offset, token in enumerate([*ids, EOS]):
            logprob = worker_pb2.Logprob(
                token_id=token, logprob=-0.5, top_ids=[token, 33], top_logprobs=[-0.5, float("-inf")]
            )
            tokens = worker_pb2.Tokens(ids=[token], logprobs=[logprob])
            await attempt.send(attempt.event(offset=offset, tokens=tokens, finish="stop" if token == EOS else ""))

    async with running(model, ScriptedWorker("merged-1", script)) as stack:
        answer = await client(stack).chat.completions.create(
            model=model.name, messages=HI, logprobs=True, top_logprobs=2
        )
        stream = await client(stack).chat.completions.create(
            model=model.name, messages=HI, logprobs=True, top_logprobs=2, stream=True
        )
        streamed = [t async for c in stream if c.choices[0].logprobs for t in c.choices[0].logprobs.content or []]
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    content = logprobs.content
    assert content is not None
    assert b"".join(bytes(t.bytes or []) for t in content).decode() == "a😀"
    assert content[0].token == "a"
    assert content[1].token.startswith("bytes:\\xf0")
    assert content[0].top_logprobs[1].logprob == -9999.0
    assert [t.model_dump() for t in streamed] == [t.model_dump() for t in content]


async def test_completions_in_every_shape(stack: Stack, model: Model) -> None:
    api = client(stack).completions
    one = await api.create(model=model.name, prompt="abc")
    assert one.choices[0].text == TEXT
    assert list(stack.workers[0].attempts[-1].message.prompt_ids) == model.tokenizer.encode("abc", add_special=True)
    assert stack.workers[0].attempts[-1].message.sampling.max_tokens == 16
    many = await api.create(model=model.name, prompt=["a", "b"], n=2)
    assert [(c.index, c.text) for c in many.choices] == [(i, TEXT) for i in range(4)]
    ids = await api.create(model=model.name, prompt=[10, 11, 12], echo=True, max_tokens=50)
    assert ids.choices[0].text == model.tokenizer.decode([10, 11, 12], skip_special=False) + TEXT
    stream = await api.create(model=model.name, prompt=["a", "b"], stream=True, echo=True, max_tokens=50)
    texts = ["", ""]
    async for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == ["a" + TEXT, "b" + TEXT]


async def test_echo_with_logprobs_scores_the_prompt(model: Model) -> None:
    prompt = model.tokenizer.encode("one two three", add_special=False)

    async def script(attempt: Attempt) -> None:
        scores = [worker_pb2.Logprob(token_id=i, logprob=-float(n)) for n, i in enumerate(prompt)]
        tokens = worker_pb2.Tokens(ids=[33], logprobs=[worker_pb2.Logprob(token_id=33, logprob=-1.0)])
        for choice in attempt.message.choices:  # as workers do: with the first choice alone
            told = scores if choice == 0 else ()
            await attempt.send(attempt.event(choice=choice, tokens=tokens, prompt_logprobs=told, finish="length"))

    async with running(model, ScriptedWorker("merged-1", script)) as stack:
        answer = await client(stack).completions.create(
            model=model.name, prompt="one two three", echo=True, max_tokens=0, logprobs=0, n=2
        )
        assert stack.router.requests[0].merged_only
        assert stack.workers[0].attempts[0].message.sampling.HasField("prompt_logprobs")
    assert len(answer.choices) == 2
    for choice in answer.choices:
        assert choice.text == "one two three"
        assert choice.finish_reason == "length"
        assert choice.logprobs is not None
        assert choice.logprobs.tokens == ["one", " two", " three"]
        assert choice.logprobs.token_logprobs == [None, -1.0, -2.0]
        assert choice.logprobs.text_offset == [0, 3, 7]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 0


async def test_models(stack: Stack, model: Model) -> None:
    models = await client(stack).models.list()
    assert [m.id for m in models.data] == [model.name]
    assert (await client(stack).models.retrieve(model.name)).id == model.name
    with pytest.raises(openai.NotFoundError) as caught:
        await client(stack).models.retrieve("nope/nope")
    assert caught.value.code == "model_not_found"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_that_is_too_long_is_400_streamed_or_not(stack: Stack, model: Model, stream: bool) -> None:
    for content, limit in (("word " * 9000, None), ("hi", 9000), ("x" * 900_000, None)):
        with pytest.raises(openai.BadRequestError) as caught:
            await client(stack).chat.completions.create(
                model=model.name,
                messages=[{"role": "user", "content": content}],
                stream=stream,
                max_tokens=limit,
            )
        assert caught.value.code == "context_length_exceeded"
    assert not stack.workers[0].attempts


@pytest.mark.parametrize("stream", [False, True])
async def test_refusals_before_the_first_token_have_a_status(stack: Stack, model: Model, stream: bool) -> None:
    stack.router.refusal = BatonError(Reason.NO_CAPACITY, "everything is full")
    with pytest.raises(openai.RateLimitError) as caught:
        await client(stack).chat.completions.create(model=model.name, messages=HI, stream=stream)
    assert caught.value.code == "no_capacity"
    assert caught.value.response.headers["retry-after"] == "1"
    assert caught.value.body == {
        "message": "everything is full",
        "type": "rate_limit_error",
        "param": None,
        "code": "no_capacity",
    }


async def test_other_errors_have_the_body_too(stack: Stack, model: Model) -> None:
    chat = f"{stack.url}/v1/chat/completions"
    good = {"model": model.name, "messages": HI}
    async with httpx.AsyncClient(timeout=HANG_S) as http:
        cases = [
            (await http.post(chat, json=good | {"model": "gpt"}), 404, "model_not_found"),
            (await http.post(chat, json={"messages": HI}), 400, "invalid_value"),
            (await http.post(chat, content=b"{", headers={"content-type": "application/json"}), 400, "invalid_value"),
            (await http.post(chat, content=b"a=1", headers={"content-type": "text/plain"}), 415, None),
            (await http.post(chat, json=good | {"user": "x" * (1 << 20)}), 413, "request_too_large"),
            (await http.get(chat), 405, "method_not_allowed"),
            (await http.get(f"{stack.url}/v1/nothing"), 404, "not_found"),
            (await http.post(chat, json=good | {"temperature": 3}), 400, "invalid_value"),
        ]

        async def endless() -> AsyncIterator[bytes]:
            for _ in range(40):
                yield b" " * (1 << 16)

        endless_answer = await http.post(chat, content=endless(), headers={"content-type": "application/json"})
        cases.append((endless_answer, 413, "request_too_large"))
    for response, status, code in cases:
        assert response.status_code == status, response.text
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert code in (None, error["code"])
        assert response.headers["x-request-id"]
    assert cases[5][0].headers["allow"] == "POST"
    assert cases[7][0].json()["error"]["param"] == "temperature"


async def test_ready_names_what_is_missing(model: Model) -> None:
    worker = ScriptedWorker("decode-1", says(model), role=registry_pb2.ROLE_DECODE)
    async with running(model, worker) as stack, httpx.AsyncClient(base_url=stack.url, timeout=HANG_S) as http:
        assert (await http.get("/health")).status_code == 200
        assert (await http.get("/ready")).json() == {"ready": True, "missing": []}
        stack.card.standing = None
        assert [m["part"] for m in (await http.get("/ready")).json()["missing"]] == ["registry"]
        other = registry_pb2.ModelCard()
        other.CopyFrom(model.card)
        other.tokenizer = "other"
        stack.card.standing = other
        answer = await http.get("/ready")
        assert answer.status_code == 503
        assert "VERSION_MISMATCH" in answer.json()["missing"][0]["why"]
        assert "tokenizer" in answer.json()["missing"][0]["why"]
        stack.card.standing = model.card
        stack.router_view.change("router-1", b"")
        assert [m["part"] for m in (await http.get("/ready")).json()["missing"]] == ["router"]
        await worker.stop()
        await until(lambda: not stack.connected(worker))
        assert [m["part"] for m in (await http.get("/ready")).json()["missing"]] == ["router", "worker"]
        metrics = (await http.get("/metrics")).text
        assert "baton_frontend_ready 0.0" in metrics
        assert "baton_frontend_ttft_seconds_count" in metrics
