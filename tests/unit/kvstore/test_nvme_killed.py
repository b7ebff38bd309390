"""kill -9 while the disk tier writes as fast as it can, again and again over one slab: what was said to be stored is
found, and everything that is found is right.

As a program it is the writer: `python -m tests.unit.kvstore.test_nvme_killed FOLDER FIRST`.
"""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
from pathlib import Path

from services.kvstore.aligned import ALIGN
from services.kvstore.eviction import Watermarks
from services.kvstore.nvme.disk import SlabFile
from services.kvstore.nvme.slab import slot_bytes
from services.kvstore.nvme.tier import NvmeTier
from services.kvstore.tier import BlockShape, Facts
from tests.worker_process import ROOT

BLOCK = 256 * 1024
SLOTS = 48
SHAPE = BlockShape("fp", BLOCK, 32)
LIVES = 4
HANG_S = 60.0


def payload(number: int) -> memoryview:
    return memoryview(random.Random(number).randbytes(BLOCK))


async def open_tier(folder: Path) -> NvmeTier:
    disk = SlabFile(folder, ALIGN + SLOTS * slot_bytes(SHAPE))
    tier = NvmeTier(disk, Watermarks(1.0, 0.9), deadline_s=HANG_S)
    await tier.open()
    await tier.scan()
    tier.fix(SHAPE)
    return tier


async def write_for_ever(folder: Path, first: int) -> None:
    """Store block after block, and say which ones are there and which ones had to go."""
    tier = await open_tier(folder)
    tier.on_gone = lambda keys, reason: print(*(f"-{int.from_bytes(key, 'big')}" for key in keys), sep="\n", flush=True)
    number = first
    while True:
        names = range(number, number + 4)
        await asyncio.gather(*(store(tier, name) for name in names))
        number += 4


async def store(tier: NvmeTier, number: int) -> None:
    if await tier.store(number.to_bytes(16, "big"), payload(number), Facts()):
        print(f"+{number}", flush=True)


def live_and_die(folder: Path, first: int, stored: set[int]) -> int:
    """One life; what it stored and lost is noted in `stored`. The highest number that it may have written."""
    command = [sys.executable, "-m", "tests.unit.kvstore.test_nvme_killed", str(folder), str(first)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = 0
        for line in process.stdout:
            if line.endswith("\n"):
                number = int(line[1:])
                stored.add(number) if line[0] == "+" else stored.discard(number)
                lines += 1
            if lines == 60:
                process.kill()  # and read what is in the pipe
        process.wait(HANG_S)
    return first + 1000


async def test_killed_again_and_again(tmp_path: Path) -> None:
    stored: set[int] = set()
    first = 0
    for _ in range(LIVES):
        first = await asyncio.to_thread(live_and_die, tmp_path, first, stored)
        tier = await open_tier(tmp_path)
        found = {int.from_bytes(key, "big") for key in tier.keys()}  # noqa: SIM118
        assert tier.check_integrity() == []
        assert stored <= found, "what went was told before its slot was written to"
        into = bytearray(BLOCK)
        right = 0
        for number in found:
            if await tier.load(number.to_bytes(16, "big"), memoryview(into)):
                assert into == payload(number)
                right += 1
        assert right >= len(stored)
        stored = {int.from_bytes(key, "big") for key in tier.keys()}  # noqa: SIM118
        await tier.close()


if __name__ == "__main__":
    asyncio.run(write_for_ever(Path(sys.argv[1]), int(sys.argv[2])))
