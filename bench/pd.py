"""Prefill and decode apart, or merged: what long prompts do to the streams that run meanwhile.

Two cores each way, each engine pinned to one, and the same arrivals: a few streams decode all the time while prompts of
1,000 tokens keep arriving (Poisson, by seed; no two prompts share a prefix). Three ways to use the cores:

- pd: one prefill, one decode.
- merged: two merged workers behind a balancer that sends each request to the one with fewer outstanding, as people run
  them. With its best chunk size: each is tried first, beside a turn of pd, and the one with the best goodput is kept.
- routed: the same two workers behind Baton's router, which knows what a prompt does to streams.

All stay up; measured turns alternate. Figures are medians over the turns, ratios medians of the turns' ratios.

Machines differ and shared ones drift, so the load is set by what pd shows when idle: half as many prompts as its
prefill could compute, and an SLO of twice the idle TTFT and twice the idle time per output token. Goodput is as in
`vllm bench serve --goodput ttft:... tpot:...`: requests a second within both; an error is a miss. ITL is the time
between two pieces of text of one of the decoding streams, at the client.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass
from itertools import pairwise

import httpx
from rich.console import Console
from rich.table import Table

from bench.balance import Balancer, merged_pair, words
from bench.load import Answer, quantile
from bench.run import Run, running

STREAMS = 4
STREAM_TOKENS = 1000
STREAM_PROMPT = 24
LONG_PROMPT = 1000
LONG_TOKENS = 16
UTILISATION = 0.5
"""Share of its time that pd's prefill has work."""
SLO = 2.0
"""Times the idle figure, for TTFT and for the time per output token."""
CHUNKS = (32, 64, 128, 256, 512)


@dataclass(frozen=True)
class Load:
    """What is sent, and what counts as good."""

    arrivals_s: float
    """Long prompts a second."""
    slo_ttft_s: float
    slo_tpot_s: float


@dataclass(frozen=True)
class Turn:
    """One measured stretch of one way. `placed` counts requests by kind, mode and worker."""

    itl_p50_ms: float
    itl_p99_ms: float
    ttft_p50_s: float
    ttft_p99_s: float
    goodput: float
    tok_s: float
    errors: int
    placed: dict[str, int]
    gaps: tuple[float, ...]


async def turn(runs: list[Run], load: Load, seed: int, seconds: float) -> Turn:
    """Start the streams; once all speak, let long prompts arrive for `seconds`."""
    chance = random.Random(seed)
    loop = asyncio.get_running_loop()
    streams: list[Answer] = []
    longs: list[Answer] = []
    async with AsyncExitStack() as stack:
        unlimited = httpx.Limits(max_connections=None)
        clients = [
            await stack.enter_async_context(httpx.AsyncClient(base_url=run.url, limits=unlimited)) for run in runs
        ]
        balancer = Balancer(runs, clients)

        async def decode() -> None:
            while True:
                streams.append(Answer())
                await balancer.send(words(STREAM_PROMPT), STREAM_TOKENS, streams[-1])
                if streams[-1].error:
                    return

        async with asyncio.TaskGroup() as group:
            decoders = [group.create_task(decode()) for _ in range(STREAMS)]
            await asyncio.sleep(0)  # each has its answer by now
            await asyncio.gather(*(answer.begun.wait() for answer in streams))
            start = time.perf_counter()
            at = loop.time()
            end = at + seconds
            arriving = []
            while (at := at + chance.expovariate(load.arrivals_s)) < end:
                await asyncio.sleep(max(0.0, at - loop.time()))
                longs.append(Answer())
                arriving.append(group.create_task(balancer.send(words(LONG_PROMPT), LONG_TOKENS, longs[-1])))
            await asyncio.sleep(end - loop.time())
            stop = time.perf_counter()
            # The last prompts end with the streams still there, as all others did.
            if arriving:
                await asyncio.wait(arriving)
            for decoder in decoders:
                decoder.cancel()
    inside = [
        after - before
        for answer in streams
        for before, after in pairwise(answer.times)
        if start <= before and after <= stop
    ]
    everyone = streams + longs
    good = sum(
        not a.error and a.tpot <= load.slo_tpot_s and (a in streams or a.ttft <= load.slo_ttft_s) for a in everyone
    )
    ttfts = [answer.ttft for answer in longs]
    return Turn(
        itl_p50_ms=quantile(inside, 0.5) * 1e3,
        itl_p99_ms=quantile(inside, 0.99) * 1e3,
        ttft_p50_s=quantile(ttfts, 0.5),
        ttft_p99_s=quantile(ttfts, 0.99),
        goodput=good / seconds,
        tok_s=sum(start <= t <= stop for answer in everyone for t in answer.times) / seconds,
        errors=sum(bool(answer.error) for answer in everyone),
        placed=_placed(streams, "stream") | _placed(longs, "prompt"),
        gaps=tuple(inside),
    )


