"""What a person sees: progress that lives in a terminal and is plain lines elsewhere, errors in one line.

A program sees JSON instead.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from baton.cli.errors import CliError

out = Console(highlight=False, emoji=False)
if not out.is_terminal:
    out.width = 160  # a pipe has no columns: cut nothing
err = Console(stderr=True, highlight=False, emoji=False, soft_wrap=True)


def show_error(error: CliError) -> None:
    """The last log lines if there are any, one line of error, one of what to do."""
    if error.detail:
        err.print(escape(error.detail), style="dim")
    err.print(f"[bold red]error:[/] {escape(_one_line(error.message))}")
    if error.hint:
        err.print(f"[bold]hint:[/] {escape(_one_line(error.hint))}")
    for note in notes(error):
        err.print(escape(note), style="dim")


def _one_line(text: str) -> str:
    """What a terminal would act on (line ends, escapes: some of it is what somebody gave) shown as in a string."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def notes(error: BaseException) -> list[str]:
    """What was added to it on its way up: what was ended because of it."""
    return list(getattr(error, "__notes__", []))


@dataclass(frozen=True)
class _Step:
    """What a line of the progress says, since so many seconds after its begin."""

    state: str
    at_s: float
    done: bool


class LiveProgress:
    """Each process with its state and seconds, on stderr; a context manager."""

    def __init__(self) -> None:
        self._rows: dict[str, _Step] = {}
        self._over = False
        self._began = time.monotonic()
        self._spinner = Spinner("dots")
        self._live = Live(console=err, refresh_per_second=8, get_renderable=self._render, transient=False)

    def step(self, name: str, state: str, *, done: bool = False) -> None:
        """A process, or a step, is now in this state; `done` is one that it stays in."""
        if name in self._rows and self._rows[name].state == state:
            return
        at = time.monotonic() - self._began
        self._rows[name] = _Step(state, at, done)
        if not err.is_terminal:
            err.print(f"{at:6.1f} s  {name}: {escape(state)}")

    def __enter__(self) -> LiveProgress:
        if err.is_terminal:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._over = True
        if err.is_terminal:
            self._live.stop()

    def _render(self) -> Group:
        table = Table.grid(padding=(0, 2))
        # What is drawn last stays on the terminal: nothing that is over may look as if it went on.
        going = Text("✗", style="red") if self._over else self._spinner
        for name, step in list(self._rows.items()):  # drawn in a thread of its own
            sign = Text("✓", style="green") if step.done else going
            state = Text(step.state, style="green" if step.done else "yellow")
            table.add_row(sign, name, state, f"{step.at_s:.1f} s" if step.done else "")
        return Group(table)


def print_json(value: object) -> None:
    """On stdout, for programs."""
    sys.stdout.write(json.dumps(value, indent=1) + "\n")


def seconds(value: float) -> str:
    """A duration as a person reads it."""
    if value < 60:
        return f"{value:.0f} s"
    if value < 3600:
        return f"{value / 60:.0f} min"
    return f"{value / 3600:.1f} h"
