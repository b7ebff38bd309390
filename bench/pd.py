"""Prefill and decode apart, or merged: what long prompts do to the streams that run meanwhile.

Two cores either way: two merged workers, or one prefill and one decode, each engine pinned to one. The same arrivals
for both: a few streams decode all the time while prompts of 1,000 tokens keep arriving (Poisson, by seed; no two
share a prefix). Merged gets its best chunk size: each is tried first, and the one with the best goodput (then the
lowest ITL p99) is kept. Both runs stay up; measured turns alternate. Figures are medians over the turns.

ITL: time between two pieces of text of one of the decoding streams, at the client. Goodput: requests a second, of
either kind, with TTFT and their own ITL p99 within the SLO; an error counts as a miss.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass

import httpx
from rich.console import Console
from rich.table import Table

from bench.load import Answer, quantile, stream
from bench.run import Run, running

STREAMS = 4
STREAM_TOKENS = 96
STREAM_PROMPT = 24
LONG_PROMPT = 1000
LONG_TOKENS = 16
ARRIVALS_S = 0.45
"""Long prompts a second: about half of what one core computes."""
CHUNKS = (32, 64, 128, 256, 512)
SLO_TTFT_S = 4.0
SLO_ITL_S = 0.1
IDS = range(1000, 20000)
"""Ordinary words of the vocabulary."""


@dataclass(frozen=True)
class Turn:
    """One measured stretch of one configuration."""

    itl_p50_ms: float
    itl_p99_ms: float
    ttft_p50_s: float
    ttft_p99_s: float
    goodput: float
    tok_s: float
    errors: int
    modes: dict[str, int]
    """Requests by the mode of their plan."""
    gaps: tuple[float, ...]


async def turn(run: Run, seed: int, seconds: float) -> Turn:
    """Load `run` for `seconds` with the arrivals of `seed`."""
    chance = random.Random(seed)
    loop = asyncio.get_running_loop()
    async with httpx.AsyncClient(base_url=run.url, limits=httpx.Limits(max_connections=None)) as client:
        end = loop.time() + seconds
        streams: list[Answer] = []
        longs: list[asyncio.Task[Answer]] = []

        async def decode(number: int) -> None:
            ids = random.Random(f"{seed}-{number}")
            while loop.time() < end:
                prompt = ids.choices(IDS, k=STREAM_PROMPT)
                streams.append(await stream(client, run.model, prompt, STREAM_TOKENS))

        async def arrive() -> None:
            at = loop.time()
            while (at := at + chance.expovariate(ARRIVALS_S)) < end:
                await asyncio.sleep(max(0.0, at - loop.time()))
                prompt = chance.choices(IDS, k=LONG_PROMPT)
                longs.append(asyncio.create_task(stream(client, run.model, prompt, LONG_TOKENS)))

        await asyncio.gather(arrive(), *(decode(n) for n in range(STREAMS)))
        answers = list(await asyncio.gather(*longs))
    gaps = [gap for answer in streams for gap in answer.gaps]
    ttfts = [answer.ttft for answer in answers]
    everyone = streams + answers
    good = sum(_good(answer) for answer in everyone)
    return Turn(
        itl_p50_ms=quantile(gaps, 0.5) * 1e3,
        itl_p99_ms=quantile(gaps, 0.99) * 1e3,
        ttft_p50_s=quantile(ttfts, 0.5),
        ttft_p99_s=quantile(ttfts, 0.99),
        goodput=good / seconds,
        tok_s=sum(len(answer.times) for answer in everyone) / seconds,
        errors=sum(bool(answer.error) for answer in everyone),
        modes=dict(Counter(answer.route for answer in everyone)),
        gaps=tuple(gaps),
    )


def _good(answer: Answer) -> bool:
    within = answer.ttft <= SLO_TTFT_S and quantile(answer.gaps or [0.0], 0.99) <= SLO_ITL_S
    return within and not answer.error


def best_chunk(console: Console, seed: int, seconds: float, model: str) -> tuple[int, dict[int, Turn]]:
    """Try each chunk size on two merged workers."""
    tried: dict[int, Turn] = {}
    for chunk in CHUNKS:
        console.print(f"  merged, chunk {chunk}: trying", style="dim")
        with running(*_merged(chunk), model=model) as run:
            asyncio.run(turn(run, seed, seconds / 4))  # warm: learnt rates, connections
            tried[chunk] = asyncio.run(turn(run, seed, seconds))
    return min(tried, key=lambda c: (-round(tried[c].goodput, 1), tried[c].itl_p99_ms)), tried


def _merged(chunk: int) -> list[str]:
    counts = ["--prefill", "0", "--decode", "0", "--merged", "2"]
    return [*counts, "--cores", "0,1", "--chunk-tokens", str(chunk)]


def measure(console: Console, turns: int, seconds: float, chunk: int, model: str) -> dict[str, list[Turn]]:
    """Alternate measured turns of the two configurations, both up."""
    results: dict[str, list[Turn]] = {"merged": [], "pd": []}
    with ExitStack() as stack:
        runs = {
            "merged": stack.enter_context(running(*_merged(chunk), model=model)),
            "pd": stack.enter_context(
                running("--prefill", "1", "--decode", "1", "--merged", "0", "--cores", "0,1", model=model)
            ),
        }
        for name, run in runs.items():
            asyncio.run(turn(run, 0, seconds / 4))
            console.print(f"  {name}: warm", style="dim")
        for number in range(turns):
            for name in sorted(runs, reverse=bool(number % 2)):
                done = asyncio.run(turn(runs[name], 100 + number, seconds))
                results[name].append(done)
                console.print(
                    f"  turn {number + 1}/{turns} {name}: ITL p99 {done.itl_p99_ms:.0f} ms, "
                    f"TTFT p50 {done.ttft_p50_s:.2f} s, errors {done.errors}",
                    style="dim",
                )
    return results


def summary(results: dict[str, list[Turn]], chunk: int, tried: dict[int, Turn]) -> dict[str, object]:
    """What the run says, ready for JSON. Ratios are medians of the turns' ratios."""
    pairs = list(zip(results["merged"], results["pd"], strict=True))

    def median(name: str, key: str) -> float:
        return round(statistics.median(getattr(t, key) for t in results[name]), 3)

    keys = ("itl_p50_ms", "itl_p99_ms", "ttft_p50_s", "ttft_p99_s", "goodput", "tok_s", "errors")
    return {
        "itl_p99_merged_over_pd": round(statistics.median(m.itl_p99_ms / p.itl_p99_ms for m, p in pairs), 3),
        "goodput_pd_over_merged": round(statistics.median(p.goodput / max(m.goodput, 1e-9) for m, p in pairs), 3),
        "ttft_p50_pd_over_merged": round(statistics.median(p.ttft_p50_s / m.ttft_p50_s for m, p in pairs), 3),
        "merged_chunk": chunk,
        "merged": {key: median("merged", key) for key in keys},
        "pd": {key: median("pd", key) for key in keys},
        "modes": {name: dict(sum((Counter(t.modes) for t in turns), Counter())) for name, turns in results.items()},
        "itl_p99_ms_turns": {name: [round(t.itl_p99_ms, 1) for t in turns] for name, turns in results.items()},
        "merged_chunks": {
            str(c): {
                "itl_p99_ms": round(t.itl_p99_ms, 1),
                "goodput": round(t.goodput, 3),
                "ttft_p50_s": round(t.ttft_p50_s, 2),
            }
            for c, t in tried.items()
        },
    }


