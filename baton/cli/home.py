"""Where a run keeps its files: `BATON_HOME`, else `.baton` beside the project, else `~/.baton`.

logs/<name>.log   what each process said (stderr)
run/<name>.json   one record for each process, run/up.json the options of the run, run/<name>.out its stdout
models/           what `baton fetch` brought
etcd/             the data of the etcd that `baton up` starts
batches/          files and batches of the API; they outlive a run
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import baton
from baton.cli.errors import CliError

HOME = "BATON_HOME"


@dataclass(frozen=True)
class Home:
    """The folders of one run. Nothing is created until it is needed."""

    root: Path

    @property
    def logs(self) -> Path:
        """Log files, one for each process."""
        return self._folder("logs")

    @property
    def run(self) -> Path:
        """Records of what is running."""
        return self._folder("run")

    @property
    def models(self) -> Path:
        """Fetched models."""
        return self._folder("models")

    @property
    def bin(self) -> Path:
        """Fetched programs."""
        return self._folder("bin")

    @property
    def etcd(self) -> Path:
        """etcd's data directory; etcd creates it."""
        return self.root / "etcd"

    @property
    def batches(self) -> Path:
        """Files and batches of the frontend, which creates it."""
        return self.root / "batches"

    def log(self, name: str) -> Path:
        """Where a process logs."""
        return self.logs / f"{name}.log"

    def options(self) -> dict[str, Any]:
        """What `baton up` was asked for, as it was saved; empty when nothing can be read."""
        try:
            saved = json.loads((self.run / "up.json").read_text())
        except (OSError, ValueError):
            return {}
        return saved if isinstance(saved, dict) else {}

    def shown(self, path: Path) -> str:
        """A path as a person would type it from here."""
        try:
            return str(path.relative_to(Path.cwd()))
        except ValueError:
            return str(path)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """One `up` or `down` at a time. Raises CliError when another one is at work."""
        with (self.run / "lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise CliError("another `baton up` or `baton down` is at work here", "wait for it to end") from None
            yield

    def _folder(self, name: str) -> Path:
        folder = self.root / name
        folder.mkdir(parents=True, exist_ok=True)
        return folder


def project_root() -> Path | None:
    """The checkout this package runs from, when it is one."""
    root = Path(baton.__file__).resolve().parents[1]
    return root if (root / "pyproject.toml").is_file() else None


def find_home() -> Home:
    """The home of this user's run."""
    if named := os.environ.get(HOME):
        return Home(Path(named).expanduser().resolve())
    root = project_root()
    return Home(root / ".baton" if root else Path.home() / ".baton")
