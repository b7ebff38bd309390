"""A process with an arena of KV blocks, for tests: it offers, it reads and verifies. One JSON command a line on stdin.

As a program it is the peer; `KvPeer` starts one and talks to it.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from baton.kv.arena import Arena
from baton.kv.handle import Handle, Segment, checksum
from baton.rpc.codec import handle_from_pb, handle_to_pb, peer_from_pb, peer_to_pb
from baton.transfer.port import Peer
from baton.transfer.transports import Transports, available
from baton.v1 import kv_pb2

ROOT = Path(__file__).resolve().parent.parent
HANG_S = 60.0


def payload(key: bytes, size: int) -> bytes:
    """What lies in the block of that key: the same in every process."""
    return random.Random(key).randbytes(size)


class Program:
    """The peer's side: `blocks` slots to offer from, as many to read into."""

    def __init__(self, id: str, blocks: int, block_bytes: int, transports: str) -> None:
        self.id, self.blocks, self.block_bytes = id, blocks, block_bytes
        self.epoch = random.SystemRandom().getrandbits(63) | 1
        self.arena = Arena.create(2 * blocks * block_bytes)
        self.transports = Transports([t for t in available() if t.name in transports.split(",")])

    async def run(self) -> None:
        """Serve commands until stdin ends."""
        await self.transports.start(self.arena, self.id, self.epoch)
        print(json.dumps({"ready": True, "peer": self.peer()}), flush=True)
        with self.transports.lease():
            while line := await asyncio.to_thread(sys.stdin.readline):
                command = json.loads(line)
                answer = getattr(self, f"do_{command.pop('do')}")(**command)
                print(json.dumps(await answer if asyncio.iscoroutine(answer) else answer), flush=True)

    def peer(self) -> str:
        """Our description, encoded."""
        peer = Peer(self.id, self.epoch, self.arena.size, self.transports.metadata())
        return _encode(peer_to_pb(peer, host="here"))

    def do_seal(self, keys: list[str], fingerprint: str, tokens: int) -> list[str]:
        """Fill the first slots and describe them."""
        handles = []
        for slot, name in enumerate(keys):
            key, offset = bytes.fromhex(name), slot * self.block_bytes
            self.arena.view(offset, self.block_bytes)[:] = payload(key, self.block_bytes)
            digest = checksum(key, self.epoch, 1, self.arena.view(offset, self.block_bytes))
            segments = (Segment(0, offset, self.block_bytes),)
            handle = Handle(key, fingerprint, self.id, self.epoch, 1, tokens, segments, digest)
            handles.append(_encode(handle_to_pb(handle)))
        return handles

    def do_flip(self, slot: int) -> bool:
        """Change one bit of a sealed block."""
        self.arena.buffer[slot * self.block_bytes + 5] ^= 4
        return True

    async def do_read(self, peer: str, handles: list[str], timeout_s: float) -> list[str]:
        """READ and verify; for each handle "ok", or what was wrong with it."""
        theirs = kv_pb2.Peer.FromString(base64.b64decode(peer))
        wanted = [handle_from_pb(kv_pb2.Handle.FromString(base64.b64decode(h))) for h in handles]
        deadline = time.monotonic() + timeout_s
        await self.transports.pair(peer_from_pb(theirs), deadline)
        into = [(self.blocks + i) * self.block_bytes for i in range(len(wanted))]
        report = await self.transports.read(wanted, into, deadline)
        answers = []
        for block in report.blocks:
            same = self.arena.view(block.offset, self.block_bytes) == payload(block.handle.key, self.block_bytes)
            answers.append(block.reason.name if block.reason else "ok" if same else "OTHER BYTES")
        return answers


def _encode(message: kv_pb2.Peer | kv_pb2.Handle) -> str:
    return base64.b64encode(message.SerializeToString()).decode()


class KvPeer:
    """A running peer, from the test's side."""

    def __init__(
        self, id: str, directory: Path, *, blocks: int, block_bytes: int, transports: str = "nixl,tcp"
    ) -> None:
        self.id = id
        self._log_path = directory / f"{id}.log"
        command = [sys.executable, "-m", "tests.kv_peer", id, str(blocks), str(block_bytes), transports]
        with self._log_path.open("ab") as log:
            self.process = subprocess.Popen(
                command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
            )
        self.peer = _decode_peer(self._answer()["peer"])

    def seal(self, keys: list[bytes], fingerprint: str, tokens: int = 32) -> list[kv_pb2.Handle]:
        """Fill and describe the first slots."""
        sealed = self._ask(do="seal", keys=[key.hex() for key in keys], fingerprint=fingerprint, tokens=tokens)
        return [kv_pb2.Handle.FromString(base64.b64decode(handle)) for handle in sealed]

    def flip(self, slot: int) -> None:
        """Corrupt a block."""
        self._ask(do="flip", slot=slot)

    async def read(self, peer: kv_pb2.Peer, handles: list[kv_pb2.Handle], timeout_s: float = 20.0) -> list[str]:
        """READ and verify."""
        encoded = [_encode(handle) for handle in handles]
        answer = await asyncio.to_thread(self._ask, do="read", peer=_encode(peer), handles=encoded, timeout_s=timeout_s)
        return list(answer)

    def signal(self, number: int) -> None:
        """Send a signal."""
        os.kill(self.process.pid, number)

    def stop(self) -> None:
        """End it, whatever its state. Idempotent."""
        if self.process.poll() is None:
            self.signal(signal.SIGCONT)
            self.process.kill()
        self.process.wait(HANG_S)

    def _ask(self, **command: Any) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        while line := self.process.stdout.readline():
            try:
                return json.loads(line)
            except ValueError:
                continue  # a library that writes to stdout
        raise AssertionError(f"{self.id} ended:\n{self._log_path.read_text(errors='replace')[-4000:]}")


def _decode_peer(text: str) -> kv_pb2.Peer:
    return kv_pb2.Peer.FromString(base64.b64decode(text))


def _main() -> None:
    id, blocks, block_bytes, transports = sys.argv[1:]
    try:
        asyncio.run(Program(id, int(blocks), int(block_bytes), transports).run())
    finally:
        os._exit(0)


if __name__ == "__main__":
    _main()
