"""How fast the torch engine is on one core, through its whole loop, against reading the weights once a token.

Each round measures, one after the other on the same core: the limit (every weight matrix multiplied by one row, nothing
between; what the loop adds to that is what is lost), one stream, eight streams, a prompt of 1,000 tokens. Streams
decode at a context of about 256 tokens; rates count from the first to the last token while all streams run. Figures are
medians over rounds, ratios medians of the rounds' ratios. `cpu` counts tokens a second of the engine process's own
CPU time: on a machine with other work it shows what an undisturbed core would give.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import structlog
import torch
import uvloop
from rich.console import Console
from rich.table import Table

from baton.cli.fetch import find_model
from baton.cli.home import find_home
from baton.engine.port import Request, Reservation, SamplingParams
from baton.engine.torch.config import ModelConfig, load_config
from baton.engine.torch.host import TorchEngine
from baton.engine.torch.weights import Weights, load_weights

DTYPES = {"bf16": "bfloat16", "f32": "float32"}
PROMPT_TOKENS = 224
OUTPUT_TOKENS = 65
"""The context passes 256 half way; 64 steps between the first token and the last."""
LONG_PROMPT = 1000
STREAMS = 8
ARENA_BYTES = 512 << 20
DEADLINE_S = 600.0


@dataclass
class Round:
    """One round's figures, tokens a second."""

    limit: float = 0.0
    gb_s: float = 0.0
    rates: dict[str, float] = field(default_factory=dict)
    cpu: dict[str, float] = field(default_factory=dict)


class Bench:
    """One engine of one dtype, and its weights once more in this process for the limit."""

    def __init__(self, model: Path, config: ModelConfig, dtype: str, core: int) -> None:
        self._config = config
        self._core = core
        self._weights: Weights = load_weights(model, config, getattr(torch, dtype))
        self._engine = TorchEngine(
            model, dtype=dtype, arena_bytes=ARENA_BYTES, max_streams=STREAMS, core=core, epoch=1, owner="bench"
        )
        self._numbers = random.Random(7)
        self._uid = 0

    async def start(self) -> None:
        """Start the engine and let it meet every shape once."""
        await self._engine.start()
        await self._streams(STREAMS)
        await self._streams(1)

    async def close(self) -> None:
        """End the engine's process."""
        await self._engine.close()

    async def round(self) -> Round:
        """Measure everything once."""
        found = Round()
        found.limit, found.gb_s = self._limit()
        for name, measured in (
            ("tok_s_1", self._streams(1)),
            (f"tok_s_{STREAMS}", self._streams(STREAMS)),
            ("prefill_tok_s", self._prefill()),
        ):
            tokens, wall, cpu = await measured
            found.rates[name] = tokens / wall
            found.cpu[name] = tokens / cpu
        return found

    def _limit(self) -> tuple[float, float]:
        """Tokens a second, and GB/s, of all weight matrices times one row."""
        linears = [linear for layer in self._weights.layers for linear in layer.linears] + [self._weights.head]
        dtype = self._weights.embedding.dtype
        rows = [torch.randn(1, linear.inputs).to(dtype) for linear in linears]
        times = []
        with pinned(self._core), torch.inference_mode():
            for _ in range(20):
                start = time.perf_counter()
                for linear, row in zip(linears, rows, strict=True):
                    linear(row)
                times.append(time.perf_counter() - start)
        seconds = statistics.median(times)
        return 1 / seconds, sum(linear.bytes for linear in linears) / seconds / 1e9

    async def _streams(self, count: int) -> tuple[int, float, float]:
        """Tokens, seconds and CPU seconds while `count` streams decode together."""
        reservations = [await self._reserve(PROMPT_TOKENS, OUTPUT_TOKENS) for _ in range(count)]
        for reservation in reservations:
            await self._engine.generate(reservation)
        ours = {reservation.request.uid for reservation in reservations}
        waiting, tokens = count, 0
        start = cpu = wall = used = 0.0
        async with aclosing(self._engine.events()) as steps:
            async for step in steps:
                step = [event for event in step if event.uid in ours]
                if failed := [event for event in step if event.error is not None]:
                    raise RuntimeError(failed[0].message)
                waiting -= sum(event.offset == 0 for event in step)
                if start:
                    tokens += sum(len(event.token_ids) for event in step)
                elif not waiting:
                    start, cpu = time.perf_counter(), self._cpu()
                if any(event.finish for event in step):
                    wall, used = time.perf_counter() - start, self._cpu() - cpu
                    break
        for reservation in reservations:
            await reservation.release()
        return tokens, wall, used

    async def _prefill(self) -> tuple[int, float, float]:
        """Tokens, seconds and CPU seconds of one long prompt that no cache knows."""
        reservation = await self._reserve(LONG_PROMPT, 2)
        start, cpu = time.perf_counter(), self._cpu()
        async for _ in self._engine.prefill(reservation):
            pass
        wall, used = time.perf_counter() - start, self._cpu() - cpu
        await reservation.release()
        return LONG_PROMPT, wall, used

    async def _reserve(self, prompt: int, output: int) -> Reservation:
        self._uid += 1
        ids = [self._numbers.randrange(self._config.vocab) for _ in range(prompt)]
        sampling = SamplingParams(max_tokens=output, seed=1, temperature=0.0, ignore_eos=True)
        request = Request(str(self._uid), 1, ids, sampling, b"bench-key-root--", time.time() + DEADLINE_S)
        return await self._engine.reserve(request)

    def _cpu(self) -> float:
        times = psutil.Process(self._engine.link.pid).cpu_times()
        return float(times.user + times.system)


