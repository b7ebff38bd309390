"""What a person sees while something goes on, and what stays on the terminal."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console
from rich.spinner import SPINNERS

from baton.cli import show
from baton.cli.errors import CliError
from baton.cli.show import LiveProgress

FRAMES = set(str(SPINNERS["dots"]["frames"]))


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """What a terminal of 80 columns was sent."""
    screen = io.StringIO()
    monkeypatch.setattr(show, "err", Console(file=screen, force_terminal=True, width=80, color_system=None))
    return screen


def last_drawn(screen: io.StringIO) -> str:
    """What is left on the terminal: what was drawn after the cursor went back for the last time."""
    return re.sub("\x1b\\[[?0-9]*[A-Za-z]", "", screen.getvalue().rpartition("\x1b[2K")[2])


def test_an_interrupted_progress_leaves_no_spinner(terminal: io.StringIO) -> None:

    def interrupted() -> None:
        with LiveProgress() as progress:
            progress.step("model", "ready", done=True)
            progress.step("router", "starting")
            progress.step("decode-1", "starting")
            progress.step("decode-1", "stopped")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    left = last_drawn(terminal)
    assert not FRAMES & set(left)
    assert [line.split()[:3] for line in left.splitlines() if line.strip()] == [
        ["✓", "model", "ready"],
        ["✗", "router", "starting"],
        ["✗", "decode-1", "stopped"],
    ]


def test_progress_is_plain_lines_where_there_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(show, "err", Console(file=screen, soft_wrap=True))
    with LiveProgress() as progress:
        progress.step("router", "starting")
        progress.step("router", "starting")
        progress.step("router", "ready", done=True)
    assert [line.split()[2:] for line in screen.getvalue().splitlines()] == [
        ["router:", "starting"],
        ["router:", "ready"],
    ]


def test_an_error_is_one_line_whatever_it_quotes(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(show, "err", Console(file=screen, emoji=False, soft_wrap=True))
    show.show_error(CliError("a:b:c \x1b[2J [red]x\ny \udcff", "h\x00"))
    assert screen.getvalue() == "error: a:b:c \\x1b[2J [red]x\\ny \\udcff\nhint: h\\x00\n"
