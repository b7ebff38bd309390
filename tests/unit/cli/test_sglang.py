"""`baton sglang`, with a stand-in for SGLang's server: what it is started with, and that it ends with the command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
from safetensors.numpy import save_file
from typer.testing import CliRunner

from baton.cli.home import Home
from baton.cli.main import app
from baton.cli.ports import free_port
from baton.engine.sglang.options import Options
from baton.model.identity import weights_identity

HANG_S = 120.0
ROOT = Path(__file__).resolve().parents[3]
SERVER = """
import http.server, json, os, sys
port = int(sys.argv[sys.argv.index("--port") + 1])
class Ok(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
with open(os.environ["SEEN"] + ".partial", "w") as seen:
    json.dump({"argv": sys.argv[1:], "pid": os.getpid()}, seen)
os.rename(os.environ["SEEN"] + ".partial", os.environ["SEEN"])
http.server.HTTPServer(("127.0.0.1", port), Ok).serve_forever()
"""


def test_prefill_starts_sglang_with_our_storage_and_ends_with_it(tmp_path: Path) -> None:
    (tmp_path / "sglang").mkdir()
    (tmp_path / "sglang" / "launch_server.py").write_text(SERVER)
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "llama"}')
    save_file({"weight": np.ones((4, 4), np.float32)}, model / "model.safetensors")
    seen = tmp_path / "seen"
    command = [sys.executable, "-m", "baton.cli.main", "sglang", "prefill", "--model", str(model), "--served-name", "m"]
    command += ["--port", str(free_port()), "--tenant", "t", "--quantization", "fp8"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "SEEN": str(seen)}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)
    end = time.monotonic() + HANG_S
    while not seen.exists():
        assert time.monotonic() < end
        assert process.poll() is None
        time.sleep(0.05)
    told = json.loads(seen.read_text())
    server = psutil.Process(told["pid"])
    process.terminate()
    assert process.wait(HANG_S) == 0
    psutil.wait_procs([server], timeout=HANG_S)
    assert not server.is_running()
    argv = told["argv"]
    assert argv[argv.index("--disaggregation-mode") + 1] == "prefill"
    assert argv[-2:] == ["--quantization", "fp8"], "what is not ours goes to SGLang"
    extra = json.loads(argv[argv.index("--hicache-storage-backend-extra-config") + 1])
    assert Options.parse(extra) == Options(weights=f"{weights_identity(model)} --quantization=fp8", tenant="t")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["merged", "--model", "/nowhere"], "there is no model directory at /nowhere"),
        (["prefill", "--model", "."], "--model: "),
        (["decode", "--model", ".", "--prefill", "10.0.0.5:30000"], "--prefill '10.0.0.5:30000' is no URL"),
        (["merged", "--model", ".", "--no-store", "--page-size", "48"], "--page-size must be a multiple of 32, not 48"),
    ],
)
def test_errors_are_one_line(home: Home, arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["sglang", *arguments, "--served-name", "m"])
    assert result.exit_code == 1
    (error,) = [line for line in result.stderr.splitlines() if line.startswith("error:")]
    assert message in error
