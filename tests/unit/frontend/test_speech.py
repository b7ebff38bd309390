# ruff: noqa: E501 - bodies as clients write them
"""Tools, thoughts and structured output by the official client: what a worker is asked, and what a client is told."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import openai
import pytest

from baton.errors import BatonError
from baton.grammar.compile import Vocabulary
from baton.grammar.follow import Follower
from baton.model.card import Model
from baton.model.template import ChatTemplate
from baton.v1 import worker_pb2
from services.frontend.asked import Api, Reading, Unread, pack, unpack
from services.frontend.parsers.choose import TOOLS
from tests.unit.frontend.peers import HANG_S, ScriptedWorker, Stack, running
from tests.unit.frontend.test_api import budget, says

HI: list[Any] = [{"role": "user", "content": "hi"}]
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/city"}, "days": {"type": "integer"}},
    "required": ["city"],
    "$defs": {"city": {"type": "string", "maxLength": 20}},
}
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {"name": "get_weather", "description": "The weather.", "parameters": PARAMETERS},
}
ANSWER = {"type": "object", "properties": {"answer": {}}, "required": ["answer"], "additionalProperties": False}
NOW: dict[str, Any] = {"type": "function", "function": {"name": "now"}}
TWO = (
    'Let me see.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich 🙂"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now"}\n</tool_call>'
)

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
async def stack(model: Model) -> AsyncIterator[Stack]:
    async with running(model, ScriptedWorker("merged-1", says(model, TWO))) as stack:
        yield stack


def client(stack: Stack) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="x", max_retries=0, timeout=HANG_S)


def asked(stack: Stack) -> worker_pb2.Attempt:
    return stack.workers[0].attempts[-1].message


async def test_calls_in_a_whole_answer(stack: Stack, model: Model) -> None:
    answer = await client(stack).chat.completions.create(model=model.name, messages=HI, tools=[WEATHER, NOW])
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Let me see."
    calls: Any = choice.message.tool_calls
    assert [(c.type, c.function.name, c.function.arguments) for c in calls] == [
        ("function", "get_weather", '{"city": "Zürich 🙂"}'),
        ("function", "now", "{}"),
    ]
    assert len({c.id for c in calls}) == 2
    prompt = model.tokenizer.decode(asked(stack).prompt_ids, skip_special=False)
    assert '"name": "get_weather"' in prompt  # this model's template has no tools: a system message tells them
    assert not asked(stack).sampling.HasField("grammar")


async def test_calls_in_a_stream(stack: Stack, model: Model) -> None:
    stream = await client(stack).chat.completions.create(
        model=model.name, messages=HI, tools=[WEATHER, NOW], stream=True, logprobs=True
    )
    chunks = [chunk.choices[0] async for chunk in stream]
    assert "".join(c.delta.content or "" for c in chunks) == "Let me see."
    parts = [part for c in chunks for part in c.delta.tool_calls or ()]
    assert [(p.index, p.function.name, bool(p.id)) for p in parts if p.function and p.function.name] == [
        (0, "get_weather", True),
        (1, "now", True),
    ]
    arguments = ["", ""]
    for part in parts:
        assert part.function is not None
        arguments[part.index] += part.function.arguments or ""
    assert arguments == ['{"city": "Zürich 🙂"}', "{}"]
    assert sum(p.index == 0 for p in parts) > 4
    assert [c.finish_reason for c in chunks if c.finish_reason] == ["tool_calls"]


async def test_without_tools_it_is_text(stack: Stack, model: Model) -> None:
    for more in ({}, {"tools": [WEATHER], "tool_choice": "none"}):
        answer = await client(stack).chat.completions.create(model=model.name, messages=HI, **more)  # type: ignore[call-overload]
        assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (TWO, "stop")
        assert answer.choices[0].message.tool_calls is None


async def test_named_ends_with_stop_and_truncated_with_length(model: Model) -> None:
    cut = '<tool_call>\n{"name": "get_weather", "arguments": {"ci'
    named: Any = {"type": "function", "function": {"name": "get_weather"}}
    for text, eos, choice, reason in ((TWO, True, named, "stop"), (cut, False, "required", "length")):
        async with running(model, ScriptedWorker("merged-1", says(model, text, eos=eos))) as stack:
            answer = await client(stack).chat.completions.create(
                model=model.name,
                messages=HI,
                tools=[WEATHER, NOW],
                tool_choice=choice,
                max_tokens=500 if eos else budget(model, text),
            )
            assert answer.choices[0].finish_reason == reason
            calls: Any = answer.choices[0].message.tool_calls
            assert calls[0].function.name == "get_weather"
            assert asked(stack).sampling.grammar.kind == "grammar"


async def test_thoughts(model: Model) -> None:
    text = '<think>\nShe asks.\n</think>\n\n{"a": 1}'
    async with running(model, ScriptedWorker("merged-1", says(model, text)), reasoning="think") as stack:
        more: Any = {"response_format": {"type": "json_object"}}
        answer = await client(stack).chat.completions.create(model=model.name, messages=HI, **more)
        message: Any = answer.choices[0].message
        assert (message.reasoning_content, message.reasoning, message.content) == ("She asks.", "She asks.", '{"a": 1}')
        grammar = asked(stack).sampling.grammar
        assert (grammar.kind, grammar.after, grammar.opening) == ("json", "</think>", "<think>")
        stream = await client(stack).chat.completions.create(model=model.name, messages=HI, stream=True)
        deltas: list[Any] = [chunk.choices[0].delta async for chunk in stream]
        assert "".join(getattr(d, "reasoning_content", None) or "" for d in deltas) == "She asks."
        assert "".join(d.content or "" for d in deltas) == '{"a": 1}'


async def test_what_a_worker_is_asked(stack: Stack, model: Model) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    cases: list[tuple[dict[str, Any], str, str]] = [
        ({"response_format": {"type": "json_object"}}, "json", '{"type":"object"}'),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}, "json", json.dumps(schema)),
        ({"extra_body": {"structured_outputs": {"regex": "a+"}}}, "regex", "a+"),
        ({"extra_body": {"guided_choice": ["x", "y"]}}, "choice", '["x", "y"]'),
        ({"extra_body": {"guided_grammar": 'root ::= "a"'}}, "grammar", 'root ::= "a"'),
        ({"extra_body": {"guided_json": schema}}, "json", json.dumps(schema)),
    ]  # fmt: skip
    for more, kind, text in cases:
        await client(stack).chat.completions.create(model=model.name, messages=HI, **more)
        assert (asked(stack).sampling.grammar.kind, asked(stack).sampling.grammar.text) == (kind, text)
    await client(stack).completions.create(model=model.name, prompt="x", extra_body={"guided_regex": "b"})
    assert asked(stack).sampling.grammar.text == "b"


BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}}},
     "response_format", "nonsense"),
    ({"guided_regex": "("}, "guided_regex", "unclosed group"),
    ({"guided_grammar": "start: foo"}, "guided_grammar", "unknown name"),
    ({"guided_json": "{"}, "guided_json", "Expecting"),
    ({"structured_outputs": {"json": {"oneOf": [{}, {"minLength": 2}]}}}, "structured_outputs.json", "oneOf"),
    ({"guided_regex": "a" * 300_000}, "guided_regex", "bytes"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "objekt"}}}]},
     "tools[0].function.parameters", "'type'"),
    ({"tools": [NOW, {"type": "function", "function": {"name": "f", "parameters": []}}]},
     "tools[1].function.parameters", "object"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": 3}}}}]},
     "tools[0].function.parameters", "properties.a"),
    ({"tools": [NOW, {"type": "function", "function": {"name": "f", "parameters":
      {"type": "object", "properties": {"a": {"pattern": "(?=x)", "type": "string"}}}}}], "tool_choice": "required"},
     "tools[1].function.parameters", "look-around"),
    ({"tools": [NOW], "tool_choice": {"type": "function", "function": {"name": "then"}}}, "tool_choice", "then"),
    ({"tool_choice": "required"}, "tool_choice", "tools"),
    ({"tools": [NOW, NOW]}, "tools[1].function.name", "now"),
    ({"tools": [{"type": "function", "function": {"name": "bad name"}}]}, "tools[0].function.name", "letters"),
    ({"tools": [NOW], "guided_regex": "a"}, "guided_regex", "tools"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param", "words"), BAD)
def test_refused_before_any_worker(
    model: Model, reading: Reading, fields: dict[str, Any], param: str, words: str
) -> None:
    body = json.dumps({"model": model.name, "messages": HI} | fields).encode()
    for _ in range(2):  # known the second time
        with pytest.raises(BatonError) as refused:
            reading.read(Unread(body, Api.CHAT, 2048))
        assert refused.value.param == param
        assert words in refused.value.message
        assert refused.value.reason.spec.http_status == 400


@pytest.mark.parametrize("depth", [900, 1000, 1015])
def test_deep_json_is_an_answer_or_a_refusal(model: Model, reading: Reading, depth: int) -> None:
    """What parses may still be too deep for what writes it again."""
    deep = "[" * depth + "]" * depth
    schema = f'{{"type": "json_schema", "json_schema": {{"name": "x", "schema": {{"default": {deep}}}}}}}'
    arguments = json.dumps(f'{{"a": {deep}}}')
    call = f'{{"function": {{"name": "f", "arguments": {arguments}}}, "id": "1", "type": "function"}}'
    for fields in (
        f'"messages": {json.dumps(HI)}, "response_format": {schema}',
        f'"messages": [{json.dumps(HI[0])}, {{"role": "assistant", "tool_calls": [{call}]}}]',
    ):
        with contextlib.suppress(BatonError):
            reading.read(Unread(f'{{"model": "{model.name}", {fields}}}'.encode(), Api.CHAT, 8192))


def test_any_json_beside_tools_that_may_be_called(model: Model, reading: Reading) -> None:
    body = {"model": model.name, "messages": HI, "tools": [NOW], "guided_json": "true"}
    assert reading.read(Unread(json.dumps(body).encode(), Api.CHAT, 2048)).grammar is not None


def test_a_tool_that_takes_one_of_several_forms(model: Model, reading: Reading) -> None:
    forms = [{"properties": {name: {"type": "string"}}, "required": [name]} for name in ("a", "b")]
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "anyOf": forms}}}
    body = {"model": model.name, "messages": HI, "tools": [tool], "tool_choice": "required"}
    assert reading.read(Unread(json.dumps(body).encode(), Api.CHAT, 2048)).grammar is not None


@pytest.fixture(scope="module")
def vocabulary(model: Model) -> Vocabulary:
    return Vocabulary(lambda: model.tokenizer, model.tokenizer.vocab_size, model.generation.eos_ids)


@pytest.fixture(scope="module")
def reading(model: Model) -> Reading:
    return Reading(model)


@pytest.mark.parametrize("parser", TOOLS)
@pytest.mark.parametrize("choice", ["required", "named", "one", "auto"])
def test_the_grammar_of_calls_is_what_the_parser_reads(
    model: Model, vocabulary: Vocabulary, parser: str, choice: str
) -> None:
    """The written form follows it to the end, and a wrong function, argument or beginning does not."""
    reading = Reading(model, tools=parser)
    wishes: dict[str, dict[str, Any]] = {
        "required": {"tool_choice": "required"},
        "named": {"tool_choice": {"type": "function", "function": {"name": "get_weather"}}},
        "one": {"tool_choice": "required", "parallel_tool_calls": False},
        "auto": {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": ANSWER}}},
    }
    body = {"model": model.name, "messages": HI, "tools": [WEATHER, NOW], **wishes[choice]}
    found = reading.read(Unread(json.dumps(body).encode(), Api.CHAT, 2048))
    assert unpack(pack(found)) == found
    assert found.grammar is not None
    tokenizer = model.tokenizer
    program = vocabulary.compile(found.grammar)
    call = {"name": "get_weather", "arguments": {"city": "Bern", "days": 3}}
    other = {"name": "now", "arguments": {}}

    def follows(text: str) -> bool:
        output: list[int] = []
        follower = Follower(program)
        for token in tokenizer.encode(text, add_special=False):
            if not follower.allowed(output, tokenizer.vocab_size)[token]:
                return False
            output.append(token)
        return bool(follower.allowed(output, tokenizer.vocab_size)[model.generation.eos_ids[0]])

    write = TOOLS[parser].write
    single = write([call]) if parser != "json" or choice in ("named", "one") else f"[{write([call])}]"
    assert follows(single)
    assert follows(write([call, other])) == (choice in ("required", "auto"))
    assert not follows(single.replace("get_weather", "get_whether"))
    assert not follows(single.replace('"Bern"', "5"))
    assert not follows(single.replace('"city"', '"town"'))
    assert not follows("Hello" + single)
    assert follows('{"answer": [1]}') == (choice == "auto")


def test_results_and_calls_of_earlier_turns(model: Model, reading: Reading) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "now", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "system", "content": "Be brief."},
        *HI,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "12:00"},
        {"role": "tool", "tool_call_id": "2", "content": "noon"},
    ]
    body = json.dumps({"model": model.name, "messages": messages, "tools": [NOW]}).encode()
    text = reading.read(Unread(body, Api.CHAT, 2048)).prompts[0].text
    assert text.count("<|im_start|>system") == 1
    assert "Be brief.\n\nYou can call functions." in text
    assert '<|im_start|>assistant\n<tool_call>\n{"name": "now", "arguments": {"a": 1}}\n</tool_call><|im_end|>' in text
    assert "<|im_start|>user\n<tool_response>\n12:00\n</tool_response>\n<tool_response>\nnoon\n</tool_response>" in text


def test_a_template_that_takes_tools_gets_them(model: Model) -> None:
    text = "{% for t in tools %}{{ t.function.name }};{% endfor %}{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function.arguments.a }}{% endfor %}{{ m.role }}:{{ m.content }}\n{% endfor %}<think>\n"
    reading = Reading(replace(model, template=ChatTemplate(text)), reasoning="think")
    call = {"id": "1", "type": "function", "function": {"name": "now", "arguments": '{"a": 7}'}}
    messages = [*HI, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "1", "content": "x"}]
    body = {"model": model.name, "messages": messages, "tools": [NOW], "tool_choice": "required"}
    found = reading.read(Unread(json.dumps(body).encode(), Api.CHAT, 2048))
    assert found.prompts[0].text == "now;user:hi\n7assistant:\ntool:x\n<think>"
    assert found.voice.opened
    assert found.grammar is not None
    assert (found.grammar.after, found.grammar.opening) == ("</think>", "")
