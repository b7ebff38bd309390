"""A streaming OpenAI client for benches: what it sent, and when each piece of the answer came."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import httpx
import orjson

TIMEOUT_S = 120.0
JSON = {"content-type": "application/json"}


@dataclass
class Answer:
    """One streamed request, as far as it came. Times are `time.perf_counter()` seconds; `route` is `x-baton-route`,
    `story` the `baton` field of the last chunk."""

    sent: float = 0.0
    times: list[float] = field(default_factory=list)
    route: str = ""
    error: str = ""
    story: dict[str, Any] = field(default_factory=dict)
    text: str = ""
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    """Set with the first piece of text, or the error that came instead."""

    @property
    def ttft(self) -> float:
        """Seconds to the first piece of text; infinite when there was none."""
        return self.times[0] - self.sent if self.times else float("inf")

    @property
    def gaps(self) -> list[float]:
        """Seconds between pieces."""
        return [after - before for before, after in pairwise(self.times)]

    @property
    def tpot(self) -> float:
        """Mean seconds between pieces; 0 with fewer than two."""
        return (self.times[-1] - self.times[0]) / (len(self.times) - 1) if len(self.times) > 1 else 0.0


async def stream(
    client: httpx.AsyncClient, model: str, prompt: Sequence[int], max_tokens: int, answer: Answer, **more: object
) -> None:
    """Send token ids to /v1/completions, greedy and without an early end, and note in `answer` when text comes.

    `more` are further fields of the request.
    """
    body = {
        "model": model,
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        **more,
    }
    answer.sent = time.perf_counter()
    try:
        async with client.stream(
            "POST", "/v1/completions", content=orjson.dumps(body), headers=JSON, timeout=TIMEOUT_S
        ) as response:
            answer.route = response.headers.get("x-baton-route", "")
            if response.status_code != 200:
                answer.error = (await response.aread()).decode(errors="replace")[:300]
                return
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                chunk = orjson.loads(line[6:])
                answer.story = chunk.get("baton") or answer.story
                answer.text += "".join(choice.get("text") or "" for choice in chunk.get("choices", ()))
                if "error" in chunk:
                    answer.error = str(chunk["error"])[:300]
                elif any(choice.get("text") for choice in chunk.get("choices", ())):
                    answer.times.append(time.perf_counter())
                    answer.begun.set()
    except httpx.HTTPError as error:
        answer.error = repr(error)
    finally:
        answer.begun.set()


def quantile(values: Sequence[float], q: float) -> float:
    """The q-quantile (nearest rank) of `values`; infinite when empty."""
    if not values:
        return float("inf")
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))]
