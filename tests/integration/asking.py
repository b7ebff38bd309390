"""Asking a stack for completions, as clients do, and keeping what came."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
from openai import AsyncOpenAI

from tests.integration.stack import HANG_S, SERVED, Stack

KEY = "sk-test-0123456789"
"""For stacks that ask for one; the others take any."""


@dataclass
class Answer:
    """One completion. `route` is the header, `story` the `baton` field, `pieces` the text as it came."""

    status: int
    route: str = ""
    pieces: list[str] = field(default_factory=list)
    finish: str = ""
    story: dict[str, Any] = field(default_factory=dict)
    usage: dict[str, Any] = field(default_factory=dict)
    error: dict[str, Any] = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """All of it."""
        return "".join(self.pieces)

    @property
    def reasons(self) -> set[str]:
        """RouteReasons of what really happened."""
        return set(self.story["reasons"])


@contextlib.asynccontextmanager
async def plain_client() -> AsyncIterator[httpx.AsyncClient]:
    """HTTP without limits of its own."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(trust_env=False, limits=limits, timeout=HANG_S) as client:
        yield client


@contextlib.asynccontextmanager
async def openai_client(stack: Stack, frontend: str = "frontend") -> AsyncIterator[AsyncOpenAI]:
    """The official client, without retries of its own."""
    async with plain_client() as http:
        yield AsyncOpenAI(base_url=f"{stack.url(frontend)}/v1", api_key=KEY, http_client=http, max_retries=0)


def body(prompt: str, tokens: int, **more: object) -> dict[str, object]:
    """A greedy completion of exactly `tokens` tokens, unless told otherwise."""
    defaults = {"model": SERVED, "temperature": 0, "ignore_eos": True}
    return {**defaults, "prompt": prompt, "max_tokens": tokens, **more}


async def ask(
    client: httpx.AsyncClient,
    url: str,
    prompt: str,
    tokens: int,
    *,
    on_piece: Callable[[int], None] = lambda _: None,
    **more: object,
) -> Answer:
    """Stream one completion; `on_piece` hears the number of pieces so far. An error of any kind is in the answer."""
    asked = body(prompt, tokens, stream=True, stream_options={"include_usage": True}, **more)
    async with client.stream("POST", f"{url}/v1/completions", json=asked) as reply:
        answer = Answer(reply.status_code, reply.headers.get("x-baton-route", ""), headers=dict(reply.headers))
        if reply.status_code != 200:
            answer.error = json.loads(await reply.aread())["error"]
            return answer
        ended = False
        async for line in reply.aiter_lines():
            if not line:
                continue
            assert not ended, f"after [DONE]: {line}"
            data = line.removeprefix("data: ")
            if data == "[DONE]":
                ended = True
                continue
            _take(answer, json.loads(data))
            on_piece(len(answer.pieces))
        assert ended or answer.error, f"the stream broke off: {answer}"
    return answer


def _take(answer: Answer, chunk: dict[str, Any]) -> None:
    if "error" in chunk:
        answer.error = chunk["error"]
        return
    answer.story = chunk.get("baton") or answer.story
    answer.usage = chunk.get("usage") or answer.usage
    for choice in chunk["choices"]:
        if choice["text"]:
            answer.pieces.append(choice["text"])
        answer.finish = choice["finish_reason"] or answer.finish
