"""vLLM's own OpenAI server, as its makers start it, on one core: what Baton is measured against."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from baton.cli.home import project_root
from baton.cli.ports import HOST, free_port

NAME = "model"
READY_S = 300.0
LEAVE_S = 30.0
CACHE_GIB = 1


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
def serving(settings: Settings, core: int, connector: str = "") -> Iterator[str]:
    """The address of a server with its engine on `core`, ended with the block.

    `connector` names one of vLLM's own KV connectors, both producer and consumer. Raises RuntimeError with the server's
    last words when it does not come up.
    """
    port = free_port()
    command = [settings.python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(settings.model)]
    command += ["--served-model-name", NAME, "--host", HOST, "--port", str(port), "--dtype", settings.dtype]
    command += ["--max-model-len", str(settings.context), "--max-num-seqs", str(settings.streams)]
    command += ["--max-num-batched-tokens", str(settings.chunk), "--block-size", "32", "--enforce-eager"]
    command += ["--disable-uvicorn-access-log"]
    if connector:
        told = {"kv_connector": connector, "kv_role": "kv_both", "kv_buffer_device": "cpu"}
        command += ["--kv-transfer-config", json.dumps(told)]
    with tempfile.TemporaryFile("w+b") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=_environment(core), cwd=project_root()
        )
        try:
            _wait(f"http://{HOST}:{port}/health", process)
            yield f"http://{HOST}:{port}"
        except _NotReady as error:
            log.seek(max(0, log.tell() - 4000))
            raise RuntimeError(f"vLLM's server {error}:\n{log.read().decode(errors='replace')}") from None
        finally:
            process.terminate()
            try:
                process.wait(LEAVE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(LEAVE_S)


class _NotReady(Exception):
    pass


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


def _wait(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline:
        if (code := process.poll()) is not None:
            raise _NotReady(f"ended with {code}")
        try:
            if httpx.get(url, timeout=5.0, trust_env=False).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.2)
    raise _NotReady(f"is not ready after {READY_S:.0f} s")
