"""Every wrong field is refused with its name; unknown ones are ignored."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import BatonError, Reason
from services.frontend.schema import MAX_STOPS, parse_chat, parse_completion, parse_json

VOCAB = 1000
HI = [{"role": "user", "content": "hi"}]


def _chat(**fields: Any) -> Any:
    return parse_chat({"model": "m", "messages": HI} | fields, VOCAB)


def _completion(**fields: Any) -> Any:
    return parse_completion({"model": "m", "prompt": "hi"} | fields, VOCAB)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"x"',
        b'{"temperature": NaN}',
        b'{"temperature": Infinity}',
        b'{"messages": "\\ud800"}',
        b'{"a":' * 100_000,
        b"[" * 100_000,
        b"\xff\xfe",
        b'{"a": 1,}',
    ],
)
def test_what_is_not_a_json_object_is_refused(raw: bytes) -> None:
    with pytest.raises(BatonError) as caught:
        parse_json(raw)
    assert caught.value.reason is Reason.INVALID_REQUEST


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"model": 1}, "model"),
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [1]}, "messages[0]"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": ["user"], "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [*HI, {"role": "tool", "content": "x"}]}, "messages[1].tool_call_id"),
        ({"messages": [{"role": "tool", "tool_call_id": 1, "content": "x"}]}, "messages[0].tool_call_id"),
        ({"messages": [{"role": "tool", "tool_call_id": "a"}]}, "messages[0].content"),
        ({"messages": [{"role": "function", "content": "x"}]}, "messages[0].name"),
        ({"messages": [{"role": "user", "content": "x", "name": 5}]}, "messages[0].name"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]}, "messages[0].tool_calls[0].function"),
        ({"messages": [{"role": "assistant", "tool_calls": 1}]}, "messages[0].tool_calls"),
        ({"messages": [{"role": "assistant", "tool_calls": [1]}]}, "messages[0].tool_calls[0]"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"type": "x"}]}]}, "messages[0].tool_calls[0].type"),
        ({"messages": [{"role": "assistant", "function_call": {}}]}, "messages[0].function_call.name"),
        *(
            ({"messages": [{"role": "user", "content": [{"type": kind, kind: {}}]}]}, "messages[0].content[0]")
            for kind in ("input_audio", "file", "video_url", "image")
        ),
        *(
            ({name: huge}, name)
            for name in (
                "max_tokens",
                "max_completion_tokens",
                "min_tokens",
                "n",
                "seed",
                "top_k",
                "temperature",
                "top_p",
                "min_p",
                "presence_penalty",
                "frequency_penalty",
                "repetition_penalty",
            )
            for huge in (2**70, float(2**70), -(2**70), float("inf"), float("nan"))
        ),
        ({"top_logprobs": 2**70, "logprobs": True}, "top_logprobs"),
        ({"logit_bias": {"5": 2**70}}, "logit_bias"),
        ({"stop_token_ids": [2**70]}, "stop_token_ids"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ({"echo": True}, "echo"),
        ({"chat_template": "{{ messages }}"}, "chat_template"),
        ({"documents": [{"text": "x"}]}, "documents"),
        ({"web_search_options": {"user_location": {}}}, "web_search_options"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"allowed_token_ids": [1]}, "allowed_token_ids"),
        ({"bad_words": ["x"]}, "bad_words"),
        ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"cache_salt": 5}, "cache_salt"),
        ({"cache_salt": "x" * 513}, "cache_salt"),
        ({"return_token_ids": 1}, "return_token_ids"),
        ({"include_stop_str_in_output": "yes"}, "include_stop_str_in_output"),
        ({"skip_special_tokens": 0}, "skip_special_tokens"),
        ({"stream": True, "stream_options": {"continuous_usage_stats": 1}}, "stream_options.continuous_usage_stats"),
        ({"temperature": "1"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": 1e308}, "temperature"),
        ({"top_p": -0.1}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": 1.5}, "top_k"),
        ({"min_p": -1}, "min_p"),
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"frequency_penalty": -2.5}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"repetition_penalty": 1e-300}, "repetition_penalty"),
        ({"n": 0}, "n"),
        ({"n": 10**6}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_completion_tokens": "5"}, "max_completion_tokens"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"seed": 1 << 63}, "seed"),
        ({"seed": 0.5}, "seed"),
        ({"stop": ""}, "stop"),
        ({"stop": [1]}, "stop"),
        ({"stop": {"a": 1}}, "stop"),
        ({"stop": [str(i) for i in range(MAX_STOPS + 1)]}, "stop"),
        ({"stop_token_ids": [VOCAB]}, "stop_token_ids"),
        ({"stop_token_ids": 5}, "stop_token_ids"),
        ({"logit_bias": []}, "logit_bias"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"logit_bias": {"5": "1"}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"²": 1}}, "logit_bias"),
        ({"logit_bias": {str(VOCAB): 1}}, "logit_bias"),
        ({"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
        ({"logprobs": 1}, "logprobs"),
        ({"top_logprobs": 5}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"stream": True, "stream_options": []}, "stream_options"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"functions": [{}]}, "functions"),
        ({"response_format": {"type": "json"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_object"}, "guided_regex": "a+"}, "guided_regex"),
        ({"response_format": "json"}, "response_format"),
        ({"guided_regex": 5}, "guided_regex"),
        ({"guided_choice": ["a", ""]}, "guided_choice"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs"),
        ({"chat_template_kwargs": 1}, "chat_template_kwargs"),
    ],
)
def test_a_wrong_chat_field_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(BatonError) as caught:
        _chat(**fields)
    assert caught.value.reason is Reason.INVALID_REQUEST
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [1, "x"]}, "prompt"),
        ({"prompt": ["x", 1]}, "prompt"),
        ({"prompt": [1, True]}, "prompt"),
        ({"prompt": [VOCAB]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": ["x"] * 100, "n": 100}, "prompt"),
        ({"suffix": "x"}, "suffix"),
        ({"prompt": [2**70]}, "prompt"),
        ({"prompt_embeds": "AAAA"}, "prompt_embeds"),
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"add_special_tokens": "no"}, "add_special_tokens"),
        ({"best_of": 2}, "best_of"),
        ({"logprobs": True}, "logprobs"),
        ({"logprobs": 21}, "logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"echo": 1}, "echo"),
    ],
)
def test_a_wrong_completions_field_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(BatonError) as caught:
        _completion(**fields)
    assert caught.value.param == param


def test_what_clients_send_is_taken() -> None:
    body = _chat(
        messages=[
            {"role": "developer", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "Al"},
            {"role": "assistant", "content": None},
            {"role": "assistant"},
        ],
        max_tokens=5,
        max_completion_tokens=7,
        seed=-(1 << 63),
        stop=["a", "a", "b"],
        logit_bias={"7": -100},
        top_k=-1,
        user="me",
        unknown={"x": [1]},
        tools=[],
        tool_choice="none",
        response_format={"type": "text"},
        temperature=None,
        logprobs=True,
    )
    assert [m["role"] for m in body.messages] == ["system", "user", "assistant", "assistant"]
    assert [m["content"] for m in body.messages] == ["be brief", "ab", "", ""]
    assert body.messages[1]["name"] == "Al"
    assert (body.options.max_tokens, body.options.seed, body.options.top_k) == (7, -(1 << 63), 0)
    assert body.options.stop == ("a", "b")
    assert body.options.logit_bias == {7: -100.0}
    assert body.options.temperature is None
    assert body.options.logprobs == 0


def test_roles_and_tool_messages_become_what_templates_expect() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": [1]}'}}
    broken = {"id": "c2", "function": {"name": "g", "arguments": "{x"}}
    body = _chat(
        messages=[
            {"role": "user", "content": "hi", "name": None},
            {"role": "assistant", "content": None, "tool_calls": [call, broken]},
            {"role": "tool", "content": [{"type": "text", "text": "4"}], "tool_call_id": "c1"},
            {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": ""}},
            {"role": "function", "name": "f", "content": None},
        ],
    )
    assert body.messages == (
        {"role": "user", "content": "hi"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"x": [1]}}},
                {"id": "c2", "type": "function", "function": {"name": "g", "arguments": "{x"}},
            ],
        },
        {"role": "tool", "content": "4", "tool_call_id": "c1"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {}}}],
        },
        {"role": "function", "content": "", "name": "f"},
    )


def test_a_whole_number_is_an_integer_however_it_is_written() -> None:
    options = _chat(max_tokens=5.0, seed=-7.0, n=2.0).options
    assert (options.max_tokens, options.seed, options.n) == (5, -7, 2)
    assert isinstance(options.max_tokens, int)


def test_the_template_is_told_where_the_answer_begins() -> None:
    last: list[Any] = [*HI, {"role": "assistant", "content": "so"}]
    assert (_chat().generation_prompt, _chat().continue_final) == (True, False)
    assert not _chat(add_generation_prompt=False).generation_prompt
    body = _chat(messages=last, continue_final_message=True)
    assert (body.generation_prompt, body.continue_final) == (False, True)


def test_prompts_in_every_shape() -> None:
    assert _completion(prompt="a").prompts == ("a",)
    assert _completion(prompt=["a", "b"]).prompts == ("a", "b")
    assert _completion(prompt=[1, 2]).prompts == ((1, 2),)
    assert _completion(prompt=[[1], [2, 3]]).prompts == ((1,), (2, 3))
    assert _completion(prompt="a", echo=True, max_tokens=0).options.max_tokens == 0


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
_FIELDS = [
    "model", "messages", "prompt", "temperature", "top_p", "top_k", "n", "stop", "seed", "logit_bias", "max_tokens",
    "logprobs", "top_logprobs", "stream", "stream_options", "response_format", "tools", "min_tokens", "echo",
    "stop_token_ids", "suffix", "best_of", "chat_template_kwargs", "continue_final_message", "skip_special_tokens",
]  # fmt: skip


@given(st.dictionaries(st.sampled_from(_FIELDS), _json, max_size=6))
def test_nothing_but_a_refusal_comes_of_nonsense(fields: dict[str, Any]) -> None:
    for parse in (parse_chat, parse_completion):
        try:
            parse({"model": "m", "messages": HI, "prompt": "p"} | fields, VOCAB)
        except BatonError as error:
            assert error.reason is Reason.INVALID_REQUEST  # noqa: PT017
