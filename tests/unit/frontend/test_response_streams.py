"""The checker of response streams sees every way in which one can be broken: a real stream, mutated."""

from __future__ import annotations

import asyncio
import json

import pytest

from baton.model.card import Model
from tests.response_stream import read_response_stream
from tests.unit.frontend.talks import (
    RESPONSE_TOOLS,
    Events,
    Mutate,
    double,
    drop,
    edit,
    mutated,
    record,
    renumbered,
    swap,
)

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(scope="module")
def recorded(model: Model) -> bytes:
    """A thought, text and two calls."""
    body = {"input": "hi", "tools": RESPONSE_TOOLS, "include": ["message.output_text.logprobs"]}
    return asyncio.run(record(model, "/v1/responses", **body))


def test_a_stream_of_ours_has_no_fault(recorded: bytes) -> None:
    stream = read_response_stream(recorded)
    assert stream.faults == []
    assert [item["type"] for item in stream.items] == ["reasoning", "message", "function_call", "function_call"]
    thought, message, weather, now = stream.items
    assert thought["content"] == [{"type": "reasoning_text", "text": "She asks."}]
    assert message["content"][0]["text"] == stream.text == "Let me see 😀."
    assert (weather["name"], json.loads(weather["arguments"])) == ("get_weather", {"city": "Zürich 🙂"})
    assert (now["name"], now["arguments"]) == ("now", "{}")
    assert stream.response["status"] == "completed"
    assert stream.events.count("response.output_text.delta") > 3
    assert stream.events.count("response.function_call_arguments.delta") > 3


TEXT, THOUGHT, CALL = "response.output_text", "response.reasoning_text", "response.function_call_arguments"
ITEM, PART = "response.output_item", "response.content_part"


def _gap(events: Events) -> None:
    place = len(events) // 2
    renumber = renumbered(lambda _: None)
    renumber(events)
    for later in range(place, len(events)):
        number = b'"sequence_number": %d'
        events[later] = events[later].replace(number % later, number % (later + 1))


STRUCTURE: dict[str, Mutate] = {
    **{f"{kind} dropped": drop(kind) for kind in (
        "response.created", "response.in_progress", "response.completed", f"{ITEM}.added", f"{ITEM}.done",
        f"{PART}.added", f"{PART}.done", f"{TEXT}.delta", f"{TEXT}.done", f"{THOUGHT}.delta", f"{THOUGHT}.done",
        f"{CALL}.delta", f"{CALL}.done",
    )},
    **{f"{kind} doubled": double(kind) for kind in (
        "response.created", "response.in_progress", "response.completed", f"{ITEM}.added", f"{ITEM}.done",
        f"{PART}.added", f"{PART}.done", f"{TEXT}.delta", f"{TEXT}.done", f"{THOUGHT}.delta", f"{THOUGHT}.done",
        f"{CALL}.delta", f"{CALL}.done",
    )},
    **{f"{kind} early": swap(kind) for kind in (
        "response.in_progress", f"{ITEM}.done", f"{PART}.done", f"{TEXT}.done", f"{THOUGHT}.done", f"{CALL}.done",
        "response.completed",
    )},
}  # fmt: skip
CHANGES: dict[str, Mutate] = {
    "a gap in the sequence": _gap,
    "a number twice": edit(f"{TEXT}.delta", lambda e: e.update(sequence_number=e["sequence_number"] - 1)),
    "another output": edit(f"{TEXT}.delta", lambda e: e.update(output_index=e["output_index"] + 1)),
    "another item": edit(f"{TEXT}.delta", lambda e: e.update(item_id="msg_x")),
    "another part": edit(f"{TEXT}.delta", lambda e: e.update(content_index=1)),
    "another output of a call": edit(f"{CALL}.delta", lambda e: e.update(output_index=0)),
    "an item at another place": edit(f"{ITEM}.added", lambda e: e.update(output_index=7), 1),
    "text done with another text": edit(f"{TEXT}.done", lambda e: e.update(text="x")),
    "arguments done with others": edit(f"{CALL}.done", lambda e: e.update(arguments="{}")),
    "a part done with another text": edit(f"{PART}.done", lambda e: e["part"].update(text="x")),
    "an item done with another text": edit(f"{ITEM}.done", lambda e: e["item"]["content"][0].update(text="x")),
    "an item of another name": edit(f"{ITEM}.done", lambda e: e["item"].update(name="x"), 2),
    "an item of another id": edit(f"{ITEM}.done", lambda e: e["item"].update(id="x"), 2),
    "an item in progress at its end": edit(f"{ITEM}.done", lambda e: e["item"].update(status="in_progress")),
    "an item complete at its beginning": edit(f"{ITEM}.added", lambda e: e["item"].update(status="completed")),
    "an item cut in a complete response": edit(f"{ITEM}.done", lambda e: e["item"].update(status="incomplete")),
    "a replacement character": edit(f"{TEXT}.delta", lambda e: e.update(delta="\ufffd")),
    "another response": edit("response.completed", lambda e: e["response"].update(id="resp_x")),
    "another status": edit("response.completed", lambda e: e["response"].update(status="incomplete")),
    "incomplete details": edit(
        "response.completed", lambda e: e["response"].update(incomplete_details={"reason": "max_output_tokens"})
    ),
    "an error": edit("response.completed", lambda e: e["response"].update(error={"code": "x"})),
    "an item that is not in the output": edit("response.completed", lambda e: e["response"]["output"].pop()),
    "usage that does not add up": edit("response.completed", lambda e: e["response"]["usage"].update(total_tokens=1)),
    "too much reasoning": edit(
        "response.completed",
        lambda e: e["response"]["usage"]["output_tokens_details"].update(reasoning_tokens=999),
    ),
    "a name that is not the type": edit(f"{TEXT}.delta", lambda e: e.update(type=f"{TEXT}.done")),
    "something else": lambda events: events.insert(4, b"data: [DONE]"),
    "no JSON": lambda events: events.insert(4, b"event: response.created\ndata: {"),
}
CASES = {**STRUCTURE, **{f"{name}, renumbered": renumbered(one) for name, one in STRUCTURE.items()}, **CHANGES}


@pytest.mark.parametrize("name", CASES)
def test_a_mutated_stream_is_caught(recorded: bytes, name: str) -> None:
    changed = mutated(recorded, CASES[name])
    assert changed != recorded
    assert read_response_stream(changed).faults != []


@pytest.mark.parametrize("cut", [1, 2, 20])
def test_a_stream_that_breaks_off_is_caught(recorded: bytes, cut: int) -> None:
    assert read_response_stream(recorded[:-cut]).faults != []
