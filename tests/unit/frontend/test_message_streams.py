"""The checker of message streams sees every way in which one can be broken: a real stream, mutated."""

from __future__ import annotations

import asyncio
import json

import pytest

from baton.model.card import Model
from tests.message_stream import read_message_stream
from tests.unit.frontend.talks import MESSAGE_TOOLS, Mutate, double, drop, edit, mutated, record, swap
from tests.unit.frontend.test_api import HI

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(scope="module")
def recorded(model: Model) -> bytes:
    """A thought, text and two calls."""
    return asyncio.run(record(model, "/v1/messages", max_tokens=500, messages=HI, tools=MESSAGE_TOOLS))


def test_a_stream_of_ours_has_no_fault(recorded: bytes) -> None:
    stream = read_message_stream(recorded)
    assert stream.faults == []
    assert [block["type"] for block in stream.blocks] == ["thinking", "text", "tool_use", "tool_use"]
    assert [block["said"] for block in stream.blocks[:2]] == ["She asks.", "Let me see 😀."]
    assert json.loads(stream.blocks[2]["said"]) == {"city": "Zürich 🙂"}
    assert (stream.blocks[3]["name"], stream.blocks[3]["said"]) == ("now", "{}")
    assert stream.reason == "tool_use"
    assert b"event: ping\n" in recorded
    assert recorded.count(b"text_delta") > 3
    assert recorded.count(b"input_json_delta") > 3


START, DELTA, STOP = "content_block_start", "content_block_delta", "content_block_stop"
CASES: dict[str, Mutate] = {
    **{f"{kind} dropped": drop(kind) for kind in ("message_start", START, STOP, "message_delta", "message_stop")},
    **{f"{kind} doubled": double(kind) for kind in ("message_start", START, STOP, "message_delta", "message_stop")},
    **{f"{kind} early": swap(kind, 1) for kind in (START,)},
    "a block that stops twice, the last": double(STOP, 3),
    "a block that does not stop": drop(STOP, 3),
    "message_stop early": swap("message_stop"),
    "message_delta early": swap("message_delta"),
    "signature dropped": lambda events: (
        events.pop(next(i for i, event in enumerate(events) if b"signature_delta" in event)) and None
    ),
    "signature doubled": lambda events: events.insert(
        next(i for i, event in enumerate(events) if b"signature_delta" in event),
        next(event for event in events if b"signature_delta" in event),
    ),
    "another block": edit(DELTA, lambda e: e.update(index=1)),
    "a block at another place": edit(START, lambda e: e.update(index=0), 1),
    "another block stops": edit(STOP, lambda e: e.update(index=2), 1),
    "text in a thought": edit(DELTA, lambda e: e.update(delta={"type": "text_delta", "text": "x"})),
    "a block that begins with text": edit(START, lambda e: e["content_block"].update(text="x"), 1),
    "an input that begins": edit(START, lambda e: e["content_block"].update(input={"a": 1}), 2),
    "an input that is not JSON": lambda events: (
        events.pop(next(i for i, event in enumerate(events) if b"input_json_delta" in event)) and None
    ),
    "a reason at the beginning": edit("message_start", lambda e: e["message"].update(stop_reason="end_turn")),
    "content at the beginning": edit("message_start", lambda e: e["message"].update(content=[{}])),
    "another role": edit("message_start", lambda e: e["message"].update(role="user")),
    "an unknown reason": edit("message_delta", lambda e: e["delta"].update(stop_reason="stop")),
    "no reason": edit("message_delta", lambda e: e["delta"].update(stop_reason=None)),
    "a sequence without its reason": edit("message_delta", lambda e: e["delta"].update(stop_sequence="x")),
    "a reason without its sequence": edit("message_delta", lambda e: e["delta"].update(stop_reason="stop_sequence")),
    "other input tokens": edit("message_delta", lambda e: e["usage"].update(input_tokens=9999)),
    "too much thinking": edit("message_delta", lambda e: e["usage"].update(output_tokens=0)),
    "a replacement character": edit(DELTA, lambda e: e["delta"].update(thinking="\ufffd")),
    "a name that is not the type": edit(DELTA, lambda e: e.update(type=STOP)),
    "an error": lambda events: events.insert(4, b'event: error\ndata: {"type": "error", "error": {}}'),
    "something else": lambda events: events.insert(4, b"data: [DONE]"),
    "no JSON": lambda events: events.insert(4, b"event: ping\ndata: {"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_mutated_stream_is_caught(recorded: bytes, name: str) -> None:
    changed = mutated(recorded, CASES[name])
    assert changed != recorded
    assert read_message_stream(changed).faults != []


@pytest.mark.parametrize("cut", [1, 2, 20])
def test_a_stream_that_breaks_off_is_caught(recorded: bytes, cut: int) -> None:
    assert read_message_stream(recorded[:-cut]).faults != []
