"""Play a trace at several loads on a fleet with prefill and decode pools: time to the first token and goodput, plotted.

    baton bench sweep [--trace NAME] [--prefills N] [--decodes N] [--loads 0.6 0.8 1 ...] [--tiers] [--out FOLDER]
                      [--json]

A load of 1 is the trace's own timestamps with one copy of it for each 8 prefill nodes (trace.py); 2 is twice as fast.
One node of each pool dies in mid-run and comes back. Goodput is the share of all requests that got their first token
and the others in time: refused ones count as failed. `ours_refusing` gives the policy the SLO, so it refuses early what
cannot make it.

With `--tiers` the cache of a node is its device's, small, and the question is what a KV store below it is worth: none,
host memory, host memory over a disk (sim/tiers.py).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from bench.sim.figures import Figures, Slo, figures
from bench.sim.fleet import Setting
from bench.sim.frozen import SEEDS, LeastLoaded, MaxPrefix, Random, RoundRobin
from bench.sim.ours import Ours
from bench.sim.plots import plot
from bench.sim.tiers import Tiers
from bench.sim.trace import Trace, shipped, traces_folder
from bench.sim.world import Failure, Policy, World

COPY_PREFILLS = 8
DEVICE_TOKENS = 200_000
"""Of a device's cache beside its weights: 66 GB of a 70B model's KV."""
SLO = Slo(ttft_s=10.0, tpot_s=0.1)
DOWN_S = 60.0

CONTENDERS: dict[str, Callable[[], Policy]] = {
    "random": lambda: Random(SEEDS[0]),
    "round_robin": lambda: RoundRobin(SEEDS[0]),
    "least_loaded": lambda: LeastLoaded(SEEDS[0]),
    "max_prefix": lambda: MaxPrefix(SEEDS[0]),
    "ours": Ours,
    "ours_refusing": lambda: Ours(ttft_slo_s=SLO.ttft_s),
}

TIERED = ("least_loaded", "max_prefix", "ours")
"""Those that are played with and without tiers."""
TIERS = {
    "no store": Tiers(host_tokens=0, nvme_tokens=0),
    "host": Tiers(nvme_tokens=0),
    "host, nvme": Tiers(),
}

Lines = dict[str, tuple[str, Setting]]
"""By name, a policy of `CONTENDERS` and the fleet that it is played on."""
Runs = dict[str, dict[float, Figures]]
"""By line, by load."""


def lines(setting: Setting, *, tiers: bool) -> Lines:
    """All policies on one fleet; with `tiers` some, on the same machines with more and more tiers."""
    if not tiers:
        return {name: (name, setting) for name in CONTENDERS}
    device = replace(setting, cache_tokens=DEVICE_TOKENS)
    return {
        f"{name}: {below}": (name, replace(device, tiers=store)) for below, store in TIERS.items() for name in TIERED
    }


def sweep(played: Lines, trace: Trace, loads: list[float], progress: Progress) -> Runs:
    """Every line at every load."""
    runs: Runs = {name: {} for name in played}
    total = progress.add_task("all runs", total=len(runs) * len(loads))
    for load in loads:
        arriving = trace.faster(load)
        middle = arriving.seconds / 3
        failures = [Failure(middle, "prefill", 0, DOWN_S)]
        for name, (policy, setting) in played.items():
            dying = [*failures, Failure(2 * middle, "decode", 0, DOWN_S)] if setting.decodes else failures
            task = progress.add_task(f"{name} at {load}", total=len(arriving.requests))

            def seen(task: object = task) -> None:
                progress.advance(task)  # type: ignore[arg-type]

            jobs = World(setting, arriving, CONTENDERS[policy](), dying, seen).run()
            runs[name][load] = figures(jobs, SLO)
            progress.remove_task(task)
            progress.advance(total)
    return runs


def show(runs: Runs) -> None:
    """The table for people."""
    table = Table(title=f"goodput: TTFT <= {SLO.ttft_s:.0f} s and {SLO.tpot_s * 1e3:.0f} ms a token, of all requests")
    for column in ("load", "policy", "mean TTFT", "p99", "ms a token", "goodput", "refused", "resumed"):
        table.add_column(column, justify="left" if column == "policy" else "right")
    for load in next(iter(runs.values())):
        for name, by_load in runs.items():
            run = by_load[load]
            table.add_row(
                f"{load:g}", name, f"{run.ttft_mean:.2f} s", f"{run.ttft_p99:.1f} s", f"{run.tpot_mean * 1e3:.0f}",
                f"{run.goodput:.3f}", f"{run.refused:.0f}", f"{run.resumed:.0f}",
            )  # fmt: skip
        table.add_section()
    Console().print(table)


def show_hits(runs: Runs) -> None:
    """Where the tokens lay that needed no computing."""
    table = Table(title="of the prompt tokens, on the device, in host memory, on a disk, computed")
    for column in ("load", "policy", "device", "host", "nvme", "computed"):
        table.add_column(column, justify="left" if column == "policy" else "right")
    for load in next(iter(runs.values())):
        for name, by_load in runs.items():
            run = by_load[load]
            shares = (run.hit - run.loaded, run.loaded - run.disk, run.disk, 1.0 - run.hit)
            table.add_row(f"{load:g}", name, *(f"{share:.3f}" for share in shares))
        table.add_section()
    Console().print(table)


def main(argv: list[str] | None = None) -> int:
    """Run it. With --json the last line is one JSON object."""
    parser = argparse.ArgumentParser(prog="baton bench sweep", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument("--traces", type=Path, default=traces_folder(), help="folder of the traces")
    parser.add_argument("--trace", default="mooncake_conversation")
    parser.add_argument("--prefills", type=int, default=32)
    parser.add_argument("--decodes", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=600.0, help="of the trace at its own speed")
    parser.add_argument("--loads", type=float, nargs="+", default=[0.6, 0.8, 1.0, 1.2, 1.4, 1.6])
    parser.add_argument("--tiers", action="store_true", help="a small cache, without and with a store's tiers below it")
    parser.add_argument("--out", type=Path, help="folder for the plots (PNG)")
    options = parser.parse_args(argv)
    traces = shipped(options.traces) if options.traces else {}
    if options.trace not in traces:
        parser.error(f"no trace {options.trace} in {options.traces}: {', '.join(traces) or 'none'}")
    copies = max(1, options.prefills // COPY_PREFILLS)
    trace = traces[options.trace].copies(copies, seconds=options.seconds)
    setting = Setting(prefills=options.prefills, decodes=options.decodes)
    with Progress(console=Console(stderr=True), transient=True) as progress:
        runs = sweep(lines(setting, tiers=options.tiers), trace, options.loads, progress)
    show(runs)
    if options.tiers:
        show_hits(runs)
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        for path in plot(runs, f"{options.trace}, {setting.prefills}P {setting.decodes}D", options.out):
            Console().print(f"plotted {path}", markup=False)
    if options.json:
        said = {name: {f"{load:g}": asdict(run) for load, run in by_load.items()} for name, by_load in runs.items()}
        print(json.dumps(said), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
