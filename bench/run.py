"""A whole run of Baton for a bench: `baton up` in a folder of its own, on free ports, ended on the way out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from baton.cli.home import Home


@dataclass(frozen=True)
class Run:
    """A run that answers at `url` as `model`; its processes are recorded in `home`."""

    url: str
    model: str
    home: Home


@contextmanager
def running(*flags: str, model: str = "", settings: Mapping[str, object] | None = None) -> Iterator[Run]:
    """`baton up FLAGS` until the block ends; `settings` are what `BATON_<NAME>` says to every process.

    Raises RuntimeError with its words when it does not come up.
    """
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as home:
        told = {f"BATON_{name.upper()}": str(value) for name, value in (settings or {}).items()}
        env = {**os.environ, **told, "BATON_HOME": home}
        baton = [sys.executable, "-m", "baton.cli.main"]
        chosen = ["--model", str(Path(model).resolve())] if model else []
        command = [*baton, "up", "--json", "--http-port", "0", "--etcd-port", "0", *chosen, *flags]
        try:
            up = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
            if up.returncode != 0:
                raise RuntimeError(f"baton up {' '.join(flags)} failed:\n{up.stdout}{up.stderr}")
            said = json.loads(up.stdout)
            yield Run(said["url"], said["model"], Home(Path(home)))
        finally:
            subprocess.run([*baton, "down"], env=env, capture_output=True, timeout=120)
