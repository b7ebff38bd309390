"""Embeddings, vLLM's and SGLang's own endpoints, over real workers: official clients, oracles, and a worker's death."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from openai import AsyncOpenAI

from tests.integration.asking import KEY
from tests.integration.stack import HANG_S, SERVED, Stack, until
from tests.tiny_model import VOCAB, make_tiny_model

pytestmark = [pytest.mark.integration, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[2]
TEXTS = ["The sea.", "The sea 海 is 🌊 wide. " * 9, "Ships"]
TOLERANCE = 2e-5
"""Of numbers of a vector of length one, in float32."""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model."""
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), layers=2, context=1024)


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory, tiny: Path, api_keys: Path) -> Iterator[Stack]:
    """One of each worker, and a frontend with keys."""
    directory = tmp_path_factory.mktemp("native")
    run = Stack(directory, tiny, kvstore=False, http={"api_keys_file": api_keys})
    run.start()
    yield run
    run.teardown()


# ---- embeddings


def oracle(model: Path, ids: list[int]) -> np.ndarray:
    """transformers' mean of the last hidden states in float32, at unit length."""
    import torch
    from transformers import LlamaForCausalLM

    loaded = LlamaForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    with torch.inference_mode():
        mean = loaded.model(torch.tensor([ids])).last_hidden_state[0].mean(0).numpy()
    return np.asarray(mean / np.linalg.norm(mean))


async def ids_of(http: httpx.AsyncClient, text: str) -> list[int]:
    answer = await http.post("/tokenize", json={"prompt": text})
    assert answer.status_code == 200, answer.text
    return list(answer.json()["tokens"])


async def test_embeddings_are_the_mean_of_the_hidden_states(
    client: AsyncOpenAI, http: httpx.AsyncClient, tiny: Path
) -> None:
    made = await client.embeddings.create(model=SERVED, input=TEXTS)  # base64 on the wire, as this client asks
    ids = [await ids_of(http, text) for text in TEXTS]
    assert made.usage.prompt_tokens == made.usage.total_tokens == sum(map(len, ids))
    assert [one.index for one in made.data] == [0, 1, 2]
    for one, tokens in zip(made.data, ids, strict=True):
        assert np.abs(np.array(one.embedding) - oracle(tiny, tokens)).max() < TOLERANCE
    plain = await client.embeddings.create(model=SERVED, input=ids, encoding_format="float")
    assert np.abs(np.array([one.embedding for one in plain.data]) - [one.embedding for one in made.data]).max() < 1e-6
    alone = await client.embeddings.create(model=SERVED, input=ids[1], encoding_format="float", user="u")
    assert np.abs(np.array(alone.data[0].embedding) - plain.data[1].embedding).max() < TOLERANCE
    short = await client.embeddings.create(model=SERVED, input=TEXTS[0], dimensions=8)
    expected = oracle(tiny, ids[0])[:8]
    assert np.abs(np.array(short.data[0].embedding) - expected / np.linalg.norm(expected)).max() < TOLERANCE


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": ["a", ""]}, "input[1]"),
        ({"input": ["a", [1]]}, None),
        ({"input": [[1], [VOCAB]]}, "input[1]"),
        ({"input": ["a"] * 2049}, "input"),
        ({"input": "a" * 1025}, "input"),
        ({"input": 7}, "input"),
        ({"input": "a", "dimensions": 65}, "dimensions"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "a", "model": "other"}, "model"),
    ],
)
async def test_wrong_inputs_are_refused_by_name(
    http: httpx.AsyncClient, body: dict[str, Any], param: str | None
) -> None:
    answer = await http.post("/v1/embeddings", json={"model": SERVED} | body)
    if param is None:
        assert answer.status_code == 200
        return
    assert answer.status_code == (404 if param == "model" else 400)
    assert answer.json()["error"]["param"] == param


