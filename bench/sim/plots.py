"""Time to the first token and goodput against load, as PNG. matplotlib is loaded only here (extra `bench`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from bench.sim.figures import Figures

_PLOTS: dict[str, tuple[str, bool, Callable[[Figures], float]]] = {
    "ttft": ("mean time to the first token, s", True, lambda run: run.ttft_mean),
    "goodput": ("good requests, share of all", False, lambda run: run.goodput),
}
_STROKES = ("-", "--", ":")


def plot(runs: Mapping[str, Mapping[float, Figures]], title: str, folder: Path) -> list[Path]:
    """One file for each figure, a line for each of `runs`. A name may be "policy: tiers"; then a policy has one colour
    and its tiers have strokes. Returns the files."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    made = []
    for name, (label, logarithmic, value) in _PLOTS.items():
        figure, axes = pyplot.subplots(figsize=(7, 4.5))
        colours: dict[str, str] = {}
        strokes: dict[str, str] = {}
        for line, by_load in runs.items():
            policy, _, tiers = line.partition(": ")
            colour = colours.setdefault(policy, f"C{len(colours)}")
            stroke = strokes.setdefault(tiers, _STROKES[len(strokes) % len(_STROKES)])
            loads = sorted(by_load)
            axes.plot(
                loads, [value(by_load[load]) for load in loads], marker="o", color=colour, linestyle=stroke, label=line
            )
        axes.set(xlabel="load (1: the trace's own timestamps)", ylabel=label, title=title)
        axes.set_yscale("log" if logarithmic else "linear")
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
        path = folder / f"sim_{name}.png"
        figure.savefig(path, dpi=120, bbox_inches="tight")
        pyplot.close(figure)
        made.append(path)
    return made
