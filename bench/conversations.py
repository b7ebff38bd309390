"""Conversations of several turns with a common system prompt, and the same without anything to reuse.

Without reuse every prompt is as long as with it, and made of tokens that no other prompt has: the same work, no hits.
"""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console

from bench.load import Answer, stream
from bench.run import Run

SYSTEM = 200
USER = 40
TURNS = 2
ANSWER = 8
AT_ONCE = 8
IDS = range(1000, 20000)


@dataclass(frozen=True)
class Talk:
    """What all conversations together took. `prefill_s` is what computing their prompts took."""

    seconds: float
    requests: int
    prompt_tokens: int
    found_tokens: int
    prefill_s: float


def talk(console: Console, run: Run, conversations: int, metrics: str) -> dict[str, Any]:
    """Measure both. Raises RuntimeError when a request fails."""
    asyncio.run(_all(run, AT_ONCE, metrics, reuse=False))  # warm
    without = asyncio.run(_all(run, conversations, metrics, reuse=False))
    console.print(f"  without reuse: {without.seconds:.0f} s", style="dim")
    reused = asyncio.run(_all(run, conversations, metrics, reuse=True))
    console.print(f"  with reuse: {reused.seconds:.0f} s", style="dim")
    p = min(1.0, without.prefill_s / without.seconds)
    h = reused.found_tokens / reused.prompt_tokens
    return {
        "conversations": conversations,
        "turns": TURNS,
        "gain": round(without.seconds / reused.seconds, 2),
        "expected": round(1.0 / (1.0 - p * h), 2),
        "p": round(p, 3),
        "h": round(h, 3),
        "requests_s": round(reused.requests / reused.seconds, 2),
        "requests_s_without": round(without.requests / without.seconds, 2),
    }


async def _all(run: Run, count: int, metrics: str, *, reuse: bool) -> Talk:
    system = _words(SYSTEM)
    left = iter(range(count))
    answers: list[Answer] = []
    sizes: list[int] = []
    async with httpx.AsyncClient(base_url=run.url, trust_env=False) as client:
        before = await _figures(client, metrics)
        began = time.perf_counter()

        async def speaker() -> None:
            for _ in left:
                said = list(system)
                for _ in range(TURNS):
                    said += _words(USER)
                    prompt = said if reuse else _words(len(said))
                    answers.append(Answer())
                    sizes.append(len(prompt))
                    await stream(client, run.model, prompt, ANSWER, answers[-1])
                    # What was answered is not told as tokens: the next turn quotes as many others.
                    said += _words(ANSWER)

        async with asyncio.TaskGroup() as group:
            for _ in range(AT_ONCE):
                group.create_task(speaker())
        seconds = time.perf_counter() - began
        after = await _figures(client, metrics)
    if errors := [answer.error for answer in answers if answer.error]:
        raise RuntimeError(f"a request failed: {errors[0]}")
    computed = after["prefill_tokens_computed_total"] - before["prefill_tokens_computed_total"]
    rate = after["prefill_tokens_per_second"]
    found = sum(answer.story["cached_tokens"] for answer in answers)
    return Talk(seconds, len(answers), sum(sizes), found, computed / rate)


async def _figures(client: httpx.AsyncClient, url: str) -> dict[str, float]:
    """The worker's metrics by name."""
    await asyncio.sleep(1.5)  # they are refreshed each second
    text = (await client.get(url)).text
    samples = (s for family in text_string_to_metric_families(text) for s in family.samples)
    return {s.name.removeprefix("baton_worker_"): s.value for s in samples}


def _words(count: int) -> list[int]:
    return random.SystemRandom().choices(IDS, k=count)
