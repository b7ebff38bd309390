"""The tables and the plot of bench/mix.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from bench.mix_figures import Turn, figures
from bench.mixes import MIXES

SETUPS = ("pd", "merged", "ours")


def show(console: Console, result: Mapping[str, Any]) -> None:
    """The tables for people."""
    table = Table(
        title="chats (24 in, 96 out), documents (1,000 in, 16 out); turns pooled",
        box=SIMPLE,
        pad_edge=False,
        padding=(0, 0, 0, 1),
    )
    titles = ("mix", "setup", "ITL p50", "p99 ms", "TTFT chat", "doc. s", "good /s", "share", "tok/s", "err.")
    for column, title in enumerate(titles):
        table.add_column(title, justify="right" if column > 1 else "left", no_wrap=column < 2)
    keys = ("itl_p50_ms", "itl_p99_ms", "chat_ttft_p50_s", "document_ttft_p50_s", "goodput", "good_share", "tok_s")
    ratios = Table(
        title="ratios, medians of the turns' (ITL p99: below 1 is good; goodput: above 1 is good)",
        box=SIMPLE,
        pad_edge=False,
        padding=(0, 0, 0, 1),
    )
    for column, title in enumerate(("mix", "", "ITL p99", "goodput")):
        ratios.add_column(title, justify="right" if column > 1 else "left")
    for name in (mix.name for mix in MIXES if mix.name in result):
        of = result[name]
        for setup in SETUPS:
            row = (f"{of[setup][key]:.4g}" for key in (*keys, "errors"))
            table.add_row(name, setup, *row, end_section=setup == SETUPS[-1])
        for ratio in ("pd_over_merged", "ours_over_best", "ours_over_better"):
            said = f"ours over {of['better']}, the better" if ratio == "ours_over_better" else ratio.replace("_", " ")
            values = (f"{value:g}" if value is not None else "-" for value in of[ratio].values())
            ratios.add_row(name, said, *values, end_section=ratio == "ours_over_better")
    console.print(table)
    console.print(ratios)


def plot(results: Mapping[str, Mapping[str, Sequence[Turn]]], path: str) -> None:
    """ITL p99 and goodput of each setup, by mix, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(2, 1, figsize=(7, 6), sharex=True)
    for number, setup in enumerate(SETUPS):
        at = [place + (number - 1) * 0.27 for place in range(len(results))]
        told = [figures(of[setup]) for of in results.values()]
        above.bar(at, [f["itl_p99_ms"] for f in told], 0.25, label=setup)
        below.bar(at, [f["goodput"] for f in told], 0.25)
    above.set(ylabel="ITL p99, ms", yscale="log")
    below.set(ylabel="goodput, requests a second", xticks=range(len(results)), xticklabels=list(results))
    above.legend()
    for axes in (above, below):
        axes.grid(alpha=0.3, axis="y")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
