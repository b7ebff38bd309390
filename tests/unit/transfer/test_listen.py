"""Who is reached on the loopback alone listens nowhere else: UCX would on every network device."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import asyncio, os, pathlib
from baton.kv.arena import Arena
from baton.errors import BatonError
from baton.transfer.nixl.transport import NixlTransport
from baton.transfer.tcp.transport import TcpTransport

async def main():
    try:
        await NixlTransport("127.0.0.1").start(Arena.create(1 << 20), "a", 1)
    except BatonError:
        print("missing", flush=True)
        os._exit(0)
    await TcpTransport("127.0.0.1").start(Arena.create(1 << 20), "a", 1)
    links = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            links.add(os.readlink(f"/proc/self/fd/{fd}"))
        except OSError:
            pass
    for table in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):
        for row in pathlib.Path(table).read_text().splitlines()[1:]:
            field = row.split()
            if field[3] == "0A" and f"socket:[{field[9]}]" in links:
                print(field[1].split(":")[0], flush=True)
    os._exit(0)

asyncio.run(main())
"""
LOOPBACK = "0100007F"


@pytest.mark.nixl
def test_nothing_listens_outside_the_loopback() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60)
    said = done.stdout.split()
    if said == ["missing"]:
        pytest.skip("no NIXL here")
    assert said
    assert set(said) == {LOOPBACK}, done.stderr
