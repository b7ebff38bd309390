"""What a person sees: progress that lives in a terminal and is plain lines elsewhere, errors in one line."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from baton.cli.errors import CliError

out = Console(highlight=False)
if not out.is_terminal:
    out.width = 160  # a pipe has no columns: cut nothing
err = Console(stderr=True, highlight=False, soft_wrap=True)

_DONE = {"ready", "disaggregated", "merged", "local"}


def show_error(error: CliError) -> None:
    """The last log lines if there are any, one line of error, one of what to do."""
    if error.detail:
        err.print(escape(error.detail), style="dim")
    err.print(f"[bold red]error:[/] {escape(error.message)}")
    if error.hint:
        err.print(f"[bold]hint:[/] {escape(error.hint)}")


class LiveProgress:
    """Each process with its state and seconds, on stderr; a context manager."""

    def __init__(self) -> None:
        self._rows: dict[str, tuple[str, float]] = {}
        self._began = time.monotonic()
        self._live = Live(console=err, refresh_per_second=8, get_renderable=self._render, transient=False)
        self._spinner = Spinner("dots")

    def step(self, name: str, state: str) -> None:
        """A process, or a step, is now in this state."""
        if self._rows.get(name, ("", 0.0))[0] == state:
            return
        self._rows[name] = (state, time.monotonic() - self._began)
        if not err.is_terminal:
            err.print(f"{self._rows[name][1]:6.1f} s  {name}: {escape(state)}")

    def __enter__(self) -> LiveProgress:
        if err.is_terminal:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if err.is_terminal:
            self._live.stop()

    def _render(self) -> Group:
        table = Table.grid(padding=(0, 2))
        for name, (state, at) in self._rows.items():
            done = state in _DONE
            sign = Text("✓", style="green") if done else self._spinner
            table.add_row(sign, name, Text(state, style="green" if done else "yellow"), f"{at:.1f} s" if done else "")
        return Group(table)


def seconds(value: float) -> str:
    """A duration as a person reads it."""
    if value < 60:
        return f"{value:.0f} s"
    if value < 3600:
        return f"{value / 60:.0f} min"
    return f"{value / 3600:.1f} h"
