"""`baton` as a person runs it: a command line with a home of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

from baton.cli.home import Home

HANG_S = 600.0


@dataclass
class Cli:
    """`baton` with a home of its own."""

    home: Home

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """Start a command."""
        return subprocess.Popen(
            [sys.executable, "-m", "baton.cli.main", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "BATON_HOME": str(self.home.root)},
        )

    def __call__(self, *arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        """Run a command to its end; its exit code must be `code`."""
        with self.start(*arguments) as process:
            try:
                stdout, stderr = process.communicate(timeout=HANG_S)
            except BaseException:
                process.kill()
                raise
        assert process.returncode == code, f"{arguments}: {process.returncode}\n{stdout}\n{stderr}"
        return subprocess.CompletedProcess(arguments, code, stdout, stderr)

    def json(self, *arguments: str, code: int = 0) -> Any:
        """Run a command and read its JSON."""
        return json.loads(self(*arguments, "--json", code=code).stdout)

    def processes(self) -> dict[str, dict[str, Any]]:
        """`baton status` by process name, whatever its exit code."""
        with self.start("status", "--json") as process:
            stdout, _ = process.communicate(timeout=HANG_S)
        return {row["name"]: row for row in json.loads(stdout)["processes"]}
