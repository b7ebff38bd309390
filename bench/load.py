"""A streaming OpenAI client for benches: what it sent, and when each piece of the answer came."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import httpx
import orjson

TIMEOUT_S = 120.0


@dataclass
class Answer:
    """One streamed request. Times are `time.perf_counter()` seconds; `route` is the plan's mode."""

    sent: float
    times: list[float] = field(default_factory=list)
    route: str = ""
    error: str = ""

    @property
    def ttft(self) -> float:
        """Seconds to the first piece of text; infinite when there was none."""
        return self.times[0] - self.sent if self.times else float("inf")

    @property
    def gaps(self) -> list[float]:
        """Seconds between pieces."""
        return [after - before for before, after in zip(self.times, self.times[1:], strict=False)]


async def stream(client: httpx.AsyncClient, model: str, prompt: Sequence[int], max_tokens: int) -> Answer:
    """Send token ids to /v1/completions, greedy and without an early end, and note when text comes."""
    body = {
        "model": model,
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    answer = Answer(time.perf_counter())
    try:
        async with client.stream("POST", "/v1/completions", content=orjson.dumps(body), timeout=TIMEOUT_S) as response:
            answer.route = response.headers.get("x-baton-route", "").partition(";")[0]
            if response.status_code != 200:
                answer.error = (await response.aread()).decode(errors="replace")[:300]
                return answer
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                chunk = orjson.loads(line[6:])
                if "error" in chunk:
                    answer.error = str(chunk["error"])[:300]
                elif any(choice.get("text") for choice in chunk.get("choices", ())):
                    answer.times.append(time.perf_counter())
    except httpx.HTTPError as error:
        answer.error = repr(error)
    return answer


def quantile(values: Sequence[float], q: float) -> float:
    """The q-quantile (nearest rank) of `values`; infinite when empty."""
    if not values:
        return float("inf")
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))]