def _placed(answers: list[Answer], kind: str) -> dict[str, int]:
    """How many went where: `kind; mode; workers`."""
    return dict(Counter(f"{kind}; {a.route.partition('; reasons=')[0]}" for a in answers))


async def idle(run: Run, seconds: float) -> Load:
    """The load for this machine as it is now, from lone prompts and from streams that nothing disturbs."""
    async with httpx.AsyncClient(base_url=run.url) as client:
        balancer = Balancer([run], [client])
        lone = [Answer() for _ in range(5)]
        for answer in lone:
            await balancer.send(words(LONG_PROMPT), LONG_TOKENS, answer)
    if errors := [answer.error for answer in lone if answer.error]:
        raise RuntimeError(f"a lone prompt failed: {errors[0]}")
    ttft = statistics.median(answer.ttft for answer in lone[1:])
    still = await turn([run], Load(1e-9, ttft, ttft), 7, seconds)
    return Load(UTILISATION / ttft, SLO * ttft, SLO * statistics.mean(still.gaps))


Pair = Callable[[ExitStack, int], list[Run]]
"""Starts two merged workers with that chunk size, each a run of its own."""


def try_chunks(
    console: Console, pd: Run, load: Load, chunks: tuple[int, ...], seconds: float, pair: Pair
) -> dict[int, tuple[Turn, Turn]]:
    """A turn of merged with each chunk size, and one of pd beside it with the same arrivals."""
    tried = {}
    for chunk in chunks:
        with ExitStack() as stack:
            runs = pair(stack, chunk)
            asyncio.run(turn(runs, load, 0, seconds / 4))
            tried[chunk] = (asyncio.run(turn(runs, load, 99, seconds)), asyncio.run(turn([pd], load, 99, seconds)))
        console.print(f"  chunk {chunk}: merged {_said(tried[chunk][0])}; pd {_said(tried[chunk][1])}", style="dim")
    return tried


def best_chunk(tried: dict[int, tuple[Turn, Turn]]) -> int:
    """The chunk of the best goodput; of equal ones that of the lowest ITL p99."""
    return min(tried, key=lambda c: (-round(tried[c][0].goodput, 2), tried[c][0].itl_p99_ms))


def _said(turn: Turn) -> str:
    return (
        f"ITL p99 {turn.itl_p99_ms:.0f} ms, TTFT p50 {turn.ttft_p50_s:.2f} s, goodput {turn.goodput:.2f} /s, "
        f"errors {turn.errors}"
    )


def measure(
    console: Console, ways: dict[str, list[Run]], load: Load, turns: int, seconds: float
) -> dict[str, list[Turn]]:
    """Alternate measured turns of all ways, in an order that turns round each time."""
    results: dict[str, list[Turn]] = {name: [] for name in ways}
    for name, runs in ways.items():
        asyncio.run(turn(runs, load, 0, seconds / 4))
        console.print(f"  {name}: warm", style="dim")
    for number in range(turns):
        for name in list(ways)[:: -1 if number % 2 else 1]:
            results[name].append(asyncio.run(turn(ways[name], load, 100 + number, seconds)))
            console.print(f"  turn {number + 1}/{turns} {name}: {_said(results[name][-1])}", style="dim")
    return results


KEYS = ("itl_p50_ms", "itl_p99_ms", "ttft_p50_s", "ttft_p99_s", "goodput", "tok_s", "errors")