async def test_many_inputs_survive_the_death_of_a_worker_and_streams_do_not_notice(
    stack: Stack, client: AsyncOpenAI
) -> None:
    inputs = [[(7 * i + n) % 300 for n in range(40 + i % 900)] for i in range(240)]
    settings: dict[str, Any] = {"model": SERVED, "prompt": "The sea", "max_tokens": 60, "seed": 3, "stream": False}
    undisturbed = (await client.completions.create(**settings)).choices[0].text
    alone = await client.embeddings.create(model=SERVED, input=inputs[-1:], encoding_format="float")
    making = asyncio.create_task(client.embeddings.create(model=SERVED, input=inputs, encoding_format="float"))
    busy: list[str] = []

    def embedding() -> bool:
        busy[:] = [name for name, found in stack.findings().items() if "embeddings" in str(found)]
        return bool(busy) or making.done()

    await asyncio.to_thread(until, embedding)
    assert busy, "it was over too soon to be disturbed"
    victim = busy[0]
    await asyncio.to_thread(stack.kill, victim)
    text = (await client.completions.create(**settings)).choices[0].text
    made = await making
    assert text == undisturbed
    assert len(made.data) == len(inputs)
    assert np.abs(np.array(made.data[-1].embedding) - alone.data[0].embedding).max() < TOLERANCE
    again = await client.embeddings.create(model=SERVED, input=inputs[:3], encoding_format="float")
    for one, other in zip(made.data, again.data, strict=False):
        assert np.abs(np.array(one.embedding) - other.embedding).max() < TOLERANCE
    await asyncio.to_thread(stack.heal)


async def test_who_hangs_up_leaves_nothing_to_do(stack: Stack, http: httpx.AsyncClient) -> None:
    inputs = [[n % 300 for n in range(1000)] for _ in range(100)]
    with pytest.raises(httpx.ReadTimeout):
        await http.post("/v1/embeddings", json={"model": SERVED, "input": inputs}, timeout=0.5)
    await asyncio.to_thread(stack.settle)


# ---- tokens


