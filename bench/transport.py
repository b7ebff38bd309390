"""How fast KV blocks are read: NIXL and TCP behind the port, against bare NIXL and memcpy, in the same run.

A size is the bytes of one batch: one block up to 1 MiB, blocks of 1 MiB above (real blocks: 0.7 MiB for the default
model in bf16), the same cut for bare NIXL. Every contender reads from a process of its own, but all of them from the
same pages into the same pages (two memfds), so that no one has the luckier ones. One batch at a time; each figure is
the median over rounds, and in each round every contender takes its turn, in an order that rotates. A ratio is the
median of the rounds' ratios, so what slows a whole round down cancels.

`verified_over_read`, `nixl_over_memcpy` and `tcp_over_nixl` are taken at 16 MiB; other sizes stand beside them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import Awaitable, Callable

import numpy as np
import structlog
import uvloop
from rich.console import Console
from rich.table import Table

from baton.kv.arena import Arena
from baton.kv.handle import Handle, Segment, checksum
from baton.transfer.nixl.transport import NixlTransport
from baton.transfer.port import Peer, Transport
from baton.transfer.tcp.transport import TcpTransport
from bench.bare_nixl import ARENA, BLOCK, BareReader
from bench.transport_peer import EPOCH, OWNER

SIZES = {
    "64KiB": 64 << 10,
    "256KiB": 256 << 10,
    "1MiB": 1 << 20,
    "4MiB": 4 << 20,
    "16MiB": 16 << 20,
    "64MiB": 64 << 20,
}
SMALL = ("64KiB", "256KiB")
SHOWN = "16MiB"
SAMPLE_BYTES = 16 << 20
"""A turn repeats small batches until it has moved about this much."""
MAX_REPEATS = 16
KEY = b"bench-block-key!"
FILL = 7

Turn = Callable[[int], Awaitable[float]]
"""Seconds to move that many bytes once."""
Seconds = dict[str, dict[str, list[float]]]
"""By contender, by size, by round."""


class PortReader:
    """One of our transports, paired with a process that serves it."""

    def __init__(self, transport: Transport, process: asyncio.subprocess.Process) -> None:
        self._transport = transport
        self._process = process
        payload = bytes([FILL]) * BLOCK
        self._sums = {n: checksum(KEY, EPOCH, 1, payload[:n]) for n in (*(SIZES[s] for s in SMALL), BLOCK)}

    @classmethod
    async def start(cls, transport: Transport, source: Arena, arena: Arena) -> PortReader:
        """Start the peer on `source`, pair, and read everything into `arena` once."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "bench.transport_peer",
            transport.name,
            str(source.fd),
            pass_fds=(source.fd,),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        assert process.stdout is not None
        told = json.loads(await asyncio.wait_for(process.stdout.readline(), 60.0))
        await transport.start(arena, "bench-reader", 1, slot_bytes=BLOCK)
        peer = Peer(OWNER, EPOCH, ARENA, {transport.name: bytes.fromhex(told["metadata"])})
        await transport.pair(peer, time.monotonic() + 20.0)
        made = cls(transport, process)
        await made.read(ARENA, verify=True)
        return made

    async def read(self, size: int, *, verify: bool) -> float:
        """Seconds to read `size` bytes. Raises RuntimeError when a block fails."""
        handles, into = self._batch(size)
        started = time.perf_counter()
        report = await self._transport.read(handles, into, time.monotonic() + 30.0, verify=verify)
        seconds = time.perf_counter() - started
        if report.verified_prefix() != len(handles):
            raise RuntimeError(f"read failed: {[b.reason for b in report.blocks]}")
        return seconds

    def _batch(self, size: int) -> tuple[list[Handle], list[int]]:
        into = list(range(0, size, BLOCK))
        length = min(size, BLOCK)
        handles = [
            Handle(KEY, "bench", OWNER, EPOCH, 1, 32, (Segment(0, at, length),), self._sums[length]) for at in into
        ]
        return handles, into

    async def close(self) -> None:
        """End the peer and the transport."""
        self._process.kill()
        await self._process.wait()
        await self._transport.close()