def summary(
    results: dict[str, list[Turn]], load: Load, chunk: int, tried: dict[int, tuple[Turn, Turn]]
) -> dict[str, object]:
    """What the run says, ready for JSON."""

    def ratio(key: str, over: str, under: str) -> float:
        pairs = zip(results[over], results[under], strict=True)
        return round(statistics.median(getattr(o, key) / max(getattr(u, key), 1e-9) for o, u in pairs), 3)

    return {
        "itl_p99_merged_over_pd": ratio("itl_p99_ms", "merged", "pd"),
        "itl_p99_routed_over_pd": ratio("itl_p99_ms", "routed", "pd"),
        "goodput_pd_over_merged": ratio("goodput", "pd", "merged"),
        "ttft_p50_pd_over_merged": ratio("ttft_p50_s", "pd", "merged"),
        "merged_chunk": chunk,
        "arrivals_s": round(load.arrivals_s, 3),
        "slo": {"ttft_s": round(load.slo_ttft_s, 3), "tpot_s": round(load.slo_tpot_s, 4)},
        **{
            name: {key: round(statistics.median(getattr(t, key) for t in turns), 3) for key in KEYS}
            for name, turns in results.items()
        },
        "itl_p99_ms_turns": {name: [round(t.itl_p99_ms, 1) for t in turns] for name, turns in results.items()},
        "placed": {name: dict(sum((Counter(t.placed) for t in turns), Counter())) for name, turns in results.items()},
        "merged_chunks": {
            str(c): {
                "itl_p99_ms": round(m.itl_p99_ms, 1),
                "itl_p99_over_pd": round(m.itl_p99_ms / pd.itl_p99_ms, 2),
                "goodput": round(m.goodput, 3),
                "ttft_p50_s": round(m.ttft_p50_s, 2),
            }
            for c, (m, pd) in tried.items()
        },
    }


def show(console: Console, result: dict[str, object]) -> None:
    """The tables for people."""
    chunk = result["merged_chunk"]
    table = Table(
        title=f"{STREAMS} streams decoding while {LONG_PROMPT}-token prompts arrive; two cores; medians",
        caption=f"pd: 1 prefill, 1 decode. merged: 2 merged of chunk {chunk}, balanced. routed: the same, our router.",
    )
    for title in ("", "ITL p50", "ITL p99 ms", "TTFT p50", "TTFT p99 s", "goodput", "tok/s", "errors"):
        table.add_column(title, justify="right" if title else "left")
    for name in ("pd", "merged", "routed"):
        row = result[name]
        assert isinstance(row, dict)
        table.add_row(name, *(f"{value:.4g}" for value in row.values()))
    console.print(table)
    tried = result["merged_chunks"]
    assert isinstance(tried, dict)
    if tried:
        table = Table(title="merged by chunk size, one turn each")
        for title in ("chunk", "ITL p99 ms", "over pd", "goodput /s", "TTFT p50 s"):
            table.add_column(title, justify="right")
        for size, row in tried.items():
            table.add_row(size, *(f"{value:g}" for value in row.values()))
        console.print(table)
    console.print(f"ITL p99, merged over disaggregated: {result['itl_p99_merged_over_pd']}")


def plot(results: dict[str, list[Turn]], path: str) -> None:
    """Share of gaps above a length, each way, as a PNG."""
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
    parser = argparse.ArgumentParser(prog="baton bench pd", description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument("--turns", type=int, default=5, help="measured turns of each way")
    parser.add_argument("--seconds", type=float, default=25.0, help="length of a turn")
    parser.add_argument("--chunk", type=int, default=0, help="merged's chunk size; 0 tries each first")
    parser.add_argument("--model", default="", help="model file or directory; default: the one of `baton up`")
    parser.add_argument("--plot", default="", metavar="FILE.png", help="draw the distribution of gaps")
    options = parser.parse_args(argv)
    console = Console()
    with ExitStack() as stack:
        counts = ["--prefill", "1", "--decode", "1", "--merged", "0"]
        pd = stack.enter_context(running(*counts, "--cores", "0,1", model=options.model))
        load = asyncio.run(idle(pd, options.seconds / 4))
        console.print(
            f"  idle: {load.arrivals_s:.2f} prompts a second, SLO {load.slo_ttft_s:.2f} s and "
            f"{load.slo_tpot_s * 1e3:.0f} ms a token",
            style="dim",
        )
        tried: dict[int, tuple[Turn, Turn]] = {}
        if not options.chunk:
            tried = try_chunks(
                console, pd, load, CHUNKS, options.seconds, lambda at, size: merged_pair(at, size, options.model)
            )
        chunk = options.chunk or best_chunk(tried)
        both = ["--prefill", "0", "--decode", "0", "--merged", "2", "--chunk-tokens", str(chunk), "--cores", "0,1"]
        ways = {
            "pd": [pd],
            "merged": merged_pair(stack, chunk, options.model),
            "routed": [stack.enter_context(running(*both, model=options.model))],
        }
        results = measure(console, ways, load, options.turns, options.seconds)
    result = summary(results, load, chunk, tried)
    show(console, result)
    if options.plot:
        plot(results, options.plot)
    if options.json:
        print(json.dumps(result), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
