"""One Baton for all clients, its own or one that runs already, and a way to run the program of each against it."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tests.integration.stack import HANG_S, SERVED, Stack
from tests.tiny_model import make_tiny_model
from tests.worker_process import ROOT

HERE = Path(__file__).parent
ENVIRONMENT = ROOT / ".venv-clients"
JS = ENVIRONMENT / "js"
Run = Callable[..., str]


@dataclass(frozen=True)
class Baton:
    """One that runs. `url` is without `/v1`; `exact` as in server.py; `settle` checks that nothing is held any more."""

    url: str
    model: str
    exact: bool
    settle: Callable[[], object]


@pytest.fixture(scope="package")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model: its text is noise, its calls and JSON are right by their grammars."""
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), layers=2)


@pytest.fixture(scope="package")
def baton(tmp_path_factory: pytest.TempPathFactory, tiny: Path) -> Iterator[Baton]:
    """The one at `BATON_TEST_URL`; without it one of each worker with the tiny model in float32, and no store."""
    if url := os.environ.get("BATON_TEST_URL", "").rstrip("/").removesuffix("/v1"):
        models = httpx.get(f"{url}/v1/models", timeout=HANG_S, trust_env=False).raise_for_status().json()["data"]
        yield Baton(url, models[0]["id"], exact=False, settle=lambda: None)
        return
    directory = tmp_path_factory.mktemp("clients")
    run = Stack(directory, tiny, kvstore=False, pool_gib=0.1, http={"batch_dir": directory / "batches"}).start()
    yield Baton(run.url(), SERVED, exact=True, settle=run.settle)
    run.teardown()


@pytest.fixture
def run(baton: Baton) -> Iterator[Run]:
    """`run(command...)` runs a program with what it has to know of the server, to its good end; what it said."""

    def one(*command: str | Path, **environment: str) -> str:
        # Neither proxies nor the clients' own homes are to be asked.
        quiet = {"NO_PROXY": "*", "LITELLM_LOCAL_MODEL_COST_MAP": "True", "LANGSMITH_TRACING": "false"}
        done = subprocess.run(
            [*command, baton.url, baton.model, *(["--exact"] if baton.exact else [])],
            env={**os.environ, **quiet, **environment},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=2 * HANG_S,
        )
        print(done.stdout)
        assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
        return done.stdout

    yield one
    baton.settle()


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
    """Where LangChain and LiteLLM are installed."""
    return python_of(ENVIRONMENT, "clients-env")


@pytest.fixture(scope="package")
def node() -> str:
    """Node.js with the JavaScript client beside it."""
    found = shutil.which("node")
    if found is None or not (JS / "node_modules" / "openai").exists():
        pytest.skip("no Node.js here, or no npm when `make clients-env` ran")
    return found
