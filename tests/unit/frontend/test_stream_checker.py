"""The checker of streams sees every way in which one can be broken: a real stream, mutated."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from baton.model.card import Model
from tests.sse import read_stream
from tests.unit.frontend.peers import HANG_S, ScriptedWorker, running
from tests.unit.frontend.test_api import HI, TEXT, says

OUTPUTS = 2
Events = list[bytes]


@pytest.fixture(scope="module")
def recorded(model: Model) -> dict[bool, bytes]:
    """A chat's stream and a completion's, of two outputs with usage."""
    return asyncio.run(_record(model))


async def _record(model: Model) -> dict[bool, bytes]:
    raw = {}
    more = {"model": model.name, "n": OUTPUTS, "stream": True, "stream_options": {"include_usage": True}}
    worker = ScriptedWorker("merged-1", says(model))
    async with running(model, worker) as stack, httpx.AsyncClient(timeout=HANG_S) as http:
        for chat, path in ((True, "chat/completions"), (False, "completions")):
            asked = {"messages": HI} if chat else {"prompt": "hi", "max_tokens": 100}
            raw[chat] = (await http.post(f"{stack.url}/v1/{path}", json=asked | more)).content
    return raw


def check(raw: bytes, chat: bool) -> list[str]:
    return read_stream(raw, chat=chat, outputs=OUTPUTS, usage=True).faults


@pytest.mark.parametrize("chat", [True, False])
def test_a_stream_of_ours_has_no_fault(recorded: dict[bool, bytes], chat: bool) -> None:
    stream = read_stream(recorded[chat], chat=chat, outputs=OUTPUTS, usage=True)
    assert stream.faults == []
    assert stream.texts == {0: TEXT, 1: TEXT}
    assert stream.finishes == {0: "stop", 1: "stop"}


# ---- mutations of a list of events


def _edit(
    change: Callable[[dict[str, Any]], None], which: Callable[[dict[str, Any]], bool]
) -> Callable[[Events], None]:
    """Change the first chunk for which `which` holds."""

    def mutate(events: Events) -> None:
        for place, event in enumerate(events):
            chunk = _chunk(event)
            if chunk is not None and which(chunk):
                change(chunk)
                events[place] = b"data: " + json.dumps(chunk, ensure_ascii=False).encode()
                return
        raise LookupError("nothing to mutate")

    return mutate


def _chunk(event: bytes) -> dict[str, Any] | None:
    return None if b"[DONE]" in event else json.loads(event.removeprefix(b"data: "))


def _place(events: Events, which: Callable[[dict[str, Any]], bool]) -> int:
    return next(i for i, event in enumerate(events) if (chunk := _chunk(event)) is not None and which(chunk))


def _double(which: Callable[[dict[str, Any]], bool]) -> Callable[[Events], None]:
    return lambda events: events.insert(_place(events, which), events[_place(events, which)])


def _drop(which: Callable[[dict[str, Any]], bool]) -> Callable[[Events], None]:
    return lambda events: events.pop(_place(events, which)) and None


def _has_role(chunk: dict[str, Any]) -> bool:
    return any("role" in choice.get("delta", {}) for choice in chunk["choices"])


def _has_text(chunk: dict[str, Any]) -> bool:
    return any(choice.get("delta", {}).get("content") or choice.get("text") for choice in chunk["choices"])


def _has_finish(chunk: dict[str, Any]) -> bool:
    return any(choice["finish_reason"] for choice in chunk["choices"])


def _has_usage(chunk: dict[str, Any]) -> bool:
    return bool(chunk.get("usage"))


def _set_text(chunk: dict[str, Any], text: str) -> None:
    choice = chunk["choices"][0]
    if "delta" in choice:
        choice["delta"]["content"] = text
    else:
        choice["text"] = text


def _swap_finish_and_text(events: Events) -> None:
    finish = events.pop(_place(events, _has_finish))
    events.insert(_place(events, _has_text), finish)


def _split_character(events: Events) -> None:
    """The bytes of one character in two events."""
    place = next(i for i, event in enumerate(events) if "😀".encode() in event)
    cut = events[place].index("😀".encode()) + 2
    head, tail = events[place][:cut], events[place][cut:]
    prefix = head[: head.rindex(b'"') + 1]
    events[place : place + 1] = [head + tail[tail.index(b'"') :], prefix + tail]


MUTATIONS: dict[str, Callable[[Events], None]] = {
    "finish dropped": _drop(_has_finish),
    "finish doubled": _double(_has_finish),
    "finish unknown": _edit(lambda c: c["choices"][0].update(finish_reason="done"), _has_finish),
    "text after the end": _swap_finish_and_text,
    "another index": _edit(lambda c: c["choices"][0].update(index=OUTPUTS), _has_text),
    "one output told as another": _edit(lambda c: c["choices"][0].update(index=1), _has_finish),
    "replacement character": _edit(lambda c: _set_text(c, "w\ufffdrld"), _has_text),
    "character split": _split_character,
    "no [DONE]": lambda events: events.pop() and None,
    "[DONE] doubled": lambda events: events.append(b"data: [DONE]"),
    "[DONE] early": lambda events: events.insert(2, events.pop()),
    "more after [DONE]": lambda events: events.append(events[1]),
    "usage dropped": _drop(_has_usage),
    "usage doubled": _double(_has_usage),
    "usage with choices": _edit(lambda c: c.update(choices=[{"index": 0, "finish_reason": None}]), _has_usage),
    "usage wrong": _edit(lambda c: c["usage"].update(total_tokens=1), _has_usage),
    "usage early": _edit(lambda c: c.update(usage={"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2,
                                                   "prompt_tokens_details": {"cached_tokens": 0}}), _has_text),
    "too many cached": _edit(lambda c: c["usage"]["prompt_tokens_details"].update(cached_tokens=999), _has_usage),
    "usage missing in a chunk": _edit(lambda c: c.pop("usage"), _has_text),
    "another id": _edit(lambda c: c.update(id="other"), _has_text),
    "another model": _edit(lambda c: c.update(model="other"), _has_text),
    "another object": _edit(lambda c: c.update(object="chat.completion"), _has_text),
    "an error": lambda events: events.insert(3, b'data: {"error": {"message": "x"}}'),
    "not JSON": lambda events: events.insert(3, b"data: {"),
    "no data": lambda events: events.insert(3, b'{"choices": []}'),
    "a chunk without choices": lambda events: events.insert(3, events[_place(events, _has_usage)].replace(b"1", b"0")),
    "a line too many": lambda events: events.insert(3, events[2] + b"\n" + events[2]),
}  # fmt: skip
CHAT_ONLY: dict[str, Callable[[Events], None]] = {
    "role dropped": _edit(lambda c: c["choices"][0]["delta"].pop("role"), _has_role),
    "role chunk dropped": _drop(_has_role),
    "role doubled": _double(_has_role),
    "role again with text": _edit(lambda c: c["choices"][0]["delta"].update(role="assistant"), _has_text),
    "role of somebody else": _edit(lambda c: c["choices"][0]["delta"].update(role="user"), _has_role),
    "role late": lambda events: events.insert(_place(events, _has_text), events.pop(_place(events, _has_role))),
}
CASES = [(True, name) for name in (*MUTATIONS, *CHAT_ONLY)] + [(False, name) for name in MUTATIONS]


@pytest.mark.parametrize(("chat", "name"), CASES)
def test_a_mutated_stream_is_caught(recorded: dict[bool, bytes], chat: bool, name: str) -> None:
    events = recorded[chat].removesuffix(b"\n\n").split(b"\n\n")
    (MUTATIONS | CHAT_ONLY)[name](events)
    mutated = b"\n\n".join(events) + b"\n\n"
    assert mutated != recorded[chat]
    assert check(mutated, chat) != []


@pytest.mark.parametrize("cut", [1, 2, 20])
def test_a_stream_that_breaks_off_is_caught(recorded: dict[bool, bytes], cut: int) -> None:
    assert check(recorded[True][:-cut], True) != []
