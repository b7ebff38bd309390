"""Apart, merged, or whichever is cheaper for each request: four mixes of long prompts and long answers.

Two cores each way, each engine pinned to one, and the same arrivals. Chats decode while documents of 1,000 tokens come
(bench/mixes.py); one of the mixes has documents with shared prefixes. Three setups:

- pd: one prefill, one decode, and a frontend that is strict: every prompt is handed over, whatever it costs. What
  people get who part prefill and decode and do no more.
- merged: two merged workers behind a balancer that sends each request to the one with fewer outstanding (bench/pd.py
  says why no router of ours stands there), with the better of two chunk sizes, tried on the balanced mix.
- ours: the router free to choose. For that the two cores must be able to be both, so core 0 has a prefill and a merged
  worker, core 1 a decode worker, which computes prompts too when that is cheaper. A second merged worker on core 1
  could do nothing that decode cannot. Idle processes cost nothing; two on one core share it. Prefill has pd's chunk
  size, the two that stream have merged's.

All stay up; measured turns alternate, in an order that turns round each time. The load is set by what pd shows when
idle (chats by the time of a token beside as many as the mix has), and so is the SLO: twice the idle TTFT of a document,
twice the idle time per token of four chats. Goodput counts requests a
second within both; a refusal is a miss. ITL is the time between two pieces of text of one answer, at the client, of all
answers. A turn begins with some seconds that fill the setup and are not measured; its last requests end undisturbed.
Figures of a setup pool gaps and requests of its turns; ratios are the medians of the turns' own.

Meaning of the ratios: `itl_p99` below 1 is good, `goodput` above 1 is good.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass
from typing import Any

import httpx
from rich.console import Console

from bench.balance import Balancer, merged_pair, words
from bench.load import Answer
from bench.mix_figures import Turn, compare, figures, turn_of
from bench.mix_show import plot, show
from bench.mixes import (
    CHAT_PROMPT,
    CHAT_TOKENS,
    CHATS,
    DOCUMENT_PROMPT,
    DOCUMENT_TOKENS,
    FILL,
    MIXES,
    PD_CHUNK,
    Idle,
    Mix,
    Prompts,
    arrivals,
)
from bench.run import Run, running
from bench.sim.cores import Speed
from bench.sim.mixed import idle as simulated_idle
from bench.sim.mixed import simulate
from services.router.costs import Parameters

CHUNKS = (64, 256)
"""The best of the five that bench/pd.py tries, and the default."""
TRIAL_TURNS = 2
TRIAL_SEED = 98
"""Seeds of arrivals that no measured turn has."""
RUSH = 32
"""Chats at once before anything is measured: then every worker of ours has had some, and the rates that the router has
of it are no longer those of a start on which two measured on one core."""
MOST_CHATS = max(round(mix.chats) for mix in MIXES)
IDLE_TURNS = 3
"""Of each number of chats, for the idle figures: one alone may fall into a slow moment of the machine."""
TURNS, SIMULATED_TURNS = 3, 24
SETTINGS = {"pool_gib": 0.5, "capacity_gib": 0.5}
"""Seven engines and four stores are up at once."""


async def turn(runs: Sequence[Run], mix: Mix, idle: Idle, prompts: Prompts, seed: int, seconds: float) -> Turn:
    """Let requests come for a quarter of `seconds`, then measure for `seconds`, then wait for the last of them."""
    fill = FILL * seconds
    before: list[Answer] = []
    chats: list[Answer] = []
    documents: list[Answer] = []
    loop = asyncio.get_running_loop()
    async with AsyncExitStack() as stack:
        balancer = Balancer(runs, [await stack.enter_async_context(_client(run)) for run in runs])
        async with asyncio.TaskGroup() as group:
            begun, clock = loop.time(), time.perf_counter()
            for arrival in arrivals(mix, idle, fill + seconds, seed):
                await asyncio.sleep(max(0.0, begun + arrival.at - loop.time()))
                answer = Answer()
                (before if arrival.at < fill else documents if arrival.document else chats).append(answer)
                group.create_task(balancer.send(*prompts.of(arrival), answer))
    start = clock + fill
    return turn_of(chats, documents, before, start, start + seconds, idle)


def _client(run: Run) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=run.url, limits=httpx.Limits(max_connections=None), trust_env=False)


async def send(
    runs: Sequence[Run], prompts: Sequence[Sequence[int]], tokens: int, at_once: bool = False
) -> list[Answer]:
    """Every prompt to every run. Raises RuntimeError when one fails."""
    answers = []
    for run in runs:
        async with _client(run) as client:
            balancer = Balancer([run], [client])
            mine = [Answer() for _ in prompts]
            calls = [balancer.send(prompt, tokens, answer) for prompt, answer in zip(prompts, mine, strict=True)]
            if at_once:
                await asyncio.gather(*calls)
            else:
                for call in calls:
                    await call
            answers += mine
    if errors := [answer.error for answer in answers if answer.error]:
        raise RuntimeError(f"a request failed: {errors[0]}")
    return answers


async def idle_figures(run: Run) -> Idle:
    """From lone documents, and from few and more chats that nothing else disturbs, turn about."""
    lone = await send([run], [words(DOCUMENT_PROMPT) for _ in range(4)], DOCUMENT_TOKENS)
    counts = (CHATS, MOST_CHATS)
    tokens: dict[int, list[float]] = {count: [] for count in counts}
    for count in counts * IDLE_TURNS:
        chats = await send([run], [words(CHAT_PROMPT) for _ in range(count)], 100, at_once=True)
        tokens[count].append(statistics.median(answer.tpot for answer in chats))
    few, more = (statistics.median(tokens[count]) for count in counts)
    return Idle(statistics.median(answer.ttft for answer in lone[1:]), few, max(0.0, more - few) / (MOST_CHATS - CHATS))


def try_chunks(
    console: Console, idle: Idle, seconds: float, model: str, chunks: Sequence[int] = CHUNKS
) -> dict[int, dict[str, Any]]:
    """Some turns of merged on the balanced mix with each chunk size, pooled: in a single one often no document comes
    while chats stream."""
    mix, tried = MIXES[1], {}
    for chunk in chunks:
        with ExitStack() as stack:
            runs = merged_pair(stack, chunk, model, SETTINGS)
            asyncio.run(send(runs, [words(DOCUMENT_PROMPT)], DOCUMENT_TOKENS))
            turns = [
                asyncio.run(turn(runs, mix, idle, Prompts(mix), TRIAL_SEED + n, seconds)) for n in range(TRIAL_TURNS)
            ]
            tried[chunk] = figures(turns)
        console.print(f"  merged, chunk {chunk}: {_said(tried[chunk])}", style="dim", soft_wrap=True)
    return tried


def best_chunk(tried: dict[int, dict[str, Any]]) -> int:
    """The chunk of the best goodput; of equal ones that of the lowest ITL p99."""
    return min(tried, key=lambda chunk: (-tried[chunk]["goodput"], tried[chunk]["itl_p99_ms"]))


def measure(
    console: Console, setups: dict[str, list[Run]], mix: Mix, idle: Idle, turns: int, seconds: float
) -> dict[str, list[Turn]]:
    """Alternate turns of all setups. Shared prefixes are known to each before the first one."""
    prompts = Prompts(mix)
    for runs in setups.values():
        asyncio.run(send(runs, [*prompts.first(), words(CHAT_PROMPT)], DOCUMENT_TOKENS))
    results: dict[str, list[Turn]] = {name: [] for name in setups}
    for number in range(turns):
        for name in list(setups)[:: -1 if number % 2 else 1]:
            results[name].append(asyncio.run(turn(setups[name], mix, idle, prompts, number, seconds)))
            told = f"  {mix.name}, turn {number + 1}/{turns}, {name}: {_said(figures(results[name][-1:]))}"
            console.print(told, style="dim", soft_wrap=True)
    return results


def _said(f: dict[str, Any]) -> str:
    return (
        f"ITL p99 {f['itl_p99_ms']:.0f} ms, TTFT {f['chat_ttft_p50_s']:.2f} and {f['document_ttft_p50_s']:.2f} s, "
        f"good {' and '.join(f['good_turns'])}, errors {f['errors']}"
    )


@dataclass(frozen=True)
class Measured:
    """Turns by mix and setup, under the SLO that `idle` makes; `chunk` is merged's, `tried` what trying some gave."""

    turns: dict[str, dict[str, list[Turn]]]
    idle: Idle
    chunk: int
    tried: dict[int, dict[str, Any]]


