"""One Baton for all clients, and a way to run the program of each against it."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.integration.stack import HANG_S, SERVED, Stack
from tests.tiny_model import make_tiny_model
from tests.worker_process import ROOT

HERE = Path(__file__).parent
ENVIRONMENT = ROOT / ".venv-clients"
JS = ENVIRONMENT / "js"
Run = Callable[..., str]


@pytest.fixture(scope="package")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model: its text is noise, its calls and JSON are right by their grammars."""
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), layers=2)


@pytest.fixture(scope="package")
def stack(tmp_path_factory: pytest.TempPathFactory, tiny: Path) -> Iterator[Stack]:
    """One of each worker, no store."""
    run = Stack(tmp_path_factory.mktemp("clients"), tiny, kvstore=False, pool_gib=0.1).start()
    yield run
    run.teardown()


@pytest.fixture
def run(stack: Stack) -> Iterator[Run]:
    """`run(command...)` runs a program with the address and the model's name, to its good end; what it said."""

    def one(*command: str | Path, **environment: str) -> str:
        # Neither proxies nor the clients' own homes are to be asked.
        quiet = {"NO_PROXY": "127.0.0.1", "LITELLM_LOCAL_MODEL_COST_MAP": "True", "LANGSMITH_TRACING": "false"}
        done = subprocess.run(
            [*command, stack.url(), SERVED],
            env={**os.environ, **quiet, **environment},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=2 * HANG_S,
        )
        assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
        return done.stdout

    yield one
    stack.settle()


def python_of(environment: Path, target: str) -> Path:
    """Its interpreter; skips without it, and fails in CI, which makes it."""
    python = environment / "bin" / "python"
    if not python.exists():
        missing = f"{environment.name} is not there: `make {target}` makes it"
        if os.environ.get("CI"):
            pytest.fail(missing)
        pytest.skip(missing)
    return python


@pytest.fixture(scope="package")
def python() -> Path:
    """Where the Python clients are installed."""
    return python_of(ENVIRONMENT, "clients-env")


@pytest.fixture(scope="package")
def node() -> str:
    """Node.js with the JavaScript client beside it."""
    found = shutil.which("node")
    if found is None or not (JS / "node_modules" / "openai").exists():
        pytest.skip("no Node.js here, or no npm when `make clients-env` ran")
    return found
