"""What a batch costs the chats beside it, and how much of the idle time it uses.

`baton up` as it comes: everything on the cores that are there. Chats (24 tokens in, 64 out) arrive in bursts with
pauses between, the same in every turn; turns with and without a batch alternate, in an order that turns round each
time. A turn with a batch begins some seconds after the batch did, so that chats meet it at work. One more turn has the
batch alone.

`itl_p99_with_over_without` and `ttft_p99_with_over_without`: of all gaps between two pieces of text, and of all times
to the first one, at the client, pooled over turns. Near 1 is good. `batch_tok_s`: tokens of finished lines a second,
beside chats. `idle_fraction_used`: that, over what the batch does alone times the part of a turn in which no chat was
under way.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.table import Table

from bench.balance import words
from bench.load import Answer, quantile, stream
from bench.run import Run, running

CHAT_PROMPT, CHAT_TOKENS = 24, 64
LINE_PROMPT, LINE_TOKENS = 64, 32
LINES = 5000
BURSTS_S = 5.0
"""Mean time between bursts of one to three chats."""
LEAD_S = 4.0
"""How long a batch runs before chats come."""
TOKENS = "baton_frontend_batch_output_tokens_total"
GAVE_WAY = "baton_frontend_batch_gave_way_total"
TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Turn:
    """What one turn showed."""

    answers: list[Answer]
    seconds: float
    batch_tokens: float
    gave_way: float

    @property
    def idle(self) -> float:
        """The part of the turn in which no chat was under way."""
        spans = sorted((a.sent, a.times[-1]) for a in self.answers if a.times)
        busy, until = 0.0, 0.0
        for start, end in spans:
            busy += max(0.0, end - max(start, until))
            until = max(until, end)
        return max(0.0, 1.0 - busy / self.seconds)


def arrivals(seconds: float, seed: int) -> list[float]:
    """When chats come: bursts with pauses."""
    draw = random.Random(seed)
    times, at = [], 1.0
    while at < seconds - 2.0:
        times += [at + 0.2 * n for n in range(draw.choice((1, 1, 2, 3)))]
        at += 1.5 + draw.expovariate(1 / (BURSTS_S - 1.5))
    return times


async def counter(client: httpx.AsyncClient, name: str) -> float:
    """A counter of the frontend, now."""
    text = (await client.get("/metrics")).text
    return sum(s.value for family in text_string_to_metric_families(text) for s in family.samples if s.name == name)


async def start_batch(client: httpx.AsyncClient, model: str, seed: int) -> str:
    """Upload lines and start them; the batch's id."""
    draw = random.Random(seed)
    lines = []
    for n in range(LINES):
        body = {
            "model": model,
            "prompt": [draw.randrange(100, 10_000) for _ in range(LINE_PROMPT)],
            "max_tokens": LINE_TOKENS,
            "ignore_eos": True,
        }
        lines.append(json.dumps({"custom_id": str(n), "method": "POST", "url": "/v1/completions", "body": body}))
    sent = await client.post("/v1/files", files={"file": "\n".join(lines).encode()}, data={"purpose": "batch"})
    asked = {"input_file_id": sent.raise_for_status().json()["id"], "endpoint": "/v1/completions"}
    made = await client.post("/v1/batches", json=asked | {"completion_window": "24h"})
    return str(made.raise_for_status().json()["id"])


async def end_batch(client: httpx.AsyncClient, id: str) -> None:
    """Cancel it, wait until it is over, and delete its files."""
    (await client.post(f"/v1/batches/{id}/cancel")).raise_for_status()
    async with asyncio.timeout(TIMEOUT_S):
        while True:
            batch = (await client.get(f"/v1/batches/{id}")).json()
            if batch["status"] == "cancelled":
                break
            await asyncio.sleep(0.1)
    for name in ("input_file_id", "output_file_id", "error_file_id"):
        if batch[name]:
            await client.delete(f"/v1/files/{batch[name]}")


async def turn(run: Run, times: Sequence[float], seconds: float, seed: int, *, batch: bool) -> Turn:
    """Chats at `times`, beside a batch or not."""
    async with httpx.AsyncClient(base_url=run.url, timeout=TIMEOUT_S, trust_env=False) as client:
        id = await start_batch(client, run.model, seed) if batch else ""
        await asyncio.sleep(LEAD_S)
        answers = [Answer() for _ in times]
        before = await counter(client, TOKENS), await counter(client, GAVE_WAY)
        began = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for at, answer in zip(times, answers, strict=True):
                await asyncio.sleep(max(0.0, began + at - time.perf_counter()))
                group.create_task(stream(client, run.model, words(CHAT_PROMPT), CHAT_TOKENS, answer))
            await asyncio.sleep(max(0.0, began + seconds - time.perf_counter()))
        took = time.perf_counter() - began
        after = await counter(client, TOKENS), await counter(client, GAVE_WAY)
        if id:
            await end_batch(client, id)
    if errors := [answer.error for answer in answers if answer.error]:
        raise RuntimeError(f"a chat failed: {errors[0]}")
    return Turn(answers, took, after[0] - before[0], after[1] - before[1])


