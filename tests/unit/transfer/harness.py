"""What the transport tests share: the ways to be tested, a remote process to read from, and handles to its blocks."""

from __future__ import annotations

import asyncio
import base64
import importlib.util
import json
import os
import random
import signal
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from baton.kv.handle import Handle, Segment, checksum
from baton.transfer.nixl.agent import PACKAGES
from baton.transfer.nixl.transport import NixlTransport
from baton.transfer.port import Peer, Transport
from baton.transfer.tcp.transport import TcpTransport
from tests.stopping import stop
from tests.unit.transfer.peer import content

ROOT = Path(__file__).parents[3]
BLOCK = 256 << 10
BLOCKS = 24
HANG_S = 20.0
"""Longer than anything here may take."""


@dataclass(frozen=True)
class Way:
    """A transport as it is tested. `needs_peer`: a read stands still when the peer's process is stopped."""

    name: str
    transport: str
    needs_peer: bool
    late: bool
    environment: tuple[tuple[str, str], ...] = ()

    def make(self, monkeypatch: pytest.MonkeyPatch) -> Transport:
        for key, value in self.environment:
            monkeypatch.setenv(key, value)
        return NixlTransport() if self.transport == "nixl" else TcpTransport()


TCP = Way("tcp", "tcp", needs_peer=True, late=False)
NIXL = Way("nixl", "nixl", needs_peer=False, late=False)
"""Same host: the kernel copies from the peer's pages, whatever the peer does."""
NIXL_OVER_TCP = Way("nixl-over-tcp", "nixl", needs_peer=True, late=True, environment=(("UCX_TLS", "tcp,self"),))
"""As between hosts without RDMA: every read needs the peer, so this is where reads become late."""

HAVE_NIXL = any(importlib.util.find_spec(package) for package in PACKAGES)
NEEDS_NIXL = [pytest.mark.nixl, pytest.mark.skipif(not HAVE_NIXL, reason="no NIXL library here")]
WAYS = [
    pytest.param(TCP, id=TCP.name),
    pytest.param(NIXL, id=NIXL.name, marks=NEEDS_NIXL),
    pytest.param(NIXL_OVER_TCP, id=NIXL_OVER_TCP.name, marks=NEEDS_NIXL),
]


class Remote:
    """A real process that can be read from (`peer.py`)."""

    def __init__(self, way: Way, owner: str, epoch: int, process: asyncio.subprocess.Process) -> None:
        self.way = way
        self.owner = owner
        self.epoch = epoch
        self.process = process
        self.peer = Peer(owner, epoch, 0, {})

    @classmethod
    async def start(cls, way: Way, owner: str = "prefill-1", *, lease: bool = True) -> Remote:
        epoch = random.getrandbits(64)
        order = {"transport": way.transport, "owner": owner, "epoch": epoch, "blocks": BLOCKS, "block_bytes": BLOCK}
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "tests.unit.transfer.peer",
            json.dumps(order),
            cwd=ROOT,
            env={**os.environ, **dict(way.environment)},
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        remote = cls(way, owner, epoch, process)
        told = await remote._answer()
        metadata = {way.transport: base64.b64decode(told["metadata"])}
        remote.peer = Peer(owner, epoch, told["arena_bytes"], metadata)
        if lease:
            await remote.tell("lease")
        return remote

    async def tell(self, line: str) -> dict:
        """Give the process an order and wait until it is done."""
        assert self.process.stdin is not None
        self.process.stdin.write(line.encode() + b"\n")
        return await self._answer()

    async def _answer(self) -> dict:
        assert self.process.stdout is not None
        line = await asyncio.wait_for(self.process.stdout.readline(), HANG_S)
        assert line, "the peer process ended"
        return json.loads(line)

    def handle(self, block: int, **changes: object) -> Handle:
        """A true handle to a block; `changes` make it a forged one."""
        key, generation = bytes([block]) * 16, block + 1
        payload = content(self.owner, self.epoch, block, BLOCK)
        handle = Handle(
            key=key,
            fingerprint="f",
            owner=self.owner,
            epoch=self.epoch,
            generation=generation,
            tokens=32,
            segments=(Segment(0, block * BLOCK, BLOCK),),
            checksum=checksum(key, self.epoch, generation, payload),
        )
        return replace(handle, **changes)  # type: ignore[arg-type]

    def handles(self, count: int = BLOCKS) -> list[Handle]:
        return [self.handle(block) for block in range(count)]

    def content(self, block: int) -> bytes:
        return content(self.owner, self.epoch, block, BLOCK)

    def stop(self) -> None:
        """SIGSTOP, and wait until it has stopped."""
        stop(self.process.pid)

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    async def kill(self) -> None:
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()


async def out_of_quarantine(transport: Transport) -> None:
    """Wait until no late read can write any more."""
    end = time.monotonic() + HANG_S
    for _ in iter(lambda: bool(transport.quarantined()), False):
        assert time.monotonic() < end, "a late read never ended"
        await asyncio.sleep(0.01)