def show(console: Console, result: dict[str, object]) -> None:
    """The table for people."""
    table = Table(title=f"{STREAMS} streams decoding while {LONG_PROMPT}-token prompts arrive; two cores; medians")
    for title in ("", "ITL p50 ms", "ITL p99 ms", "TTFT p50 s", "TTFT p99 s", "goodput /s", "tok/s", "errors"):
        table.add_column(title, justify="right" if title else "left")
    for name, label in (("merged", f"2 merged, chunk {result['merged_chunk']}"), ("pd", "1 prefill + 1 decode")):
        row = result[name]
        assert isinstance(row, dict)
        table.add_row(label, *(f"{value:g}" for value in row.values()))
    console.print(table)
    console.print(f"ITL p99, merged over disaggregated: {result['itl_p99_merged_over_pd']}")


def plot(results: dict[str, list[Turn]], path: str) -> None:
    """Share of gaps above a length, both configurations, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    for name, turns in results.items():
        gaps = sorted(gap * 1e3 for t in turns for gap in t.gaps)
        axes.plot(gaps, [1 - i / len(gaps) for i in range(len(gaps))], label=name)
    axes.set(xscale="log", yscale="log", xlabel="inter-token latency, ms", ylabel="share above")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main(argv: list[str] | None = None) -> int:
    """Run it. With --json the last line is one JSON object."""
    parser = argparse.ArgumentParser(prog="pd", description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument("--turns", type=int, default=5, help="measured turns of each configuration")
    parser.add_argument("--seconds", type=float, default=25.0, help="length of a turn")
    parser.add_argument("--chunk", type=int, default=0, help="merged's chunk size; 0 tries each first")
    parser.add_argument("--model", default="", help="model file or directory; default: the one of `baton up`")
    parser.add_argument("--plot", default="", metavar="FILE.png", help="draw the distribution of gaps")
    options = parser.parse_args(argv)
    console = Console()
    tried: dict[int, Turn] = {}
    chunk = options.chunk
    if not chunk:
        chunk, tried = best_chunk(console, 99, options.seconds, options.model)
    results = measure(console, options.turns, options.seconds, chunk, options.model)
    result = summary(results, chunk, tried)
    show(console, result)
    if options.plot:
        plot(results, options.plot)
    if options.json:
        print(json.dumps(result), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