def simulated(mixes: Sequence[Mix], turns: int, seconds: float, chunk: int) -> Measured:
    """The same in the simulator."""
    found = {mix.name: simulate(mix, turns, seconds, chunk, Parameters()) for mix in mixes}
    return Measured(found, simulated_idle(Speed()), chunk, {})


def on_engines(console: Console, mixes: Sequence[Mix], options: argparse.Namespace) -> Measured:
    """Start everything, and measure every mix."""
    with ExitStack() as stack:

        def up(*flags: str) -> list[Run]:
            command = (*flags, "--cores", "0,1")
            return [stack.enter_context(running(*command, model=options.model, settings=SETTINGS))]

        pd = up(
            "--prefill", "1", "--decode", "1", "--merged", "0", "--chunk-tokens", str(PD_CHUNK), "--fallback", "strict"
        )
        idle = asyncio.run(idle_figures(pd[0]))
        console.print(
            f"  idle: a document {idle.document_s:.2f} s, a token {idle.token_s * 1e3:.0f} ms; "
            f"SLO {idle.slo_ttft_s:.2f} s and {idle.slo_tpot_s * 1e3:.0f} ms",
            style="dim",
            soft_wrap=True,
        )
        tried = {} if options.chunk else try_chunks(console, idle, options.seconds, options.model)
        chunk = options.chunk or best_chunk(tried)
        setups = {
            "pd": pd,
            "merged": merged_pair(stack, chunk, options.model, SETTINGS),
            "ours": up(
                *("--prefill", "1", "--decode", "1", "--merged", "1"),
                *("--chunk-tokens", str(chunk), "--prefill-chunk-tokens", str(PD_CHUNK)),
            ),
        }
        for runs in setups.values():
            asyncio.run(send(runs, [words(DOCUMENT_PROMPT), words(DOCUMENT_PROMPT)], DOCUMENT_TOKENS))
            asyncio.run(send(runs, [words(CHAT_PROMPT) for _ in range(RUSH // len(runs))], CHAT_TOKENS, at_once=True))
        turns = options.turns or TURNS
        return Measured(
            {mix.name: measure(console, setups, mix, idle, turns, options.seconds) for mix in mixes}, idle, chunk, tried
        )


def main(argv: list[str] | None = None) -> int:
    """Run it. With --json the last line is one JSON object."""
    parser = argparse.ArgumentParser(prog="baton bench mix", description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument(
        "--turns", type=int, default=0, help="measured turns of each setup in each mix (3; simulated, 24)"
    )
    parser.add_argument("--seconds", type=float, default=15.0, help="length of a turn")
    parser.add_argument("--chunk", type=int, default=0, help="merged's chunk size; 0 tries some first")
    parser.add_argument("--mixes", nargs="*", default=[mix.name for mix in MIXES], help="some of the mixes")
    parser.add_argument("--model", default="", help="model file or directory; default: the one of `baton up`")
    parser.add_argument(
        "--simulate", action="store_true", help="in the simulator: seconds instead of minutes, no engine"
    )
    parser.add_argument("--plot", default="", metavar="FILE.png", help="draw ITL p99 and goodput by mix")
    options = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # like Ctrl-C: what was started is ended
    chosen = [mix for mix in MIXES if mix.name in options.mixes]
    console = Console()
    began = time.monotonic()
    if options.simulate:
        measured = simulated(chosen, options.turns or SIMULATED_TURNS, options.seconds, options.chunk or PD_CHUNK)
    else:
        measured = on_engines(console, chosen, options)
    results, idle = measured.turns, measured.idle
    result: dict[str, Any] = {}
    for name, of in results.items():
        result[name] = compare(of) | {setup: figures(turns) for setup, turns in of.items()}
    show(console, result)
    if options.plot:
        plot(results, options.plot)
    result |= {
        "simulated": options.simulate,
        "merged_chunk": measured.chunk,
        "merged_chunks": {str(c): {k: f[k] for k in ("itl_p99_ms", "goodput")} for c, f in measured.tried.items()},
        "slo": {"ttft_s": round(idle.slo_ttft_s, 3), "tpot_s": round(idle.slo_tpot_s, 4)},
        "seconds": round(time.monotonic() - began),
    }
    if options.json:
        print(json.dumps(result), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
