"""A completion as its client sees it, whole: to compare a disturbed run with an undisturbed one."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from tests.integration.stack import SERVED

LOGPROB_TOLERANCE = 1e-3
"""A resumed token is computed in another batch: the same to f32 rounding."""


@dataclass
class Output:
    """One choice."""

    text: str = ""
    pieces: int = 0
    finish: str = ""
    finishes: int = 0
    logprobs: list[dict[str, Any]] = field(default_factory=list)


@dataclass
class Completion:
    """One HTTP answer. `done` is whether it ended with [DONE] (streamed) or is a body."""

    status: int
    route: str = ""
    outputs: dict[int, Output] = field(default_factory=dict)
    usage: dict[str, Any] = field(default_factory=dict)
    story: dict[str, Any] = field(default_factory=dict)
    errors: list[dict[str, Any]] = field(default_factory=list)
    done: bool = False

    @property
    def worker(self) -> str:
        """Who streams, by the plan in the header."""
        found = re.search(r"(?:decode|worker)=([\w-]+)", self.route)
        assert found, self.route
        return found[1]

    @property
    def pieces(self) -> int:
        """Pieces of text so far, of all choices."""
        return sum(output.pieces for output in self.outputs.values())

    def of(self, index: int) -> Output:
        """A choice."""
        return self.outputs.setdefault(index, Output())


Heard = Callable[[Completion], None]


async def complete(
    client: httpx.AsyncClient, url: str, body: dict[str, Any], heard: Heard = lambda _: None
) -> Completion:
    """Post `body` to /v1/completions (or chat, when it has messages); `heard` is called after each chunk."""
    chat = "messages" in body
    path = "chat/completions" if chat else "completions"
    body = {"model": SERVED, **body}
    if body.get("stream"):
        body["stream_options"] = {"include_usage": True}
    async with client.stream("POST", f"{url}/v1/{path}", json=body) as reply:
        got = Completion(reply.status_code, reply.headers.get("x-baton-route", ""))
        if not body.get("stream"):
            whole = json.loads(await reply.aread())
            if "error" in whole:
                got.errors.append(whole["error"])
            else:
                _take(got, whole, chat)
                got.done = True
            return got
        async for line in reply.aiter_lines():
            if line:
                assert not got.done, f"after [DONE]: {line}"
                data = line.removeprefix("data: ")
                got.done = data == "[DONE]"
                if not got.done:
                    _take(got, json.loads(data), chat)
                    heard(got)
    return got


def _take(got: Completion, chunk: dict[str, Any], chat: bool) -> None:
    if "error" in chunk:
        got.errors.append(chunk["error"])
        return
    assert not got.errors, f"after an error: {chunk}"
    got.story = chunk.get("baton") or got.story
    got.usage = chunk.get("usage") or got.usage
    for choice in chunk["choices"]:
        output = got.of(choice["index"])
        assert not output.finish, f"after its end: {choice}"
        text = _said(choice.get("delta") or choice.get("message") or {}) if chat else choice["text"]
        if text:
            output.text += text
            output.pieces += 1
        if choice.get("logprobs"):
            output.logprobs.append(choice["logprobs"])
        if choice["finish_reason"]:
            output.finish = choice["finish_reason"]
            output.finishes += 1


def _said(message: dict[str, Any]) -> str:
    """Content and calls as one text; the ids of calls belong to one request alone."""
    calls = (call["function"] for call in message.get("tool_calls") or ())
    return (message.get("content") or "") + "".join(f.get("name", "") + f.get("arguments", "") for f in calls)


def same(disturbed: Completion, wanted: Completion, *, hits: bool = True) -> None:
    """The client cannot tell the two apart, timing and `baton` field aside.

    `hits` is False where an attempt that was lost before its first token may have left a part of the prompt in a cache.
    """
    assert (disturbed.status, disturbed.errors, disturbed.done) == (200, [], True), disturbed
    assert disturbed.outputs.keys() == wanted.outputs.keys()
    for index, output in wanted.outputs.items():
        got = disturbed.outputs[index]
        assert (got.text, got.finish, got.finishes) == (output.text, output.finish, output.finishes), index
        assert _close(_flat(got.logprobs), _flat(output.logprobs)), (_flat(got.logprobs), _flat(output.logprobs))
    found = (
        disturbed.usage if hits else disturbed.usage | {"prompt_tokens_details": wanted.usage["prompt_tokens_details"]}
    )
    assert found == wanted.usage


def _flat(logprobs: list[dict[str, Any]]) -> dict[str, list[Any]]:
    flat: dict[str, list[Any]] = {}
    for part in logprobs:
        for name, values in part.items():
            flat.setdefault(name, []).extend(values or [])
    return flat


def _close(got: Any, wanted: Any) -> bool:
    """Equal, floats nearly."""
    if isinstance(wanted, float):
        return bool(got == pytest.approx(wanted, abs=LOGPROB_TOLERANCE))
    if isinstance(wanted, list):
        return len(got) == len(wanted) and all(map(_close, got, wanted))
    if isinstance(wanted, dict):
        return list(got) == list(wanted) and all(_close(got[key], value) for key, value in wanted.items())
    return bool(got == wanted)
