"""Command lines of SGLang's server, and of the worker that joins it to Baton. Pure.

The flags are those of SGLang 0.5.23 (`sglang/srt/arg_groups/fields/{memory,disagg,serving}.py`).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from itertools import pairwise

from baton.engine.sglang.options import OURS, Options

STORAGE_MODULE = "baton.engine.sglang.storage"
STORAGE_CLASS = "BatonStorage"
DECIDE_KV = ("--dtype", "--quantization", "--json-model-override-args", "--model-loader-extra-config", "--load-format")
"""Flags by which SGLang computes something else from the same files."""


class Mode(Enum):
    """What a server does; the value is SGLang's word for it."""

    MERGED = "null"
    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True)
class Server:
    """One SGLang server. `page_size` is in tokens, a multiple of 32. `storage` is None for one without our store.

    `more` are flags of the user's own, which come last and so win.
    """

    mode: Mode
    model: str
    served_name: str
    host: str
    port: int
    tensor_parallel: int = 1
    page_size: int = 64
    bootstrap_port: int = 8998
    storage: Options | None = None
    more: Sequence[str] = ()

    @property
    def url(self) -> str:
        """Where it answers."""
        return f"http://{self.host}:{self.port}"


def server_command(server: Server) -> list[str]:
    """The command that starts it."""
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", server.model]
    command += ["--served-model-name", server.served_name, "--host", server.host, "--port", str(server.port)]
    command += ["--tp-size", str(server.tensor_parallel), "--page-size", str(server.page_size)]
    if server.mode is not Mode.MERGED:
        command += ["--disaggregation-mode", server.mode.value, "--disaggregation-transfer-backend", "nixl"]
    if server.mode is Mode.PREFILL:
        command += ["--disaggregation-bootstrap-port", str(server.bootstrap_port)]
    if server.storage is not None and server.mode is not Mode.DECODE:  # decode gets its KV from prefill
        command += ["--enable-hierarchical-cache", "--hicache-mem-layout", "page_first_direct"]
        command += ["--hicache-io-backend", "direct", "--hicache-write-policy", "write_through"]
        command += ["--hicache-storage-backend", "dynamic"]
        command += ["--hicache-storage-backend-extra-config", extra_config(server.storage)]
    return [*command, *server.more]


def extra_config(options: Options) -> str:
    """The JSON by which SGLang loads our storage."""
    said = {
        "backend_name": "baton",
        "module_path": STORAGE_MODULE,
        "class_name": STORAGE_CLASS,
        "interface_v1": 1,
        OURS: asdict(options),
    }
    return json.dumps(said, sort_keys=True)


def weights_as_run(identity: str, more: Sequence[str]) -> str:
    """The weights' name for the store: their identity, and flags that make other KV of the same files."""
    said = [word for flag in more for word in flag.split("=", 1)]
    changed = [f"{word}={value}" for word, value in pairwise([*said, ""]) if word in DECIDE_KV]
    return " ".join([identity, *sorted(changed)])


@dataclass(frozen=True)
class Join:
    """What makes a server a merged instance of Baton's: its URL, what it calls its model, and the model's own files."""

    url: str
    served_name: str
    model: str
    etcd: str
    cluster: str
    host: str


def join_command(join: Join) -> list[str]:
    """The merged worker with the OpenAI upstream engine in front of that server."""
    command = [sys.executable, "-m", "services.merged", "--engine", "openai", "--dialect", "sglang"]
    command += ["--upstream", f"{join.url}/v1", "--model", join.served_name, "--tokenizer", join.model]
    command += ["--served-name", join.served_name, "--etcd", join.etcd, "--cluster", join.cluster]
    return [*command, "--host", join.host]


def pair_command(prefill: str, bootstrap_port: int, decode: str, host: str, port: int) -> list[str]:
    """The paired upstream in front of a prefill and a decode server."""
    command = [sys.executable, "-m", "baton.engine.sglang.launch.pair", "--prefill", prefill, "--decode", decode]
    return [*command, "--bootstrap-port", str(bootstrap_port), "--host", host, "--port", str(port)]
