"""A home of the test's own; whatever it started is gone afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.cli.home import Home
from baton.cli.process import end, marked


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Home]:
    """BATON_HOME, empty."""
    monkeypatch.setenv("BATON_HOME", str(tmp_path / "home"))
    home = Home((tmp_path / "home").resolve())
    yield home
    end(marked(home), 0.0)
    assert not marked(home)