async def measure(rounds: int) -> Seconds:
    """Every contender at every size, interleaved; one more round goes first and is not counted."""
    source, target = Arena.create(ARENA), Arena.create(ARENA)
    source.buffer[:] = bytes([FILL]) * ARENA
    bare = BareReader(source.fd, target.fd)
    nixl = await PortReader.start(NixlTransport(), source, target)
    tcp = await PortReader.start(TcpTransport(), source, target)
    here, there = np.frombuffer(source.buffer, np.uint8), np.frombuffer(target.buffer, np.uint8)

    async def memcpy(size: int) -> float:
        started = time.perf_counter()
        np.copyto(there[:size], here[:size])
        return time.perf_counter() - started

    async def bare_read(size: int) -> float:
        return bare.read(size)

    contenders: dict[str, Turn] = {
        "memcpy": memcpy,
        "bare": bare_read,
        "nixl": lambda size: nixl.read(size, verify=False),
        "nixl_verified": lambda size: nixl.read(size, verify=True),
        "tcp": lambda size: tcp.read(size, verify=False),
        "tcp_verified": lambda size: tcp.read(size, verify=True),
    }
    seconds: Seconds = {name: {size: [] for size in SIZES} for name in contenders}
    try:
        for turn in range(rounds + 1):
            names = list(contenders)
            names = names[turn % len(names) :] + names[: turn % len(names)]
            for label, size in SIZES.items():
                repeats = max(3, min(MAX_REPEATS, SAMPLE_BYTES // size))
                for name in names:
                    took = statistics.median([await contenders[name](size) for _ in range(repeats)])
                    if turn:
                        seconds[name][label].append(took)
    finally:
        bare.close()
        await nixl.close()
        await tcp.close()
    return seconds


def ratio(seconds: Seconds, fast: str, than: str, size: str) -> float:
    """Rate of `fast` over rate of `than`: the median over rounds."""
    pairs = zip(seconds[than][size], seconds[fast][size], strict=True)
    return round(statistics.median(slow / quick for slow, quick in pairs), 3)


def summary(seconds: Seconds) -> dict[str, object]:
    """What the run says, ready for JSON."""
    large = [size for size in SIZES if size not in SMALL]

    def by_size(fast: str, than: str) -> dict[str, float]:
        return {size: ratio(seconds, fast, than, size) for size in SIZES}

    return {
        "nixl_over_bare": {size: ratio(seconds, "nixl", "bare", size) for size in large},
        "small": {size: ratio(seconds, "nixl", "bare", size) for size in SMALL},
        "verified_over_read": ratio(seconds, "nixl_verified", "nixl", SHOWN),
        "nixl_over_memcpy": ratio(seconds, "nixl", "memcpy", SHOWN),
        "tcp_over_nixl": ratio(seconds, "tcp", "nixl", SHOWN),
        "by_size": {
            "verified_over_read": by_size("nixl_verified", "nixl"),
            "nixl_over_memcpy": by_size("nixl", "memcpy"),
            "tcp_over_nixl": by_size("tcp", "nixl"),
            "tcp_verified_over_read": by_size("tcp_verified", "tcp"),
        },
        "gb_s": {
            name: {size: round(SIZES[size] / statistics.median(taken) / 1e9, 2) for size, taken in sizes.items()}
            for name, sizes in seconds.items()
        },
    }


def show(seconds: Seconds, result: dict[str, object]) -> None:
    """The table for people."""
    table = Table(title="GB/s, median over rounds (one batch at a time)")
    table.add_column("batch")
    for name in seconds:
        table.add_column(name, justify="right")
    table.add_column("nixl / bare", justify="right")
    table.add_column("verified / read", justify="right")
    for size, count in SIZES.items():
        rates = [f"{count / statistics.median(seconds[name][size]) / 1e9:.2f}" for name in seconds]
        over = ratio(seconds, "nixl", "bare", size)
        table.add_row(size, *rates, f"{over:.2f}", f"{ratio(seconds, 'nixl_verified', 'nixl', size):.2f}")
    console = Console()
    console.print(table)
    console.print({key: result[key] for key in ("verified_over_read", "nixl_over_memcpy", "tcp_over_nixl")})


def main(argv: list[str] | None = None) -> int:
    """Run it. With --json the last line is one JSON object."""
    parser = argparse.ArgumentParser(prog="baton bench transport", description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument("--rounds", type=int, default=21)
    options = parser.parse_args(argv)
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    seconds = uvloop.run(measure(options.rounds))
    result = summary(seconds)
    show(seconds, result)
    if options.json:
        print(json.dumps(result), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