async def test_texts_and_tokens_are_each_others(http: httpx.AsyncClient, stack: Stack) -> None:
    text = "The sea 海 is 🌊 <eos> wide."
    told = (await http.post("/tokenize", json={"model": SERVED, "prompt": text, "return_token_strs": True})).json()
    assert told["count"] == len(told["tokens"]) == len(told["token_strs"])
    assert told["max_model_len"] == 1024
    assert (await http.post("/detokenize", json={"tokens": told["tokens"]})).json() == {"prompt": text}
    messages = [{"role": "user", "content": "hi"}]
    chat = (await http.post("/tokenize", json={"messages": messages})).json()
    assert chat["token_strs"] is None
    assert (await http.post("/detokenize", json={"tokens": chat["tokens"]})).json()["prompt"] == "user: hi\nassistant: "
    answer = await http.post(
        "/v1/chat/completions",
        json={"model": SERVED, "messages": messages, "max_tokens": 1, "return_token_ids": True},
    )
    assert answer.json()["prompt_token_ids"] == chat["tokens"]
    large = await http.post("/tokenize", json={"prompt": "sea " * 100_000})  # read by the process for large bodies
    assert large.json()["count"] == 400_000


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": []}, "messages"),
        ("/tokenize", {"prompt": 1}, "prompt"),
        ("/tokenize", {"prompt": "a" * (1 << 20) + "a"}, "prompt"),
        ("/tokenize", {"messages": [{"role": "x", "content": "a"}]}, "messages[0].role"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [VOCAB]}, "tokens"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
    ],
)
async def test_wrong_texts_and_tokens_are_refused_by_name(
    http: httpx.AsyncClient, path: str, body: dict[str, Any], param: str
) -> None:
    answer = await http.post(path, json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


async def test_every_endpoint_but_probes_asks_for_the_key(stack: Stack) -> None:
    async with httpx.AsyncClient(base_url=stack.url(), trust_env=False, timeout=HANG_S) as http:
        for path in ("/tokenize", "/detokenize", "/v1/embeddings", "/generate", "/flush_cache"):
            assert (await http.post(path, json={})).status_code == 401
        for path in ("/get_model_info", "/server_info", "/health_generate"):
            assert (await http.get(path)).status_code == 401
        assert (await http.get("/version")).json()["version"]


# ---- SGLang


async def test_generate_answers_as_sglang_does(http: httpx.AsyncClient) -> None:
    params = {"max_new_tokens": 6, "temperature": 0, "ignore_eos": True}
    one = (await http.post("/generate", json={"text": "The sea", "sampling_params": params, "rid": "mine"})).json()
    assert one["meta_info"]["id"] == "mine"
    assert len(one["output_ids"]) == one["meta_info"]["completion_tokens"] == 6
    ids = await ids_of(http, "The sea")
    body = {
        "input_ids": [ids, ids[:3]],
        "sampling_params": [params, params | {"max_new_tokens": 2}],
        "return_logprob": True,
        "logprob_start_len": [2, 0],
        "top_logprobs_num": 2,
    }
    first, second = (await http.post("/generate", json=body)).json()
    assert first["text"] == one["text"]
    assert [row[1] for row in first["meta_info"]["input_token_logprobs"]] == ids[2:]
    assert second["meta_info"]["input_token_logprobs"][0][0] is None, "the first token follows nothing"
    assert [row[1] for row in first["meta_info"]["output_token_logprobs"]] == first["output_ids"]
    assert [len(best) for best in first["meta_info"]["output_top_logprobs"]] == [2] * 6
    assert first["meta_info"]["input_top_logprobs"][0][0][0] >= first["meta_info"]["input_top_logprobs"][0][1][0]
    assert second["meta_info"]["completion_tokens"] == 2
    letters = params | {"regex": "[a-z]{20}", "max_new_tokens": 20}
    text = (await http.post("/generate", json={"text": "The sea", "sampling_params": letters})).json()["text"]
    assert len(text) == 20
    stop = text[9:12]
    ended = (await http.post("/generate", json={"text": "The sea", "sampling_params": letters | {"stop": stop}})).json()
    assert ended["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    assert ended["text"] == text[: text.index(stop)]
    kept = letters | {"stop": [stop], "no_stop_trim": True}
    ended = (await http.post("/generate", json={"text": "The sea", "sampling_params": kept})).json()
    assert ended["text"] == text[: text.index(stop)] + stop
    several = {"text": "The sea", "sampling_params": params | {"n": 3, "temperature": 1.0}}
    assert len((await http.post("/generate", json=several)).json()) == 3
    assert (await http.get("/health_generate")).status_code == 200


async def test_a_stream_of_a_batch_says_whose_each_event_is(http: httpx.AsyncClient) -> None:
    params = {"max_new_tokens": 5, "temperature": 0, "ignore_eos": True}
    body = {"text": ["The sea", "Ships"], "sampling_params": params}
    whole = (await http.post("/generate", json=body)).json()
    streamed = await http.post("/generate", json=body | {"stream": True})
    lines = [line[6:] for line in streamed.text.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    events = [json.loads(line) for line in lines]
    for index in (0, 1):
        ours = [event for event in events if event["index"] == index]
        texts = [event["text"] for event in ours]
        assert texts[-1] == whole[index]["text"]
        assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(texts))
        reasons = [event["meta_info"]["finish_reason"] for event in ours]
        assert reasons[:-1] == [None] * (len(ours) - 1)
        assert reasons[-1] == {"type": "length", "length": 5}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "text"),
        ({"text": "a", "input_ids": [1]}, "input_ids"),
        ({"text": []}, "text"),
        ({"input_ids": [VOCAB]}, "input_ids"),
        ({"text": "a" * 1024}, "text"),
        ({"text": "a", "sampling_params": {"temperature": -1}}, "sampling_params.temperature"),
        ({"text": "a", "sampling_params": {"max_new_tokens": -1}}, "sampling_params.max_new_tokens"),
        ({"text": "a", "sampling_params": {"max_new_tokens": 5000}}, "sampling_params.max_new_tokens"),
        ({"text": "a", "sampling_params": {"regex": "("}}, "sampling_params.regex"),
        ({"text": "a", "sampling_params": {"regex": "a", "ebnf": "b"}}, "sampling_params.structured_outputs"),
        ({"text": "a", "sampling_params": {"stop_regex": "a"}}, "sampling_params.stop_regex"),
        ({"text": ["a", "b"], "sampling_params": [{"n": 1}, {"n": 2}]}, "sampling_params.n"),
        ({"text": ["a", "b"], "sampling_params": [{}]}, "sampling_params"),
        ({"text": "a", "image_data": "x"}, "image_data"),
        ({"text": "a", "return_logprob": True, "logprob_start_len": 9}, "logprob_start_len"),
        ({"text": "a", "return_logprob": True, "top_logprobs_num": 999}, "top_logprobs_num"),
        ({"text": "a", "return_logprob": "yes"}, "return_logprob"),
        ({"text": "a", "model": "other"}, "model"),
    ],
)
async def test_wrong_asks_are_refused_by_name(http: httpx.AsyncClient, body: dict[str, Any], param: str) -> None:
    answer = await http.post("/generate", json=body)
    assert answer.status_code == (404 if param == "model" else 400), answer.text
    assert answer.json()["error"]["param"] == param


