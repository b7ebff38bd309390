"""The load tool aiperf against a running Baton: every request is answered, and counted as it was asked."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.integration.clients.conftest import Baton
from tests.integration.stack import HANG_S
from tests.worker_process import ROOT

pytestmark = [pytest.mark.integration, pytest.mark.slow]

AIPERF = ROOT / ".venv-aiperf" / "bin" / "aiperf"
REQUESTS, TOKENS = 32, 12


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_aiperf(baton: Baton, tiny: Path, tmp_path: Path, endpoint: str) -> None:
    if not AIPERF.exists():
        pytest.skip("not in CI, it is large: `make test-clients` installs and runs it")
    command = [str(AIPERF), "profile", "--model", baton.model, "--url", baton.url, "--endpoint-type", endpoint]
    command += ["--streaming", "--request-count", str(REQUESTS), "--concurrency", "4"]
    # The tiny model's tokenizer makes up prompts for any model; the server's own counts are those that are right.
    command += ["--tokenizer", str(tiny), "--use-server-token-count"]
    command += ["--synthetic-input-tokens-mean", "60", "--output-tokens-mean", str(TOKENS)]
    command += ["--extra-inputs", "ignore_eos:true", "--artifact-dir", str(tmp_path), "--ui", "none"]
    done = subprocess.run(
        command,
        env={**os.environ, "NO_PROXY": "*"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=2 * HANG_S,
    )
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    (exported,) = tmp_path.rglob("profile_export_aiperf.json")
    figures: dict[str, Any] = json.loads(exported.read_text())
    assert not figures.get("error_summary"), figures["error_summary"]
    assert figures["request_count"]["avg"] == REQUESTS
    assert figures["total_osl"]["avg"] == REQUESTS * TOKENS
    baton.settle()