@contextmanager
def pinned(core: int) -> Iterator[None]:
    """This thread on that core."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


async def measure(model: Path, rounds: int) -> dict[str, list[Round]]:
    """Every dtype's rounds, interleaved."""
    core = max(os.sched_getaffinity(0))
    config = load_config(model)
    benches = {name: Bench(model, config, dtype, core) for name, dtype in DTYPES.items()}
    found: dict[str, list[Round]] = {name: [] for name in benches}
    try:
        for bench in benches.values():
            await bench.start()
        for _ in range(rounds):
            for name, bench in benches.items():
                found[name].append(await bench.round())
    finally:
        for bench in benches.values():
            await bench.close()
    return found


def summary(rounds: list[Round]) -> dict[str, Any]:
    """One dtype's object: medians."""

    def median(values: list[float]) -> float:
        return round(statistics.median(values), 3)

    return {
        **{name: median([r.rates[name] for r in rounds]) for name in rounds[0].rates},
        "fraction_of_weights_limit": median([r.rates["tok_s_1"] / r.limit for r in rounds]),
        "weights_limit_tok_s": median([r.limit for r in rounds]),
        "weights_gb_s": median([r.gb_s for r in rounds]),
        "cpu": {name: median([r.cpu[name] for r in rounds]) for name in rounds[0].cpu},
    }


def show(results: dict[str, dict[str, Any]]) -> None:
    """The table for people."""
    table = Table(title="Torch engine, one core, tokens a second (in brackets: a second of its CPU time)")
    for column in (
        "dtype",
        "1 stream",
        f"{STREAMS} streams",
        "prefill of 1,000",
        "weights read once",
        "1 stream / limit",
    ):
        table.add_column(column, justify="left" if column == "dtype" else "right")
    for name, result in results.items():
        rates = [f"{result[key]:.0f} ({result['cpu'][key]:.0f})" for key in result["cpu"]]
        limit = f"{result['weights_limit_tok_s']:.0f} ({result['weights_gb_s']:.1f} GB/s)"
        table.add_row(name, *rates, limit, f"{result['fraction_of_weights_limit']:.2f}")
    Console().print(table)


def main(argv: list[str] | None = None) -> int:
    """Run it. With --json the last line is one JSON object: bf16's figures, f32's under `f32`."""
    parser = argparse.ArgumentParser(prog="baton bench engine", description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--model", default="", help="a .gguf file or a safetensors directory; default: the laptop's")
    options = parser.parse_args(argv)
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    torch.set_num_threads(1)
    model = find_model(find_home(), options.model, lambda text: print(text, file=sys.stderr))
    results = {name: summary(rounds) for name, rounds in uvloop.run(measure(model, options.rounds)).items()}
    show(results)
    if options.json:
        print(json.dumps({**results["bf16"], "f32": results["f32"]}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