@pytest.fixture(scope="module")
def found(stack: Stack) -> dict[str, Any]:
    """What SGLang's programs made of it, one process for all of them."""
    command = [sys.executable, "-m", "tests.sglang_language", stack.url(), KEY]
    env = {**os.environ, "NO_PROXY": "127.0.0.1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=HANG_S, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    made: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return made


def test_generation_goes_on_from_the_text_and_says_what_it_cost(found: dict[str, Any]) -> None:
    told = found["gen"]
    assert told["text"].startswith(told["prompt"])
    assert told["text"] == told["prompt"] + told["answer"]
    meta = told["meta"]
    assert meta["prompt_tokens"] == len(told["prompt"].encode())
    assert meta["completion_tokens"] == 12
    assert meta["finish_reason"] == {"type": "length", "length": 12}


def test_streamed_pieces_join_to_what_comes_whole(found: dict[str, Any]) -> None:
    told = found["stream"]
    assert len(told["pieces"]) > 2
    assert "".join(told["pieces"]) == told["whole"]


def test_regular_expressions_and_types_hold(found: dict[str, Any]) -> None:
    told = found["regex"]
    assert told["date"][4] == "-"
    assert told["date"].replace("-", "").isdigit()
    assert int(told["number"]) == int(told["number"].strip())
    assert told["flag"] in ("True", "False")
    assert set(json.loads(told["object"])) == {"a"}


@pytest.mark.parametrize("method", ["token_length_normalized", "greedy_token_selection", "unconditional"])
def test_a_choice_is_the_one_that_the_model_finds_likeliest(found: dict[str, Any], method: str) -> None:
    told = found["select"][method]
    assert told["chosen"] in found["select"]["choices"]
    if method == "token_length_normalized":
        scores = told["scores"]
        assert told["chosen"] == found["select"]["choices"][scores.index(max(scores))]
        # The same mean log probability that completions' echo tells.
        assert scores == pytest.approx(found["select"]["expected"], abs=1e-3)


def test_forks_go_their_own_ways_from_one_prefix(found: dict[str, Any]) -> None:
    told = found["fork"]
    assert len(told) == 3
    assert all(one["text"] == one["start"] + one["answer"] for one in told)
    assert len({one["start"] for one in told}) == 3


def test_a_batch_of_programs_gives_each_its_own(found: dict[str, Any]) -> None:
    assert found["batch"] == found["batch_alone"]


def test_caches_can_be_flushed_and_the_server_tells_about_itself(found: dict[str, Any]) -> None:
    assert found["info"]["model"]["is_generation"] is True
    assert found["info"]["server"]["version"]
    assert found["info"]["before"] > 0, "a prompt that came twice was found"
    assert found["info"]["after"] == 0, "after a flush it was not"


def test_a_refusal_reaches_the_program(found: dict[str, Any]) -> None:
    assert "sampling_params.top_p" in found["refused"]
