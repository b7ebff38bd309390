"""The environment that vLLM has of its own: without it tests of vLLM are skipped, and in CI they fail."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.worker_process import ROOT

START_S = 600.0
"""How long a vLLM worker may take to be ready; half a minute on a machine that has nothing else to do."""


def vllm_python() -> Path:
    """Its interpreter."""
    python = ROOT / ".venv-vllm" / "bin" / "python"
    if not python.exists():
        missing = "vLLM's environment is not there: `make vllm-env` makes it"
        if os.environ.get("CI"):
            pytest.fail(missing)
        pytest.skip(missing)
    return python
