"""Does placing prompts by prefix and load pay? Mean time to the first token of each policy on the shipped traces.

Simulated (bench/sim): prompts only, FIFO, on the fleets and arrivals of bench/sim/frozen.py: the Mooncake traces by
their own timestamps, the light Azure traces so much faster that they offer 60 % of what 8 nodes compute; and 125 copies
of the conversation side by side on 1,000 nodes, the first minutes. Ratios: mean TTFT of the policy over ours, above 1
is slower than ours.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from statistics import fmean

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from bench.sim import frozen
from bench.sim.figures import Figures, figures
from bench.sim.fleet import Setting
from bench.sim.frozen import BASELINES, FLEET, LARGE_FLEET, SLO, Baseline, LeastLoadedLoading
from bench.sim.ours import Ours
from bench.sim.trace import Trace, shipped, traces_folder
from bench.sim.world import Policy, World

OURS = "ours"

Maker = Callable[[int], Policy]
"""A policy from a seed."""


def contenders(*, ablations: bool) -> dict[str, Maker]:
    """Every policy; ours needs no seed. Ablations: placed by load but loading, and ours without loading."""
    kinds: tuple[type[Baseline], ...] = (*BASELINES, LeastLoadedLoading) if ablations else BASELINES
    found: dict[str, Maker] = {kind.name: kind for kind in kinds}
    if ablations:
        found["ours_without_loading"] = lambda seed: Ours(loads=False)
    found[OURS] = lambda seed: Ours()
    return found


def compared(
    setting: Setting, trace: Trace, seeds: tuple[int, ...], progress: Progress, *, ablations: bool
) -> dict[str, Figures]:
    """Figures of every policy on `trace`: means over the seeds."""
    found = {}
    for name, make in contenders(ablations=ablations).items():
        own = seeds if "ours" not in name else seeds[:1]
        task = progress.add_task(
            f"{trace.name}, {setting.prefills} nodes: {name}", total=len(own) * len(trace.requests)
        )

        def seen(task: object = task) -> None:
            progress.advance(task)  # type: ignore[arg-type]

        found[name] = _mean([figures(World(setting, trace, make(seed), seen=seen).run(), SLO) for seed in own])
        progress.remove_task(task)
    return found


def _mean(runs: list[Figures]) -> Figures:
    columns = [asdict(run) for run in runs]
    return Figures(**{name: fmean(column[name] for column in columns) for name in columns[0]})


def told(trace: Trace, found: dict[str, Figures]) -> dict[str, float]:
    """What the run says, ready for JSON. `frozen` is whether the arrivals are those that figures are compared on."""
    as_frozen = trace.digest() == frozen.ARRIVALS.get(trace.name)
    if not as_frozen:
        Console().print(f"{trace.name}: other arrivals than the frozen ones; compare with no other run", markup=False)
    ours = found[OURS].ttft_mean
    over = {f"{name}_over_ours": round(run.ttft_mean / ours, 3) for name, run in found.items() if name != OURS}
    means = {f"{name}_ttft_s": round(run.ttft_mean, 3) for name, run in found.items()}
    goodputs = {f"{name}_goodput": round(run.goodput, 4) for name, run in found.items()}
    return {"frozen": as_frozen} | over | means | goodputs


def show(title: str, found: dict[str, Figures]) -> None:
    """The table for people."""
    table = Table(title=title)
    for column in ("policy", "mean TTFT", "over ours", "p50", "p99", "hits", "loaded", f"TTFT <= {SLO.ttft_s:.0f} s"):
        table.add_column(column, justify="left" if column == "policy" else "right")
    for name, run in found.items():
        table.add_row(
            name, f"{run.ttft_mean:.3f} s", f"{run.ttft_mean / found[OURS].ttft_mean:.2f}", f"{run.ttft_p50:.2f} s",
            f"{run.ttft_p99:.2f} s", f"{run.hit:.3f}", f"{run.loaded:.3f}", f"{run.goodput:.3f}",
        )  # fmt: skip
    Console().print(table)


def main(argv: list[str] | None = None) -> int:
    """Run it. With --json the last line is one JSON object."""
    parser = argparse.ArgumentParser(prog="baton bench routing", description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument("--traces", type=Path, default=traces_folder(), help="folder of the traces")
    parser.add_argument(
        "--large-s", type=float, default=frozen.LARGE_S, help="seconds of trace at 1,000 nodes; 0 leaves it out"
    )
    options = parser.parse_args(argv)
    traces = shipped(options.traces) if options.traces else {}
    if not traces:
        parser.error("no traces: give --traces a folder with Mooncake's .jsonl or Azure's .csv files")
    results: dict[str, dict[str, float]] = {}
    with Progress(console=Console(stderr=True), transient=True) as progress:
        for trace in frozen.arrivals(traces):
            found = compared(FLEET, trace, frozen.SEEDS, progress, ablations=True)
            results[trace.name] = told(trace, found)
            show(f"{trace.name}, {FLEET.prefills} nodes", found)
        if options.large_s and frozen.LARGE_TRACE in traces:
            trace = frozen.large_arrivals(traces[frozen.LARGE_TRACE], options.large_s)
            found = compared(LARGE_FLEET, trace, frozen.LARGE_SEEDS, progress, ablations=False)
            results[trace.name] = told(trace, found)
            show(f"{frozen.LARGE_COPIES} x {frozen.LARGE_TRACE}, {LARGE_FLEET.prefills} nodes", found)
    if options.json:
        print(json.dumps(results), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
