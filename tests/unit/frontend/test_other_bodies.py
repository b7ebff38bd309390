"""Bodies beside chats and completions: the same whether a thread or the process for large ones reads them; refusals."""

from __future__ import annotations

from typing import Any

import msgspec
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.engine.port import GrammarKind
from baton.errors import BatonError, Reason
from baton.model.card import Model
from baton.v1.worker_pb2 import Logprob
from services.frontend.asked import Api, Reading, Unread, pack, unpack
from services.frontend.detokenise import Piece, TokenText
from services.frontend.sglang.body import read_generate, read_told
from services.frontend.sglang.format import GenerateFormat, Wish

PARAMS = {"max_new_tokens": 3, "regex": "[ab]+", "stop": ["x"], "temperature": 0}
BODIES: list[tuple[Api, dict[str, Any]]] = [
    (Api.TOKENIZE, {"prompt": "The sea", "return_token_strs": True}),
    (Api.TOKENIZE, {"messages": [{"role": "user", "content": "hi"}], "add_generation_prompt": False}),
    (Api.DETOKENIZE, {"tokens": [1, 2, 3]}),
    (Api.EMBEDDINGS, {"input": ["a", "b c"], "encoding_format": "base64", "dimensions": 3}),
    (Api.EMBEDDINGS, {"input": [1, 2, 3]}),
    (Api.GENERATE, {"text": ["a", "b"], "sampling_params": PARAMS, "return_logprob": True, "logprob_start_len": 1}),
    (Api.GENERATE, {"input_ids": [1, 2], "rid": "r", "stream": True}),
]


@pytest.fixture(scope="module")
def reading(model: Model) -> Reading:
    return Reading(model)


@pytest.mark.parametrize(("api", "body"), BODIES)
def test_between_two_processes_nothing_changes(reading: Reading, model: Model, api: Api, body: dict[str, Any]) -> None:
    raw = orjson.dumps({"model": model.name} | body)
    asked = reading.read(Unread(raw, api, 100))
    assert unpack(pack(asked)) == asked


def test_a_model_may_be_left_out_where_it_is_known_and_not_be_another(reading: Reading) -> None:
    for api, body in BODIES:
        with pytest.raises(BatonError) as caught:
            reading.read(Unread(orjson.dumps(body | {"model": "other"}), api, 100))
        assert caught.value.reason is Reason.MODEL_NOT_FOUND
        if api is Api.EMBEDDINGS:
            with pytest.raises(BatonError) as caught:
                reading.read(Unread(orjson.dumps(body), api, 100))
            assert caught.value.param == "model"
        else:
            reading.read(Unread(orjson.dumps(body), api, 100))


def test_an_embedding_is_not_longer_than_the_model_has_it(reading: Reading, model: Model) -> None:
    assert model.hidden_size > 0
    body = {"model": model.name, "input": "a"}
    reading.read(Unread(orjson.dumps(body | {"dimensions": model.hidden_size}), Api.EMBEDDINGS, 100))
    with pytest.raises(BatonError) as caught:
        reading.read(Unread(orjson.dumps(body | {"dimensions": model.hidden_size + 1}), Api.EMBEDDINGS, 100))
    assert caught.value.param == "dimensions"


def test_sglangs_names_are_ours() -> None:
    body = read_generate({"text": "a", "sampling_params": PARAMS | {"min_new_tokens": 2, "no_stop_trim": True}}, 10)
    (options,) = body.options
    assert (options.max_tokens, options.min_tokens, options.stop, options.include_stop) == (3, 2, ("x",), True)
    assert (options.temperature, options.top_p, options.top_k, options.repetition_penalty) == (0.0, 1.0, 0, 1.0)
    assert options.structure is not None
    assert (options.structure.grammar.kind, options.structure.grammar.text) == (GrammarKind.REGEX, "[ab]+")
    (options,) = read_generate({"text": "a", "sampling_params": {"json_schema": "$$ANY$$"}}, 10).options
    assert options.structure is not None
    assert orjson.loads(options.structure.grammar.text) == {"type": "object"}


def test_where_log_probabilities_begin() -> None:
    def starts(**fields: Any) -> list[int]:
        return read_told(read_generate({"text": ["a", "b"]} | fields, 10).told).starts

    none = {"max_new_tokens": 0}
    assert starts() == starts(logprob_start_len=4) == starts(sampling_params=none) == [-1, -1]
    assert starts(return_logprob=True) == [-1, -1], "of the output only"
    assert starts(return_logprob=True, sampling_params=none) == [0, 0], "nothing else is there to tell"
    assert starts(return_logprob=[True, False], logprob_start_len=[4, 4]) == [4, -1]


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=3),
                    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
                    max_leaves=6),
       st.sampled_from(["text", "input_ids", "sampling_params", "return_logprob", "logprob_start_len",
                        "top_logprobs_num", "rid", "stream", "return_text_in_logprobs"]))  # fmt: skip
@settings(max_examples=300, deadline=None)
def test_whatever_stands_in_a_field_it_is_taken_or_refused_by_name(value: Any, name: str) -> None:
    refused: BatonError | None = None
    try:
        body = read_generate({"text": "a", name: value}, 1000)
        assert len(body.prompts) == len(body.options) == len(read_told(body.told).starts) >= 1
    except BatonError as error:
        refused = error
    assert refused is None or (refused.reason is Reason.INVALID_REQUEST and refused.param)


def test_an_answer_tells_text_so_far_and_its_end_once(model: Model) -> None:
    told = read_told(read_generate({"text": "a"}, 10).told)
    format = GenerateFormat("u", told, [Wish([5, 6], 1, 1, {7})], 1, model.tokenizer, lambda _: 4)
    scored = Logprob(token_id=6, logprob=-0.5, top_ids=[6], top_logprobs=[-0.5])
    piece = Piece("ab", [TokenText(9, 0, Logprob(token_id=9, logprob=float("-inf")))], "", [9], 1)
    events = format.chunks(0, piece, [Logprob(), scored])
    events += format.chunks(0, Piece("c", [], "stop", [], 0), [])
    events.append(format.finish(0, "stop", {"mode": "merged"}))
    made = [msgspec.json.decode(event[6:]) for event in events]
    assert [one["text"] for one in made] == ["ab", "abc", "abc"]
    assert [one["meta_info"]["finish_reason"] for one in made] == [None, None, {"type": "stop", "matched": 7}]
    last = made[-1]["meta_info"]
    assert last["input_token_logprobs"] == [[-0.5, 6, None]]
    assert last["input_top_logprobs"] == [[[-0.5, 6, None]]]
    assert last["output_token_logprobs"] == [[-9999.0, 9, None]]
    assert (last["prompt_tokens"], last["completion_tokens"], last["cached_tokens"]) == (2, 1, 4)
    assert last["baton"] == {"mode": "merged"}
    body = msgspec.json.decode(format.body(None, {"mode": "merged"}))  # type: ignore[arg-type]
    assert body["text"] == "abc"
    assert body["meta_info"]["finish_reason"] == {"type": "stop", "matched": 7}
