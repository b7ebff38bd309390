"""The yardstick of `bench.transport`: a READ loop on NIXL's own Python API and nothing else. It does not change.

Reader and target are two processes with an agent each, UCX backend, no progress thread; the target polls each
millisecond. Both get a memfd to map, so that what they are compared with can use the very same pages. A read of N bytes
is one NIXL request of blocks of at most 1 MiB, made, posted, polled until it is done, and released: each read of real
blocks is a new request, so making it is part of the cost.

    python -m bench.bare_nixl FD     is the target: maps FD, one JSON line out, ends when stdin does
"""

from __future__ import annotations

import ctypes
import json
import logging
import mmap
import os
import select
import subprocess
import sys
import time
from typing import Any

BLOCK = 1 << 20
ARENA = 64 << 20
POLL_S = 0.001


def memory(fd: int) -> tuple[mmap.mmap, int]:
    """The ARENA bytes of a memfd, mapped, and their address."""
    pages = mmap.mmap(fd, ARENA, mmap.MAP_SHARED)
    return pages, ctypes.addressof(ctypes.c_char.from_buffer(pages))


def agent(name: str, address: int) -> Any:
    """An agent whose memory is registered."""
    os.environ.setdefault("UCX_LOG_FILE", "stderr")  # stdout is for the result
    from nixl_cu12 import nixl_agent, nixl_agent_config

    logging.getLogger("nixl").setLevel(logging.WARNING)
    made = nixl_agent(name, nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))
    made.register_memory([(address, ARENA, 0, "")], "DRAM")
    return made


def target(fd: int) -> None:
    """Be read from until stdin ends."""
    _pages, address = memory(fd)
    serving = agent("bare-target", address)
    print(json.dumps({"metadata": serving.get_agent_metadata().hex(), "address": address}), flush=True)
    while not select.select([sys.stdin], [], [], POLL_S)[0]:
        serving.get_new_notifs()
    os._exit(0)


class BareReader:
    """Reads from a target process of its own: from the memfd `source` into the memfd `into`, ARENA bytes each."""

    def __init__(self, source: int, into: int) -> None:
        self._target = subprocess.Popen(
            [sys.executable, "-m", "bench.bare_nixl", str(source)],
            pass_fds=(source,),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._target.stdout is not None
        line = ""
        while not line.startswith("{"):
            line = self._target.stdout.readline()
            if not line:
                raise RuntimeError("the bare target did not start")
        told = json.loads(line)
        self._pages, self._address = memory(into)
        self._agent = agent("bare-reader", self._address)
        self._remote = self._agent.add_remote_agent(bytes.fromhex(told["metadata"]))
        self._base = told["address"]
        self.read(64 << 10)

    def read(self, size: int) -> float:
        """Seconds to read `size` bytes."""
        started = time.perf_counter()
        blocks = [(at, min(BLOCK, size - at)) for at in range(0, size, BLOCK)]
        ours = self._agent.get_xfer_descs([(self._address + at, length, 0) for at, length in blocks], "DRAM")
        theirs = self._agent.get_xfer_descs([(self._base + at, length, 0) for at, length in blocks], "DRAM")
        request = self._agent.initialize_xfer("READ", ours, theirs, self._remote, b"")
        state = self._agent.transfer(request)
        while state == "PROC":
            state = self._agent.check_xfer_state(request)
        if state != "DONE":
            raise RuntimeError(f"bare read: {state}")
        request.release()
        return time.perf_counter() - started

    def close(self) -> None:
        """End the target."""
        self._target.kill()
        self._target.wait()


if __name__ == "__main__":
    target(int(sys.argv[1]))
