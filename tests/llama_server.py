"""llama.cpp's own server (its C++ code, from the wheel `xllamacpp`), as a process: a foreign engine for tests.

`python -m tests.llama_server MODEL PORT` serves until it is ended.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import psutil

from baton.cli.ports import free_port

ROOT = Path(__file__).resolve().parent.parent
MODEL = "their-smollm2"
CONTEXT = 2048
SLOTS = 4
START_S = 60.0


class LlamaServer:
    """One server; started again it is on the same port."""

    def __init__(self, directory: Path, model: Path) -> None:
        self.port = free_port()
        self._model = model
        self._log = directory / "llama.log"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def start(self) -> None:
        """Start without waiting."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.llama_server", str(self._model), str(self.port)],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def wait_ready(self) -> None:
        """Wait until it has loaded its model."""
        end = time.monotonic() + START_S
        while True:
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{self.url}/models", trust_env=False).status_code == 200:
                    return
            assert self._process is not None
            assert self._process.poll() is None, self._log.read_text(errors="replace")[-3000:]
            assert time.monotonic() < end, "llama.cpp's server does not start"
            time.sleep(0.05)

    def kill(self) -> None:
        """kill -9. Idempotent."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(START_S)
            self._process = None

    def stop(self) -> None:
        """SIGSTOP."""
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGSTOP)

    def cont(self) -> None:
        """SIGCONT."""
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGCONT)

    def busy(self) -> int:
        """How many of its slots compute."""
        slots = httpx.get(f"http://127.0.0.1:{self.port}/slots", trust_env=False).json()
        return sum(slot["is_processing"] for slot in slots)

    def complete(self, prompt: list[int], tokens: int) -> dict[str, Any]:
        """What it answers when it is asked directly."""
        body = {"model": MODEL, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        body |= {"top_k": 0, "min_p": 0.0, "top_p": 1.0}
        reply = httpx.post(f"{self.url}/completions", json=body, timeout=START_S, trust_env=False)
        return dict(reply.raise_for_status().json())


def serve(model: str, port: int) -> None:
    """Be the server until SIGTERM."""
    import xllamacpp

    numbers = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    params = xllamacpp.CommonParams()
    params.model.path = model
    params.model_alias = [MODEL]
    params.port = port
    params.n_ctx = CONTEXT * SLOTS
    params.n_parallel = SLOTS
    params.n_batch = params.n_ubatch = 128  # between two batches it hears who has left
    params.cpuparams.n_threads = 1
    params.cpuparams_batch.n_threads = 1
    params.endpoint_slots = True
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    signal.sigwait(numbers)
    psutil.Process().kill()  # its own teardown waits for open streams


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]))
