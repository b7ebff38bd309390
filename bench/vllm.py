"""Real vLLM engines behind Baton: what parting prefill and decode gives, and what Baton costs beside vLLM alone.

Every engine is vLLM's CPU build, pinned to one core of two, eager, with the same sizes on all sides. Three parts:

- pd: the protocol of bench/pd.py: four streams decode while prompts of 1,000 tokens arrive; one prefill and one decode
  against two merged workers at their best chunk size (vLLM's `max_num_batched_tokens`) behind a balancer; the same
  arrivals, five turns of each, in turn. `itl_p99_merged_over_pd`: above 1, parting is better.
- ttft: the first token of a handed-over prompt of 1,000 tokens, Baton's pair over vLLM's own pair of servers with its
  NixlConnector (bench/vllm_ttft.py). `ttft_over_nixlconnector`: below 1, Baton is faster.
- throughput: 8 streams, a merged worker of Baton over vLLM's own server (bench/vllm_throughput.py).
  `throughput_over_vllm`: 1 is all of it.

Four engines are up at once at most, 3 to 4 GB each.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from rich.console import Console
from rich.table import Table

from baton.cli.converted import as_directory
from baton.cli.fetch import find_model
from baton.cli.home import find_home
from baton.cli.vllm_env import vllm_python
from bench import pd, vllm_throughput, vllm_ttft
from bench.balance import merged_pair
from bench.run import Run, running
from bench.vllm_server import NAME, Settings, serving

PARTS = ("pd", "ttft", "throughput")
CHUNKS = (64, 128, 256, 512)
FLAGS = ("--engine", "vllm")
PD = ("--prefill", "1", "--decode", "1", "--merged", "0", "--cores", "0,1", "--fallback", "strict", *FLAGS)
MERGED = ("--prefill", "0", "--decode", "0", "--merged", "1", "--cores", "0", *FLAGS)


class Bench:
    """What the parts share: sizes, and a pair of prefill and decode that is started once."""

    def __init__(self, console: Console, stack: ExitStack, settings: Settings) -> None:
        self.console = console
        self.settings = settings
        # Smaller than what is common, so that four engines fit: prompts of 1,000 tokens are 23 MB of KV each.
        self.told = {"pool_gib": 0.5, "capacity_gib": 0.25, "max_streams": settings.streams}
        self._stack = stack
        self._pd: Run | None = None

    def run(self, stack: ExitStack, *flags: str) -> Run:
        """A run of Baton with these flags, ended with the stack."""
        return stack.enter_context(running(*flags, model=str(self.settings.model), settings=self.told))

    def pd(self) -> Run:
        """One prefill, one decode; started when first asked for."""
        if self._pd is None:
            self.console.print("  starting prefill and decode", style="dim")
            self._pd = self.run(self._stack, *PD, "--chunk-tokens", str(self.settings.chunk))
        return self._pd

    def pair(self, stack: ExitStack, chunk: int) -> list[Run]:
        """Two merged workers, each a run of its own."""
        self.console.print(f"  starting two merged workers, chunk {chunk}", style="dim")
        return merged_pair(stack, chunk, str(self.settings.model), self.told, FLAGS)


def apart_or_merged(bench: Bench, chunk: int, turns: int, seconds: float) -> dict[str, Any]:
    """Part one."""
    apart = bench.pd()
    load = asyncio.run(pd.idle(apart, seconds / 2))
    bench.console.print(f"  idle: {load.arrivals_s:.2f} prompts a second are half of what prefill can", style="dim")
    tried: dict[int, tuple[pd.Turn, pd.Turn]] = {}
    if not chunk:
        tried = pd.try_chunks(bench.console, apart, load, CHUNKS, seconds, bench.pair)
        chunk = pd.best_chunk(tried)
    with ExitStack() as stack:
        ways = {"pd": [apart], "merged": bench.pair(stack, chunk)}
        results = pd.measure(bench.console, ways, load, turns, seconds)

    def median(name: str, key: str) -> float:
        return round(statistics.median(getattr(turn, key) for turn in results[name]), 3)

    ratios = [m.itl_p99_ms / p.itl_p99_ms for m, p in zip(results["merged"], results["pd"], strict=True)]
    return {
        "itl_p99_merged_over_pd": round(statistics.median(ratios), 3),
        "merged_chunk": chunk,
        "arrivals_s": round(load.arrivals_s, 3),
        "ways": {name: {key: median(name, key) for key in pd.KEYS} for name in results},
        "itl_p99_ms_turns": {name: [round(t.itl_p99_ms, 1) for t in found] for name, found in results.items()},
        "merged_chunks": {
            str(size): {"itl_p99_ms": round(m.itl_p99_ms, 1), "over_pd": round(m.itl_p99_ms / p.itl_p99_ms, 2)}
            | {"goodput": round(m.goodput, 3), "ttft_p50_s": round(m.ttft_p50_s, 2)}
            for size, (m, p) in tried.items()
        },
    }


def first_token(bench: Bench, prompts: int) -> dict[str, Any]:
    """Part two."""
    apart = bench.pd()
    with ExitStack() as stack:
        bench.console.print("  starting vLLM's own prefill and decode", style="dim")
        one, two = stack.enter_context(serving(bench.settings, (0, 1), "NixlConnector"))
        return asyncio.run(vllm_ttft.compare(bench.console, apart, (one, two), prompts))


def throughput(bench: Bench, turns: int) -> dict[str, Any]:
    """Part three."""
    with ExitStack() as stack:
        bench.console.print("  starting a merged worker and vLLM's own server", style="dim")
        ours = bench.run(stack, *MERGED, "--chunk-tokens", str(bench.settings.chunk))
        (theirs,) = stack.enter_context(serving(bench.settings, (0,)))
        return vllm_throughput.compare(bench.console, (ours.url, ours.model), (theirs, NAME), turns)


def show(console: Console, result: dict[str, Any]) -> None:
    """The tables for people."""
    if ways := result.get("ways"):
        table = Table(
            title=f"{pd.STREAMS} streams decoding while {pd.LONG_PROMPT}-token prompts arrive; two cores; medians",
            caption=f"pd: 1 prefill, 1 decode. merged: 2 merged of chunk {result['merged_chunk']}, balanced.",
        )
        for title in ("", "ITL p50", "ITL p99 ms", "TTFT p50", "TTFT p99 s", "goodput", "tok/s", "errors"):
            table.add_column(title, justify="right" if title else "left")
        for name, row in ways.items():
            table.add_row(name, *(f"{value:.4g}" for value in row.values()))
        console.print(table)
        console.print(f"ITL p99, merged over disaggregated: {result['itl_p99_merged_over_pd']}")
    if ttft := result.get("ttft_ms"):
        said = f"Baton {ttft['baton']} ms, vLLM with NixlConnector {ttft['nixlconnector']} ms"
        console.print(f"first token of a hand-over: {said}; ratio {result['ttft_over_nixlconnector']}")
    if speed := result.get("tok_s"):
        said = f"Baton merged {speed['baton']} tok/s, vLLM's server {speed['vllm']} tok/s"
        console.print(f"{vllm_throughput.STREAMS} streams: {said}; ratio {result['throughput_over_vllm']}")


def main(argv: list[str] | None = None) -> int:
    """Run it. With --json the last line is one JSON object."""
    parser = argparse.ArgumentParser(prog="baton bench vllm", description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument("--parts", default=",".join(PARTS), help=f"which of {', '.join(PARTS)}")
    parser.add_argument("--turns", type=int, default=5, help="measured turns of each side")
    parser.add_argument("--seconds", type=float, default=25.0, help="length of a turn of pd")
    parser.add_argument("--prompts", type=int, default=20, help="prompts of each side for the first token")
    parser.add_argument("--chunk", type=int, default=0, help="merged's chunk size; 0 tries each first")
    parser.add_argument("--model", default="", help="model file or directory; default: the one of `baton up`")
    options = parser.parse_args(argv)
    parts = [part.strip() for part in options.parts.split(",") if part.strip()]
    if unknown := set(parts) - set(PARTS):
        parser.error(f"--parts knows {', '.join(PARTS)}, not {', '.join(sorted(unknown))}")
    console = Console()

    def say(text: str) -> None:
        console.print(f"  {text}", style="dim")

    home = find_home()
    model = as_directory(home, find_model(home, options.model, say), say)
    settings = Settings(vllm_python(say), model)
    result: dict[str, Any] = {}
    with ExitStack() as stack:
        bench = Bench(console, stack, settings)
        measures: dict[str, Callable[[], dict[str, Any]]] = {
            "pd": lambda: apart_or_merged(bench, options.chunk, options.turns, options.seconds),
            "ttft": lambda: first_token(bench, options.prompts),
        }
        for part, measure in measures.items():
            if part in parts:
                result |= measure()
    with ExitStack() as stack:
        if "throughput" in parts:
            result |= throughput(Bench(console, stack, settings), options.turns)
    show(console, result)
    if options.json:
        print(json.dumps(result), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
