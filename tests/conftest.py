"""What every test may ask for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from baton.cli.converted import as_directory
from baton.cli.home import Home

ROOT = Path(__file__).resolve().parent.parent
FETCH_S = 900.0

# How fast inputs are drawn says how busy the machine is, not whether a test is good.
settings.register_profile("baton", suppress_health_check=[HealthCheck.too_slow], deadline=None)
settings.load_profile("baton")


@pytest.fixture(scope="session")
def model_path() -> Path:
    """The real model, SmolLM2-135M-Instruct as GGUF: `BATON_TEST_MODEL`, else the checkout's own copy, fetched once."""
    if named := os.environ.get("BATON_TEST_MODEL"):
        return Path(named)
    path = ROOT / ".baton" / "models" / "smollm2-135m-instruct.gguf"
    if not path.exists():
        command = [sys.executable, "-m", "baton.cli.main", "fetch"]
        environment = {**os.environ, "BATON_HOME": str(ROOT / ".baton")}
        subprocess.run(command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, timeout=FETCH_S, check=True)
    return path


@pytest.fixture(scope="session")
def converted_path(model_path: Path) -> Path:
    """The real model as a safetensors directory in float32, converted once."""
    return as_directory(Home(ROOT / ".baton"), model_path, lambda text: None)