def figures(turns: Sequence[Turn]) -> dict[str, float]:
    """Of all turns of a kind."""
    answers = [answer for turn in turns for answer in turn.answers]
    gaps = [gap for answer in answers for gap in answer.gaps]
    firsts = [answer.ttft for answer in answers]
    seconds = sum(turn.seconds for turn in turns)
    return {
        "chats": len(answers),
        "itl_p50_ms": 1e3 * quantile(gaps, 0.5),
        "itl_p99_ms": 1e3 * quantile(gaps, 0.99),
        "ttft_p50_ms": 1e3 * quantile(firsts, 0.5),
        "ttft_p99_ms": 1e3 * quantile(firsts, 0.99),
        "idle": sum(turn.idle * turn.seconds for turn in turns) / seconds,
        "batch_tok_s": sum(turn.batch_tokens for turn in turns) / seconds,
        "gave_way": sum(turn.gave_way for turn in turns),
    }


def compare(without: dict[str, float], beside: dict[str, float], alone_tok_s: float) -> dict[str, Any]:
    """The ratios."""
    idle = alone_tok_s * without["idle"]
    return {
        "itl_p99_with_over_without": beside["itl_p99_ms"] / without["itl_p99_ms"],
        "ttft_p99_with_over_without": beside["ttft_p99_ms"] / without["ttft_p99_ms"],
        "batch_tok_s": beside["batch_tok_s"],
        "idle_fraction_used": beside["batch_tok_s"] / idle if idle else 0.0,
        "batch_alone_tok_s": alone_tok_s,
    }


def main(argv: list[str] | None = None) -> int:
    """Run it. With --json the last line is one JSON object."""
    parser = argparse.ArgumentParser(prog="baton bench batch", description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument("--turns", type=int, default=3, help="measured turns with and without a batch")
    parser.add_argument("--seconds", type=float, default=30.0, help="length of a turn")
    parser.add_argument("--model", default="", help="model file or directory; default: the one of `baton up`")
    options = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # like Ctrl-C: what was started is ended
    console = Console()
    kinds: dict[bool, list[Turn]] = {False: [], True: []}
    with running(model=options.model, settings={"pool_gib": 0.5, "capacity_gib": 0.5}) as run:
        warm = arrivals(10.0, 99)
        asyncio.run(turn(run, warm, 10.0, 99, batch=False))
        alone = asyncio.run(turn(run, [], options.seconds / 2, 98, batch=True))
        for number in range(options.turns):
            for batch in (False, True)[:: -1 if number % 2 else 1]:
                times = arrivals(options.seconds, number)
                kinds[batch].append(asyncio.run(turn(run, times, options.seconds, number, batch=batch)))
                f = figures(kinds[batch][-1:])
                console.print(
                    f"  turn {number + 1}/{options.turns}, {'with' if batch else 'without'}: ITL p99 "
                    f"{f['itl_p99_ms']:.0f} ms, TTFT p99 {f['ttft_p99_ms']:.0f} ms, batch {f['batch_tok_s']:.0f} tok/s",
                    style="dim",
                    soft_wrap=True,
                )
    told = {"without": figures(kinds[False]), "with": figures(kinds[True])}
    result = compare(told["without"], told["with"], alone.batch_tokens / alone.seconds)
    table = Table("", "ITL p50", "ITL p99", "TTFT p50", "TTFT p99", "idle", "batch tok/s", box=None, pad_edge=False)
    for name, f in told.items():
        numbers = (f[key] for key in ("itl_p50_ms", "itl_p99_ms", "ttft_p50_ms", "ttft_p99_ms"))
        table.add_row(name, *(f"{n:.0f} ms" for n in numbers), f"{f['idle']:.2f}", f"{f['batch_tok_s']:.0f}")
    console.print(table)
    console.print(" ".join(f"{name} {value:.2f}" for name, value in result.items()), soft_wrap=True)
    if options.json:
        print(json.dumps({k: round(v, 4) for k, v in result.items()} | told), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
