# ruff: noqa: E501 - texts as models write them
"""One suite for every parser: however a text is cut into pieces, the parts are the same; and what each must find."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.frontend.parsers.choose import REASONING, TOOLS, reasoning_parser, tool_parser
from services.frontend.parsers.events import Arguments, Call, Event, Text, Thought
from services.frontend.parsers.reasoning import ReasoningParser
from services.frontend.speech import Speech, Voice

FUNCTIONS = ("get_weather", "get", "add")
WEATHER = {"name": "get_weather", "arguments": {"city": 'Zürich "Ü" 🙂', "days": [1, 2.5, {"a": "}"}], "ok": None}}
EMPTY = {"name": "get", "arguments": {}}
NASTY = st.lists(
    st.sampled_from(
        ["<tool_call>", "</tool_call>", "<tool", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "```json\n", "```", "{", "}", "[",
         "]", ",", ";", ":", '"', "\\", "name", '"name"', '"arguments":', '"parameters":', "get_weather", "get", '"get"', "null",
         "{}", " ", "\n", "é🙂", "x", "12", "<think>", "</think>", '{"name": "get", "arguments": {"a": 1}}',
         '{"arguments": {"b": "}"}, "name": "add"}', '{"name": "add"}', '{"name": "unknown", "arguments": {}}']
    ),
    max_size=14,
).map("".join)  # fmt: skip


@dataclass
class Parts:
    """All that a parser gave."""

    text: str = ""
    thought: str = ""
    calls: list[list[str]] = field(default_factory=list)


def gathered(events: Sequence[Event]) -> Parts:
    parts = Parts()
    for event in events:
        match event:
            case Text():
                parts.text += event.text
            case Thought():
                parts.thought += event.text
            case Call():
                parts.calls.append([event.name, ""])
            case Arguments():
                parts.calls[-1][1] += event.text
    return parts


Parse = Callable[[Sequence[str]], Parts]


def parse_with(name: str) -> Parse:
    def parse(pieces: Sequence[str]) -> Parts:
        parser = TOOLS[name](FUNCTIONS)
        return gathered([event for piece in pieces for event in parser.push(piece)] + parser.end())

    return parse


def think_with(name: str, open: bool) -> Parse:
    def parse(pieces: Sequence[str]) -> Parts:
        parser = ReasoningParser(REASONING[name], open=open)
        return gathered([event for piece in pieces for event in parser.push(piece)] + parser.end())

    return parse


def both(pieces: Sequence[str]) -> Parts:
    """A thought and calls, as an answer has them."""
    speech = Speech(Voice(tools="hermes", functions=FUNCTIONS, reasoning="think"))
    return gathered([event for piece in pieces for event in speech.push(piece)] + speech.end())


PARSERS: dict[str, Parse] = {
    **{name: parse_with(name) for name in TOOLS},
    "thoughts": think_with("think", False),
    "opened thoughts": think_with("think", True),
    "both": both,
}


@st.composite
def cut(draw: st.DrawFn, texts: st.SearchStrategy[str]) -> tuple[str, list[str]]:
    """A text, and the same in pieces."""
    text = draw(texts)
    places = sorted(draw(st.sets(st.integers(0, len(text)), max_size=len(text))))
    edges = [0, *places, len(text)]
    return text, [text[a:b] for a, b in itertools.pairwise(edges)]


@pytest.mark.parametrize("parser", PARSERS)
@settings(max_examples=100, deadline=None)
@given(case=cut(NASTY))
def test_any_cutting_gives_the_same(parser: str, case: tuple[str, list[str]]) -> None:
    text, pieces = case
    whole = PARSERS[parser]([text])
    assert PARSERS[parser](pieces) == whole
    assert PARSERS[parser](list(text)) == whole


@pytest.mark.parametrize("name", TOOLS)
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_calls_as_the_model_writes_them(name: str, data: st.DataObject) -> None:
    """What `write` writes is read back: names, and arguments that mean the same."""
    values = st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=8), lambda v: st.lists(v, max_size=3), max_leaves=6
    )
    arguments = st.dictionaries(st.text(max_size=6), values, max_size=4)
    call = st.fixed_dictionaries({"name": st.sampled_from(FUNCTIONS), "arguments": arguments})
    calls = data.draw(st.lists(call, min_size=1, max_size=4))
    _, pieces = data.draw(cut(st.just(TOOLS[name].write(calls))))
    parts = parse_with(name)(pieces)
    assert parts.text.strip() == ""
    assert [{"name": n, "arguments": json.loads(a)} for n, a in parts.calls] == calls


@pytest.mark.parametrize("name", TOOLS)
@settings(max_examples=30, deadline=None)
@given(text=st.text(alphabet=st.characters(exclude_characters="<[{`"), max_size=40))
def test_text_stays_text(name: str, text: str) -> None:
    assert parse_with(name)([text]) == Parts(text)


@pytest.mark.parametrize(
    ("name", "text", "content", "calls"),
    [
        ("hermes", 'Let me see.\n<tool_call>\n{"name": "get", "arguments": {"a": 1}}\n</tool_call>', "Let me see.", [["get", '{"a": 1}']]),
        ("hermes", '<tool_call>{"arguments": {"a": "</tool_call>"}, "name": "get"}</tool_call>', "", [["get", '{"a": "</tool_call>"}']]),
        ("hermes", '<tool_call>[{"name": "get"}, {"name": "add", "arguments": null}]</tool_call> done', "done", [["get", "{}"], ["add", "{}"]]),
        ("hermes", '<tool_call>{"name": "get", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [["get", '{"a": 1}']]),
        ("hermes", '<tool_call>{"name": "get", "arguments": {"a": 1', "", [["get", '{"a": 1']]),
        ("hermes", '<tool_call>{"name": "get", "arguments": ""}</tool_call>', "", [["get", "{}"]]),
        ("hermes", '<tool_call>{"name": "get", "arguments": "\\ud83d"}</tool_call>', "", [["get", "?"]]),
        ("hermes", "<tool_call>nothing</tool_call>", "<tool_call>nothing</tool_call>", []),
        ("hermes", '<tool_call>{"name": "other", "arguments": {}}</tool_call>', '<tool_call>{"name": "other", "arguments": {}}</tool_call>', []),
        ("hermes", "a < b <tool", "a < b <tool", []),
        ("llama3", '{"name": "get", "parameters": {"a": {}}}; {"name": "add", "parameters": {}}', "", [["get", '{"a": {}}'], ["add", "{}"]]),
        ("llama3", '<|python_tag|>{"type": "function", "name": "get", "parameters": {}}', "", [["get", "{}"]]),
        ("llama3", '{"name": "Bob", "age": 3}', '{"name": "Bob", "age": 3}', []),
        ("llama3", ' {"a": {"name": "get"}} ', ' {"a": {"name": "get"}} ', []),
        ("mistral", '[TOOL_CALLS] [{"name": "get", "arguments": {"a": [1]}}, {"name": "add"}]', "", [["get", '{"a": [1]}'], ["add", "{}"]]),
        ("mistral", 'So:[TOOL_CALLS]get_weather[ARGS]{"a": "]"}[TOOL_CALLS]get[ARGS]{}', "So:", [["get_weather", '{"a": "]"}'], ["get", "{}"]]),
        ("mistral", "[TOOL_CALLS]what[ARGS]{}", "[TOOL_CALLS]what[ARGS]{}", []),
        ("json", '```json\n[{"name": "get", "arguments": {}}]\n```', "", [["get", "{}"]]),
        ("json", '```\n{"name": "get", "arguments": {}}\n``` So.', "So.", [["get", "{}"]]),
        ("json", '```\n{"name": "get", "arguments": {}}\n``', "``", [["get", "{}"]]),
        ("json", '{"name": "get", "arguments": {}}\n```', "```", [["get", "{}"]]),
        ("json", '{"name": "add", "arguments": {"x": -1.5e3}}', "", [["add", '{"x": -1.5e3}']]),
        ("json", '[1, 2] is a list', "[1, 2] is a list", []),
        ("json", '{"answer": 42}', '{"answer": 42}', []),
    ],
)  # fmt: skip
def test_what_is_found(name: str, text: str, content: str, calls: list[list[str]]) -> None:
    assert parse_with(name)([text]) == Parts(content, "", calls)


@pytest.mark.parametrize(
    ("open", "text", "thought", "content"),
    [
        (False, "<think>\nhm\n</think>\n\nYes", "hm", "Yes"),
        (False, "Yes <think>no</think>", "", "Yes <think>no</think>"),
        (False, "<think>cut of", "cut of", ""),
        (False, "<thin", "", "<thin"),
        (True, "hm</think>Yes", "hm", "Yes"),
        (True, "<think>hm</think> Yes", "hm", "Yes"),
        (True, "</think>Yes", "", "Yes"),
        (True, "never closed", "never closed", ""),
    ],
)
def test_thoughts(open: bool, text: str, thought: str, content: str) -> None:
    assert think_with("think", open)([text]) == Parts(content, thought)


@pytest.mark.parametrize("name", TOOLS)
def test_the_name_comes_once_and_arguments_as_they_come(name: str) -> None:
    parser = TOOLS[name](FUNCTIONS)
    events = [event for char in TOOLS[name].write([WEATHER]) for event in parser.push(char)] + parser.end()
    assert [event for event in events if isinstance(event, Call)] == [Call("get_weather")]
    first = next(i for i, event in enumerate(events) if isinstance(event, Call))
    assert sum(isinstance(event, Arguments) for event in events[first:]) > 20


def test_chosen_by_the_template() -> None:
    assert tool_parser("auto", "{% for m in messages %}<tool_call>") == "hermes"
    assert tool_parser("auto", "<|start_header_id|> <|python_tag|>") == "llama3"
    assert tool_parser("auto", "[AVAILABLE_TOOLS] [TOOL_CALLS]") == "mistral"
    assert tool_parser("auto", "<|im_start|>") == "hermes"
    assert tool_parser("json", "[TOOL_CALLS]") == "json"
    assert reasoning_parser("auto", "<|im_start|>") == ""
    assert reasoning_parser("auto", "{{ '<think>\\n' }} </think>") == "think"
    assert reasoning_parser("none", "</think>") == ""
    assert reasoning_parser("think", "") == "think"
