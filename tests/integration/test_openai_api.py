"""The API over real workers (a tiny random model: its text is arbitrary bytes): the official client, every field."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI

from tests.integration.stack import SERVED, Stack
from tests.sse import Stream, read_stream
from tests.tiny_model import VOCAB, make_tiny_model

pytestmark = [pytest.mark.integration, pytest.mark.slow]

ORIGIN = "https://app.example.org"
EOS = VOCAB - 1
HI: list[Any] = [{"role": "user", "content": "Say something long, about the sea."}]
WORD = "The sea 海 is 🌊 wide. "


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory, api_keys: Path) -> Iterator[Stack]:
    """One of each worker, and a frontend with keys and an origin."""
    directory = tmp_path_factory.mktemp("api")
    model = make_tiny_model(directory / "tiny", layers=2, context=1024)
    http = {"api_keys_file": api_keys, "cors_origins": ORIGIN}
    run = Stack(directory, model, kvstore=False, http=http)
    run.start()
    yield run
    run.teardown()


async def chat(client: AsyncOpenAI, **asked: Any) -> Any:
    return await client.chat.completions.create(**{"model": SERVED, "messages": HI, "max_tokens": 12} | asked)


async def complete(client: AsyncOpenAI, **asked: Any) -> Any:
    return await client.completions.create(**{"model": SERVED, "prompt": WORD, "max_tokens": 12} | asked)


async def stream(http: httpx.AsyncClient, **asked: Any) -> Stream:
    """A chat (or, with a prompt, a completion), streamed and checked."""
    is_chat = "prompt" not in asked
    body = {"model": SERVED, "max_tokens": 12, "stream": True, **({"messages": HI} if is_chat else {}), **asked}
    answer = await http.post("/v1/chat/completions" if is_chat else "/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    prompts = body["prompt"] if isinstance(body.get("prompt"), list) and not isinstance(body["prompt"][0], int) else [0]
    told = body.get("stream_options", {})
    found = read_stream(
        answer.content,
        chat=is_chat,
        outputs=len(prompts) * body.get("n", 1),
        usage=told.get("include_usage", False),
        continuous=told.get("continuous_usage_stats", False),
    )
    assert found.faults == []
    return found


# ---- streams


@pytest.mark.parametrize("prompt", [None, WORD])
async def test_streams_are_right_and_say_what_the_whole_answer_says(
    http: httpx.AsyncClient, client: AsyncOpenAI, prompt: str | None
) -> None:
    asked: dict[str, Any] = {} if prompt is None else {"prompt": prompt}
    for more in (
        {"temperature": 0},
        {"temperature": 2, "seed": 3, "n": 3, "max_tokens": 24},
        {"seed": 4, "n": 2, "logprobs": True if prompt is None else 3, "stop": ["e", "海"], "max_tokens": 24},
        {"seed": 5, "stream_options": {"include_usage": True}, "ignore_eos": True},
        {"seed": 5, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    ):
        told = await stream(http, **asked, **more)
        extra = {"extra_body": {"ignore_eos": True}} if "ignore_eos" in more else {}
        whole_ask = {k: v for k, v in more.items() if k not in ("stream_options", "ignore_eos")} | extra
        whole = await (chat(client, **whole_ask) if prompt is None else complete(client, **asked, **whole_ask))
        for choice in whole.choices:
            text = choice.message.content if prompt is None else choice.text
            assert text == told.texts[choice.index]
            assert choice.finish_reason == told.finishes[choice.index]
            assert "\ufffd" not in text
            if choice.logprobs is not None and prompt is None:
                assert [e.token for e in choice.logprobs.content] == [e["token"] for e in told.logprobs[choice.index]]
        if told.usage is not None:
            assert told.usage["completion_tokens"] == whole.usage.completion_tokens


async def test_many_streams_at_once_with_one_request_id(http: httpx.AsyncClient) -> None:
    """Equal ids name the answers and nothing else."""

    async def one(seed: int) -> tuple[str, str]:
        body = {"model": SERVED, "prompt": WORD, "seed": seed, "max_tokens": 8, "ignore_eos": True}
        answer = await http.post("/v1/completions", json=body, headers={"x-request-id": "the-same"})
        assert answer.headers["x-request-id"] == "the-same"
        return answer.json()["id"], answer.json()["choices"][0]["text"]

    alone = [await one(seed) for seed in range(4)]
    together = await asyncio.gather(*(one(seed % 4) for seed in range(16)))
    assert len({id for id, _ in [*alone, *together]}) == 20
    assert [text for _, text in together] == [alone[seed % 4][1] for seed in range(16)]


# ---- fields


async def test_outputs_come_prompt_by_prompt_in_order(client: AsyncOpenAI, http: httpx.AsyncClient) -> None:
    prompts: list[Any] = ["one", "two", "three"]
    ids = [list(prompt.encode()) for prompt in prompts]
    extra = {"ignore_eos": True, "return_token_ids": True}
    several = await complete(client, prompt=prompts, n=2, temperature=0, extra_body=extra)
    assert [choice.index for choice in several.choices] == list(range(6))
    told = [choice.model_extra for choice in several.choices]
    assert all(len(one["token_ids"]) == 12 for one in told)
    as_ids = await complete(client, prompt=[one["prompt_token_ids"] for one in told[::2]], n=2, temperature=0)
    assert [c.text for c in as_ids.choices] == [c.text for c in several.choices]
    assert several.usage.prompt_tokens == sum(len(one["prompt_token_ids"]) for one in told[::2])
    assert [len(one["prompt_token_ids"]) for one in told[::2]] == [len(one) for one in ids]
    echoed = await stream(http, prompt=prompts, n=2, temperature=0, echo=True, ignore_eos=True, return_token_ids=True)
    for index, choice in enumerate(several.choices):
        assert echoed.texts[index] == prompts[index // 2] + choice.text
        assert echoed.token_ids[index] == told[index]["token_ids"]


@pytest.mark.parametrize("streamed", [False, True])
async def test_echo_scores_the_prompt(client: AsyncOpenAI, streamed: bool) -> None:
    whole = await complete(client, echo=True, logprobs=2, temperature=0, extra_body={"ignore_eos": True})
    lists = whole.choices[0].logprobs
    if streamed:
        chunks = [c async for c in await complete(client, echo=True, logprobs=2, temperature=0, stream=True,
                                                  extra_body={"ignore_eos": True})]  # fmt: skip
        parts = [c.choices[0].logprobs for c in chunks if c.choices[0].logprobs]
        joined = {n: [x for p in parts for x in getattr(p, n)] for n in ("tokens", "token_logprobs", "text_offset")}
        assert joined["tokens"] == lists.tokens
        assert joined["token_logprobs"] == pytest.approx(lists.token_logprobs, nan_ok=True)
        assert joined["text_offset"] == lists.text_offset
        return
    assert len(lists.tokens) == len(WORD.encode()) + 12
    assert lists.token_logprobs[0] is None
    assert all(value <= 0 for value in lists.token_logprobs[1:])
    assert all(len(best) >= 2 for best in lists.top_logprobs[1:])
    assert sorted(lists.text_offset) == lists.text_offset
    only = await complete(client, echo=True, logprobs=2, max_tokens=0)
    assert (only.choices[0].text, only.choices[0].finish_reason) == (WORD, "length")
    assert only.usage.completion_tokens == 0
    assert only.choices[0].logprobs.tokens == lists.tokens[: len(WORD.encode())]
    assert (await complete(client, echo=True, max_tokens=0)).choices[0].logprobs is None


async def test_logprobs_of_each_token_with_the_most_likely(client: AsyncOpenAI) -> None:
    answer = await chat(client, logprobs=True, top_logprobs=5, temperature=0, extra_body={"return_token_ids": True})
    (choice,) = answer.choices
    ids = [i for i in choice.model_extra["token_ids"] if i != EOS]
    assert len(choice.logprobs.content) == len(ids)
    for entry in choice.logprobs.content:
        assert len(entry.top_logprobs) == 5
        assert entry.top_logprobs[0].token == entry.token
        assert [e.logprob for e in entry.top_logprobs] == sorted((e.logprob for e in entry.top_logprobs), reverse=True)
    text = b"".join(bytes(entry.bytes) for entry in choice.logprobs.content)
    assert choice.message.content == text.decode(errors="ignore")


async def test_a_bias_decides_and_forbids(client: AsyncOpenAI) -> None:
    extra = {"return_token_ids": True}
    forced = await complete(client, logit_bias={"65": 100}, extra_body=extra, temperature=0)
    assert set(forced.choices[0].model_extra["token_ids"]) == {65}
    plain = await complete(client, temperature=0, extra_body=extra | {"ignore_eos": True})
    first = plain.choices[0].model_extra["token_ids"][0]
    banned = await complete(client, logit_bias={str(first): -100}, temperature=0, extra_body=extra)
    assert first not in banned.choices[0].model_extra["token_ids"]


async def test_ends_and_budgets(client: AsyncOpenAI) -> None:
    ends = {str(EOS): 100}
    extra = {"return_token_ids": True}
    at_once = await chat(client, logit_bias=ends, extra_body=extra)
    assert (at_once.choices[0].finish_reason, at_once.usage.completion_tokens) == ("stop", 0)
    assert at_once.choices[0].message.content == ""
    assert at_once.choices[0].model_extra["token_ids"] == []
    later = await chat(client, logit_bias=ends, extra_body=extra | {"min_tokens": 5})
    assert (later.choices[0].finish_reason, later.usage.completion_tokens) == ("stop", 5)
    never = await chat(client, logit_bias=ends, extra_body=extra | {"ignore_eos": True})
    assert (never.choices[0].finish_reason, never.usage.completion_tokens) == ("length", 12)
    shown = await chat(client, logit_bias=ends, extra_body={"ignore_eos": True, "skip_special_tokens": False})
    assert shown.choices[0].message.content == "<eos>" * 12
    stopped = await chat(client, logit_bias={"65": 100}, extra_body=extra | {"stop_token_ids": [65]})
    assert (stopped.choices[0].finish_reason, stopped.usage.completion_tokens) == ("stop", 0)
    wins = await chat(client, max_completion_tokens=3, extra_body={"ignore_eos": True})
    assert (wins.choices[0].finish_reason, wins.usage.completion_tokens) == ("length", 3)
    assert (await complete(client, max_tokens=None, extra_body={"ignore_eos": True})).usage.completion_tokens == 16


async def test_stop_strings_over_token_edges(client: AsyncOpenAI, http: httpx.AsyncClient) -> None:
    """Each token of this model is a byte, so every longer stop string lies over edges."""
    asked = {"seed": 11, "max_tokens": 120, "ignore_eos": True, "prompt": WORD}
    whole = (await stream(http, **asked)).texts[0]
    stop = whole[10:14]
    assert len(stop.encode()) >= 4
    cut = await stream(http, **asked, stop=[stop, "never said"])
    assert (cut.texts[0], cut.finishes[0]) == (whole[: whole.index(stop)], "stop")
    kept = await stream(http, **asked, stop=stop, include_stop_str_in_output=True)
    assert kept.texts[0] == whole[: whole.index(stop) + len(stop)]
    tail = await stream(http, **asked, stop=whole[-1] + "\0never")
    assert (tail.texts[0], tail.finishes[0]) == (whole, "length")


async def test_a_seed_gives_the_text_again_and_none_another(client: AsyncOpenAI) -> None:
    extra = {"ignore_eos": True}
    one, two = [await complete(client, seed=7, n=2, temperature=1, extra_body=extra) for _ in range(2)]
    assert [c.text for c in one.choices] == [c.text for c in two.choices]
    assert one.choices[0].text != one.choices[1].text
    free = {(await complete(client, temperature=1, extra_body=extra)).choices[0].text for _ in range(3)}
    assert len(free) == 3
    for narrow in ({"top_k": 1}, {"top_p": 0}, {"min_p": 1.0}):
        texts = [(await complete(client, seed=s, extra_body=extra | narrow)).choices[0].text for s in (1, 2)]
        assert texts[0] == texts[1], narrow


async def test_cached_tokens_are_real(stack: Stack, client: AsyncOpenAI) -> None:
    stack.clear_caches()
    messages = [{"role": "user", "content": WORD * 12}]
    first = await chat(client, messages=messages)
    again = await chat(client, messages=messages)
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    hits = again.usage.prompt_tokens_details.cached_tokens
    assert 0 < hits < again.usage.prompt_tokens
    assert hits % 32 == 0
    assert again.model_extra["baton"]["cached_tokens"] == hits


async def test_what_clients_send_beside_is_taken(client: AsyncOpenAI) -> None:
    answer = await chat(
        client, user="u", store=True, metadata={"a": "b"}, service_tier="auto", parallel_tool_calls=False,
        reasoning_effort="low", verbosity="low", prompt_cache_key="k", safety_identifier="s",
        extra_body={"nobody_knows": {"this": [1]}, "priority": 3},
    )  # fmt: skip
    assert answer.choices[0].finish_reason in ("stop", "length")


async def test_conversations_of_every_shape(client: AsyncOpenAI) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "developer", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "kind."}]},
        {"role": "user", "content": "hi", "name": "Al"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "4", "tool_call_id": "c1"},
        {"role": "function", "name": "f", "content": "5"},
        {"role": "assistant", "content": "It is "},
    ]
    asked = await chat(client, messages=messages, extra_body={"return_token_ids": True})
    going_on = await chat(client, messages=messages, extra_body={"return_token_ids": True,
                                                                 "continue_final_message": True})  # fmt: skip
    lengths = [len(one.model_extra["prompt_token_ids"]) for one in (asked, going_on)]
    assert lengths[0] - lengths[1] == len("\nassistant: ")


# ---- refusals

DEEP = b'{"model":"m","messages":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
TOO_LONG = [{"role": "user", "content": "word " * 400}]
REFUSED: list[tuple[dict[str, Any], str | None, str]] = [
    ({"messages": TOO_LONG}, "messages", "context_length_exceeded"),
    ({"messages": TOO_LONG, "stream": True}, "messages", "context_length_exceeded"),
    ({"max_tokens": 1000}, "messages", "context_length_exceeded"),
    ({"max_tokens": 5000}, "max_tokens", "context_length_exceeded"),
    ({"max_completion_tokens": 10**12}, "max_completion_tokens", "context_length_exceeded"),
    ({"messages": []}, "messages", "invalid_value"),
    ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role", "invalid_value"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
     "messages[0].content[0]", "invalid_value"),
    ({"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]},
     "messages[0].content[0]", "invalid_value"),
    ({"logit_bias": {str(VOCAB): 1}}, "logit_bias", "invalid_value"),
    ({"logit_bias": {"1": 101}}, "logit_bias", "invalid_value"),
    ({"stop_token_ids": [VOCAB]}, "stop_token_ids", "invalid_value"),
    ({"n": 0}, "n", "invalid_value"),
    ({"n": -1}, "n", "invalid_value"),
    ({"max_tokens": 2**70}, "max_tokens", "invalid_value"),
    ({"seed": 2**70}, "seed", "invalid_value"),
    ({"top_k": -(2**70)}, "top_k", "invalid_value"),
    ({"temperature": 2**70}, "temperature", "invalid_value"),
    ({"presence_penalty": 2.5}, "presence_penalty", "invalid_value"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "invalid_value"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": 5}}]}, None, "invalid_value"),
]  # fmt: skip
RAW: list[tuple[bytes, int]] = [
    (b'{"model": NaN}', 400),
    (b'{"model": "m", "messages": [{"role": "user", "content": "\\ud800"}]}', 400),
    (b'{"model": "m", "temperature": Infinity}', 400),
    (DEEP, 400),
    (b"\xff", 400),
    (b"[]", 400),
    (b"", 400),
]


async def test_what_is_wrong_is_refused_before_any_engine_sees_it(stack: Stack, http: httpx.AsyncClient) -> None:
    attempts = stack.metric("frontend", "baton_frontend_attempts_total")
    for fields, param, code in REFUSED:
        body = {"model": SERVED, "messages": HI, "max_tokens": 4} | fields
        answer = await http.post("/v1/chat/completions", json=body)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["type"]) == (400, code, "invalid_request_error"), fields
        assert param is None or error["param"] == param, fields
        assert set(error) == {"message", "type", "param", "code"}
    for prompt in ([VOCAB], [[1], [-1]], [2**70], [], [[]], ""):
        answer = await http.post("/v1/completions", json={"model": SERVED, "prompt": prompt})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt"), prompt
    for raw, status in RAW:
        answer = await http.post("/v1/chat/completions", content=raw, headers={"content-type": "application/json"})
        assert answer.status_code == status, raw[:80]
        assert answer.json()["error"]["type"] == "invalid_request_error"
    assert stack.metric("frontend", "baton_frontend_attempts_total") == attempts


async def test_what_is_not_json_in_utf8_is_refused(http: httpx.AsyncClient) -> None:
    for headers in (
        {"content-type": "text/plain"},
        {"content-type": "application/json; charset=latin-1"},
        {"content-type": "application/json", "content-encoding": "gzip"},
    ):
        answer = await http.post("/v1/chat/completions", content=b"{}", headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (415, "unsupported_media_type")
    for kind in ("application/json; charset=UTF-8", 'application/json;charset="utf-8"', "application/vnd.x+json"):
        answer = await http.post("/v1/chat/completions", content=b"{}", headers={"content-type": kind})
        assert answer.status_code == 400


async def test_paths_methods_models_and_sizes(stack: Stack, http: httpx.AsyncClient, client: AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        await chat(client, model="gpt-4o")
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
    assert (await http.get("/v1/nothing")).json()["error"]["code"] == "not_found"
    for method in ("GET", "PUT", "DELETE", "PATCH"):
        answer = await http.request(method, "/v1/chat/completions")
        assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
    answer = await http.delete("/v1/models")
    assert answer.status_code == 405
    assert "GET" in answer.headers["allow"]
    large = await http.post("/v1/completions", json={"model": SERVED, "prompt": "x", "user": "y" * (17 << 20)})
    assert (large.status_code, large.json()["error"]["code"]) == (413, "request_too_large")


async def test_request_ids_are_echoed_or_made(http: httpx.AsyncClient) -> None:
    for given in ("mine-1", "x" * 128):
        assert (await http.get("/v1/models", headers={"x-request-id": given})).headers["x-request-id"] == given
    for given in ("x" * 129, "a b", "é".encode(), ""):
        made = (await http.get("/v1/models", headers={"x-request-id": given})).headers["x-request-id"]
        assert made.startswith("req_")


async def test_keys_and_origins(stack: Stack, http: httpx.AsyncClient, client: AsyncOpenAI) -> None:
    with pytest.raises(openai.AuthenticationError) as caught:
        await chat(client.with_options(api_key="sk-wrong"))
    assert caught.value.code == "invalid_api_key"
    assert caught.value.response.headers["www-authenticate"].startswith("Bearer")
    preflight = {"origin": ORIGIN, "access-control-request-method": "POST"}
    answer = await http.options("/v1/chat/completions", headers=preflight | {"authorization": ""})
    assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, ORIGIN)
    told = await http.get("/v1/models", headers={"origin": ORIGIN})
    assert "x-baton-route" in told.headers["access-control-expose-headers"]


async def test_no_character_is_ever_torn(http: httpx.AsyncClient) -> None:
    """A random model says bytes that are no text most of the time: hot, and steered to the bytes of wide characters."""
    wide = {str(i): 5 for i in range(VOCAB) if i % 3}
    for seed, n in itertools.product(range(2), (1, 3)):
        for more in ({}, {"stop": ["é", "\u0301"]}, {"logit_bias": wide}, {"prompt": "a👩‍👩‍👧é", "echo": True}):
            await stream(http, seed=seed, n=n, temperature=2, max_tokens=48, ignore_eos=True, **more)
