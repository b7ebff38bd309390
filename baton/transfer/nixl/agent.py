"""The only place that touches the NIXL library.

Its errors become `AgentError`, its talk goes to our logs and to stderr (it would go to stdout), and it runs without
its own progress thread, which burns a core. The binding releases the GIL but does not lock: one caller at a time.

A process that used an agent ends through `os._exit` after its own clean-up: tearing the library down can crash. That
is for the service's `main` to do.
"""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Sequence
from typing import Any

PACKAGES = ("nixl_cu12", "nixl_cu13")


class AgentError(Exception):
    """NIXL is not to be had, or said no."""


def load(host: str = "") -> Any:
    """The NIXL binding. Raises AgentError when no build of it can be imported here.

    A process that is reached at a loopback `host` alone must not listen anywhere else, and UCX listens on every
    network device it may use.
    """
    # Both are read once, when the library is loaded.
    os.environ.setdefault("UCX_LOG_FILE", "stderr")
    if host == "localhost" or host.startswith("127.") or host == "::1":
        os.environ.setdefault("UCX_NET_DEVICES", "lo")
    problems = []
    for package in PACKAGES:
        try:
            binding = importlib.import_module(package)
        except (ImportError, OSError) as error:
            problems.append(f"{package}: {error}")
            continue
        talk = logging.getLogger("nixl")
        for handler in [h for h in talk.handlers if type(h) is logging.StreamHandler]:
            talk.removeHandler(handler)  # it writes to stdout
        talk.propagate = True
        talk.setLevel(logging.WARNING)
        return binding
    raise AgentError("; ".join(problems))


class Agent:
    """One NIXL agent with the UCX backend. Every method raises AgentError and is called by one thread at a time."""

    def __init__(self, name: str, host: str = "") -> None:
        binding = load(host)
        try:
            self._agent = binding.nixl_agent(
                name, binding.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
            )
        except Exception as error:
            raise AgentError(f"no agent: {error!r}") from error
        if "UCX" not in self._agent.backends:
            raise AgentError("this build of NIXL has no UCX backend")
        raw = self._agent.agent
        self._raw = raw
        bindings = importlib.import_module(f"{binding.__name__}._bindings")
        self._descriptors = bindings.nixlXferDList
        self._dram = bindings.DRAM_SEG
        self._read = bindings.NIXL_READ
        self._done = bindings.NIXL_SUCCESS

    def register(self, address: int, size: int) -> None:
        """Let peers read `size` bytes at `address`, and us read into them. For the life of the process."""
        try:
            self._agent.register_memory([(address, size, 0, "")], "DRAM")
        except Exception as error:
            raise AgentError(f"cannot register memory: {error!r}") from error

    def metadata(self) -> bytes:
        """What a peer's `add` takes. Everything that is readable must be registered before."""
        return bytes(self._agent.get_agent_metadata())

    def add(self, metadata: bytes) -> str:
        """Make the agent of that metadata known; its name."""
        try:
            name = self._agent.add_remote_agent(metadata)
        except Exception as error:
            raise AgentError(f"metadata refused: {error!r}") from error
        return name.decode() if isinstance(name, bytes) else str(name)

    def remove(self, name: str) -> None:
        """Forget a remote agent and disconnect. Never while a read from it is in flight: its bytes would still land."""
        try:
            self._agent.remove_remote_agent(name)
        except Exception as error:
            raise AgentError(f"cannot remove {name}: {error!r}") from error

    def create(self, name: str, local: Sequence[tuple[int, int, int]], remote: Sequence[tuple[int, int, int]]) -> int:
        """A READ request from `(address, length, 0)` of `name` to ours, pairwise of equal length. Not started."""
        try:
            ours = self._descriptors(self._dram, local)
            theirs = self._descriptors(self._dram, remote)
            return int(self._raw.createXferReq(self._read, ours, theirs, name, "", []))
        except Exception as error:
            raise AgentError(f"read refused: {error!r}") from error

    def post(self, request: int) -> bool:
        """Start it; True when it is already done (same-host reads copy here, and take as long as the copy)."""
        try:
            return bool(self._raw.postXferReq(request, "") == self._done)
        except Exception as error:
            raise AgentError(f"read failed: {error!r}") from error

    def finished(self, request: int) -> bool:
        """Whether it is done; makes progress on everything in flight."""
        try:
            return bool(self._raw.getXferStatus(request) == self._done)
        except Exception as error:
            raise AgentError(f"read failed: {error!r}") from error

    def release(self, request: int) -> None:
        """Free a request that is done or failed. It must not be used again."""
        try:
            self._raw.releaseXferReq(request)
        except Exception as error:
            raise AgentError(f"cannot release: {error!r}") from error

    def progress(self) -> None:
        """Serve what peers ask of us: without it their connections and, over TCP, their reads stand still."""
        try:
            self._raw.getNotifs({})
        except Exception as error:
            raise AgentError(f"no progress: {error!r}") from error
