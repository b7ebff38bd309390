"""What tests of the Responses and the Messages API share."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import anthropic
import httpx
import openai

from baton.model.card import Model
from baton.v1 import worker_pb2
from tests.unit.frontend.peers import HANG_S, Attempt, Script, ScriptedWorker, Stack, running
from tests.unit.frontend.test_api import TEXT, says

SAID = (
    "<think>\nShe asks.\n</think>\n\nLet me see 😀.\n"
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich 🙂"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now"}\n</tool_call>'
)
"""A thought, text and two calls, with the `think` parser."""
PARAMETERS: dict[str, Any] = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
NAMED: list[dict[str, Any]] = [
    {"name": "get_weather", "description": "The weather.", "parameters": PARAMETERS},
    {"name": "now", "parameters": {"type": "object", "properties": {}}},
]
RESPONSE_TOOLS: list[Any] = [{"type": "function", "strict": False, **one} for one in NAMED]
MESSAGE_TOOLS: list[Any] = [
    {("input_schema" if name == "parameters" else name): value for name, value in one.items()} for one in NAMED
]

Events = list[bytes]
Mutate = Callable[[Events], None]
Which = Callable[[dict[str, Any]], bool]


def openai_client(stack: Stack) -> openai.AsyncOpenAI:
    http = openai.DefaultAsyncHttpxClient(verify=False, timeout=HANG_S)  # certificates take 0.2 s to load
    return openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="x", max_retries=0, http_client=http)


def anthropic_client(stack: Stack, **more: Any) -> anthropic.AsyncAnthropic:
    more = {"api_key": "x", **more}
    http = anthropic.DefaultAsyncHttpxClient(verify=False, timeout=HANG_S)
    return anthropic.AsyncAnthropic(base_url=stack.url, max_retries=0, http_client=http, **more)


def http_to(stack: Stack) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=stack.url, timeout=HANG_S, trust_env=False, verify=False)


# ---- workers that fail


async def stalls(attempt: Attempt) -> None:
    """Two tokens, and nothing after them."""
    await attempt.tokens([1000, 1001], offset=0)


def dies(model: Model) -> tuple[Script, list[int]]:
    """Says the first tokens of TEXT, and its connection breaks; the script, and those tokens."""
    ids = model.tokenizer.encode(TEXT, add_special=False)[:5]

    async def script(attempt: Attempt) -> None:
        await attempt.tokens(ids, offset=0)
        await asyncio.sleep(0.05)
        attempt.worker.cut()

    return script, ids


def fails(model: Model) -> Script:
    """Says Hello, and then that it was asked for something impossible; so does whoever goes on."""

    async def script(attempt: Attempt) -> None:
        if not attempt.message.emitted_ids:
            await attempt.tokens(model.tokenizer.encode("Hello", add_special=False), offset=0)
        await attempt.send(attempt.event(failure=worker_pb2.Event(failure={"reason": "INVALID_REQUEST"}).failure))

    return script


# ---- streams, and mutations of them


async def record(model: Model, path: str, **body: Any) -> bytes:
    """The stream of SAID that a body is answered with."""
    worker = ScriptedWorker("merged-1", says(model, SAID))
    async with running(model, worker, reasoning="think") as stack, http_to(stack) as http:
        answer = await http.post(path, json={"model": model.name, "stream": True, **body})
        assert answer.headers["content-type"].startswith("text/event-stream")
        return answer.content


def mutated(raw: bytes, mutate: Mutate) -> bytes:
    events = raw.removesuffix(b"\n\n").split(b"\n\n")
    mutate(events)
    return b"\n\n".join(events) + b"\n\n"


def is_type(kind: str, number: int = 0) -> Which:
    """The `number`-th event of that type."""
    seen = 0

    def which(event: dict[str, Any]) -> bool:
        nonlocal seen
        seen += event["type"] == kind
        return event["type"] == kind and seen == number + 1

    return which


def drop(kind: str, number: int = 0) -> Mutate:
    return lambda events: events.pop(_place(events, is_type(kind, number))) and None


def double(kind: str, number: int = 0) -> Mutate:
    def mutate(events: Events) -> None:
        place = _place(events, is_type(kind, number))
        events.insert(place, events[place])

    return mutate


def swap(kind: str, number: int = 0) -> Mutate:
    """It comes one event too early."""

    def mutate(events: Events) -> None:
        place = _place(events, is_type(kind, number))
        events[place - 1 : place + 1] = [events[place], events[place - 1]]

    return mutate


def edit(kind: str, change: Callable[[dict[str, Any]], Any], number: int = 0) -> Mutate:
    def mutate(events: Events) -> None:
        place = _place(events, is_type(kind, number))
        event = _data(events[place])
        change(event)
        head = events[place].partition(b"data: ")[0]
        events[place] = head + b"data: " + json.dumps(event, ensure_ascii=False).encode()

    return mutate


def renumbered(mutate: Mutate) -> Mutate:
    """The same, and nobody can tell it by the sequence numbers."""

    def both(events: Events) -> None:
        mutate(events)
        for number, event in enumerate(events):
            data = _data(event) | {"sequence_number": number}
            head = event.partition(b"data: ")[0]
            events[number] = head + b"data: " + json.dumps(data, ensure_ascii=False).encode()

    return both


def _place(events: Events, which: Which) -> int:
    return next(place for place, event in enumerate(events) if which(_data(event)))


def _data(event: bytes) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(event.partition(b"data: ")[2])
    return data
