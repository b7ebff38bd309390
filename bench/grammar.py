"""What a grammar costs: the mask of one token, and the rate of eight streams that follow one against eight that do not.

Rounds alternate between the two on one engine (bf16, one core); rates count from the first step in which all streams
run to the end of the first. Masks are timed in this process, over a text that follows the grammar, one token at a time.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
from contextlib import aclosing
from pathlib import Path
from typing import Any

import structlog
import uvloop
from rich.console import Console
from rich.table import Table

from baton.cli.fetch import find_model
from baton.cli.home import find_home
from baton.engine.port import Grammar, GrammarKind, Request, SamplingParams
from baton.engine.torch.host import TorchEngine
from baton.grammar.compile import Vocabulary
from baton.grammar.follow import Follower
from baton.model.card import load_model

STREAMS = 8
PROMPT_TOKENS = 64
OUTPUT_TOKENS = 65
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "mail": {"type": "string", "pattern": "^[a-z]{1,20}@[a-z]{1,20}\\.(org|com)$"},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 1, "maxItems": 4},
    },
    "required": ["name", "age", "mail", "tags"],
    "additionalProperties": False,
}
PEOPLE = Grammar(GrammarKind.JSON, json.dumps({"type": "array", "items": PERSON, "minItems": 50}))
"""Longer than any output here: no stream ends before its budget."""
TEXT = json.dumps(
    [
        {"name": "Ada Lovelace of London", "age": 36, "mail": "ada@engine.org", "tags": ["red", "blue"]},
        {"name": "Grace Hopper", "age": 85, "mail": "grace@navy.com", "tags": ["green"]},
    ]
)[:-1]


def masks(model: Path) -> dict[str, float]:
    """Milliseconds to build the vocabulary and to compile; microseconds for a mask."""
    loaded = load_model(model)
    tokenizer = loaded.tokenizer
    vocabulary = Vocabulary(lambda: tokenizer, tokenizer.vocab_size, loaded.generation.eos_ids)
    start = time.perf_counter()
    vocabulary.built()
    built = time.perf_counter()
    program = vocabulary.compile(PEOPLE)
    compiled = time.perf_counter()
    ids = tokenizer.encode(TEXT, add_special=False)
    times: list[float] = []
    for _ in range(20):
        follower = Follower(program)
        for size in range(len(ids)):
            begun = time.perf_counter()
            follower.allowed(ids[:size], tokenizer.vocab_size)
            times.append(time.perf_counter() - begun)
    times.sort()
    return {
        "vocabulary_ms": (built - start) * 1e3,
        "compile_ms": (compiled - built) * 1e3,
        "mask_us": statistics.median(times) * 1e6,
        "mask_p99_us": times[len(times) * 99 // 100] * 1e6,
    }


class Bench:
    """One engine."""

    def __init__(self, engine: TorchEngine) -> None:
        self._engine = engine
        self._numbers = random.Random(7)
        self._uid = 0

    async def rate(self, grammar: Grammar | None) -> float:
        """Tokens a second of eight streams."""
        reservations = [await self._engine.reserve(self._request(grammar)) for _ in range(STREAMS)]
        for reservation in reservations:
            await self._engine.generate(reservation)
        ours = {reservation.request.uid for reservation in reservations}
        waiting, tokens, start = set(ours), 0, 0.0
        rate = 0.0
        async with aclosing(self._engine.events()) as steps:
            async for step in steps:
                step = [event for event in step if event.uid in ours]
                if failed := [event for event in step if event.error is not None]:
                    raise RuntimeError(failed[0].message)
                waiting -= {event.uid for event in step}
                if start:
                    tokens += sum(len(event.token_ids) for event in step)
                elif not waiting:
                    start = time.perf_counter()
                if any(event.finish for event in step):
                    rate = tokens / (time.perf_counter() - start)
                    break
        for reservation in reservations:
            await reservation.release()
        return rate

    def _request(self, grammar: Grammar | None) -> Request:
        self._uid += 1
        ids = [self._numbers.randrange(self._engine.spec.vocab_size) for _ in range(PROMPT_TOKENS)]
        # Drawn, and in both cases with a seed: greedy streams of random prompts end in circles.
        sampling = SamplingParams(OUTPUT_TOKENS, seed=self._uid, temperature=0.8, ignore_eos=True, grammar=grammar)
        return Request(str(self._uid), 1, ids, sampling, b"bench-key-root--", time.time() + 600)


async def rates(model: Path, rounds: int) -> tuple[float, float]:
    """Medians of tokens a second, without and with a grammar."""
    core = max(os.sched_getaffinity(0))
    engine = TorchEngine(model, arena_bytes=256 << 20, max_streams=STREAMS, core=core, epoch=1, owner="bench")
    await engine.start()
    try:
        bench = Bench(engine)
        for grammar in (None, PEOPLE):
            await bench.rate(grammar)
        found = [(await bench.rate(None), await bench.rate(PEOPLE)) for _ in range(rounds)]
    finally:
        await engine.close()
    return statistics.median(f for f, _ in found), statistics.median(g for _, g in found)


def main(argv: list[str] | None = None) -> int:
    """Run it. With --json the last line is one JSON object."""
    parser = argparse.ArgumentParser(prog="baton bench grammar", description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--model", default="", help="a .gguf file or a safetensors directory; default: the laptop's")
    options = parser.parse_args(argv)
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    model = find_model(find_home(), options.model, lambda text: print(text, file=sys.stderr))
    result = masks(model)
    free, followed = uvloop.run(rates(model, options.rounds))
    result |= {"tok_s_free": free, "tok_s_grammar": followed, "ratio": followed / free}
    table = Table(title=f"A grammar's cost, {STREAMS} streams, one core")
    for name in result:
        table.add_column(name, justify="right")
    table.add_row(*(f"{value:.3g}" for value in result.values()))
    Console().print(table)
    if options.json:
        print(json.dumps({name: round(value, 3) for name, value in result.items()}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
