"""Tokens a second of streams that nothing disturbs: a merged worker of Baton beside vLLM's own server.

Both have one engine on the same core, the same sizes, and take turns; who waits computes nothing.
"""

from __future__ import annotations

import asyncio
import statistics
import time

import httpx
from rich.console import Console

from bench.balance import words
from bench.load import Answer, stream

STREAMS = 8
PROMPT = 24
TOKENS = 128


async def turn(url: str, model: str, tokens: int) -> float:
    """Tokens a second from the moment that all streams speak to the end of the first of them.

    Raises RuntimeError when one fails.
    """
    answers = [Answer() for _ in range(STREAMS)]
    async with httpx.AsyncClient(base_url=url, trust_env=False) as client, asyncio.TaskGroup() as group:
        for answer in answers:
            group.create_task(stream(client, model, words(PROMPT), tokens, answer))
    if errors := [answer.error or "no text" for answer in answers if answer.error or not answer.times]:
        raise RuntimeError(f"a stream failed: {errors[0]}")
    start = max(answer.times[0] for answer in answers)
    end = min(answer.times[-1] for answer in answers)
    # In tokens, not in pieces of text: a piece may be of more than one when the client is late, and some have none.
    share = sum(sum(start < t <= end for t in answer.times) / len(answer.times) for answer in answers)
    return share * tokens / (end - start)


def compare(console: Console, ours: tuple[str, str], theirs: tuple[str, str], turns: int) -> dict[str, object]:
    """Alternate; each side is an address and the model's name there."""
    found: dict[str, list[float]] = {"baton": [], "vllm": []}
    sides = {"baton": ours, "vllm": theirs}
    for url, model in sides.values():
        asyncio.run(turn(url, model, TOKENS // 4))
    for number in range(turns):
        for name in list(sides)[:: -1 if number % 2 else 1]:
            found[name].append(asyncio.run(turn(*sides[name], TOKENS)))
            time.sleep(0.2)  # the last streams' ends are told
        said = f"Baton {found['baton'][-1]:.0f} tok/s, vLLM's server {found['vllm'][-1]:.0f} tok/s"
        console.print(f"  throughput, turn {number + 1}/{turns}: {said}", style="dim")
    pairs = zip(found["baton"], found["vllm"], strict=True)
    return {
        "throughput_over_vllm": round(statistics.median(a / b for a, b in pairs), 3),
        "tok_s": {name: round(statistics.median(values), 1) for name, values in found.items()},
        "tok_s_turns": {name: [round(value, 1) for value in values] for name, values in found.items()},
    }
