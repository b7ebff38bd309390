"""vLLM's own OpenAI server, as its makers start it, on one core: what Baton is measured against."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx

from baton.cli.home import project_root
from baton.cli.ports import HOST, free_port

NAME = "model"
READY_S = 600.0
LEAVE_S = 30.0
CACHE_GIB = 1
LAST_BYTES = 4000


@dataclass(frozen=True)
class Settings:
    """What both sides have alike: `model` is a directory, `streams` at once, `chunk` prompt tokens a step."""

    python: str
    model: Path
    dtype: str = "bfloat16"
    streams: int = 16
    chunk: int = 256
    context: int = 4096


@contextmanager
def serving(settings: Settings, cores: Sequence[int], connector: str = "") -> Iterator[list[str]]:
    """Addresses of servers, one with its engine on each of `cores`, started side by side and ended with the block.

    `connector` names one of vLLM's own KV connectors, both producer and consumer. Raises RuntimeError with a server's
    last words when it does not come up.
    """
    with ExitStack() as stack:
        servers = [stack.enter_context(_Server(settings, core, connector)) for core in cores]
        with httpx.Client(timeout=5.0, trust_env=False) as client:
            for server in servers:
                server.wait(client)
        yield [server.url for server in servers]


class _Server:
    """One process; a context manager."""

    def __init__(self, settings: Settings, core: int, connector: str) -> None:
        port = free_port()
        self.url = f"http://{HOST}:{port}"
        command = [settings.python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(settings.model)]
        command += ["--served-model-name", NAME, "--host", HOST, "--port", str(port), "--dtype", settings.dtype]
        command += ["--max-model-len", str(settings.context), "--max-num-seqs", str(settings.streams)]
        command += ["--max-num-batched-tokens", str(settings.chunk), "--block-size", "32", "--enforce-eager"]
        command += ["--disable-uvicorn-access-log"]
        if connector:
            told = {"kv_connector": connector, "kv_role": "kv_both", "kv_buffer_device": "cpu"}
            command += ["--kv-transfer-config", json.dumps(told)]
        self._log = tempfile.TemporaryFile("w+b")  # noqa: SIM115 - closed on the way out
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            env=_environment(core),
            cwd=project_root(),
        )

    def wait(self, client: httpx.Client) -> None:
        """Return when it serves. Raises RuntimeError when it ends first, or never does."""
        deadline = time.monotonic() + READY_S
        while time.monotonic() < deadline:
            if (code := self._process.poll()) is not None:
                raise RuntimeError(f"vLLM's server ended with {code}:\n{self._said()}")
            with suppress(httpx.HTTPError):
                if client.get(f"{self.url}/health").status_code == 200:
                    return
            time.sleep(0.2)
        raise RuntimeError(f"vLLM's server is not ready after {READY_S:.0f} s:\n{self._said()}")

    def _said(self) -> str:
        self._log.seek(max(0, self._log.seek(0, os.SEEK_END) - LAST_BYTES))
        return self._log.read().decode(errors="replace")

    def __enter__(self) -> _Server:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(LEAVE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(LEAVE_S)
        self._log.close()


def _environment(core: int) -> Mapping[str, str]:
    return {
        **os.environ,
        "VLLM_CPU_KVCACHE_SPACE": str(CACHE_GIB),
        "VLLM_CPU_OMP_THREADS_BIND": str(core),
        "VLLM_HOST_IP": HOST,
        "VLLM_NIXL_SIDE_CHANNEL_HOST": HOST,
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        # Block hashes of two processes must agree.
        "PYTHONHASHSEED": "0",
    }
