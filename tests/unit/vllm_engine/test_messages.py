"""What goes between vLLM's processes and ours, over a real socket."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys

from baton.engine.vllm import messages as m
from baton.engine.vllm.link import Listener

SCHEDULER = """
import sys, time
from baton.engine.vllm import messages as m
from baton.engine.vllm.rank import HostLink
link = HostLink(sys.argv[1], m.Scheduler(), 1)
while len(link.spares) < 2:
    time.sleep(0.01)
link.send(m.Output(0, link.spares[1].slot, bytes([link.spares[0].slot])))
time.sleep(60)
"""


async def test_slots_reach_the_scheduler_and_it_ends_with_us() -> None:
    got: asyncio.Queue[m.FromVllm] = asyncio.Queue()
    listener = Listener(os.memfd_create("arena"), os.memfd_create("page"), got.put_nowait, lambda why: None)
    listener.spare(0, 0)  # nobody is there: it is lost, and nothing else
    await listener.start()
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", SCHEDULER, listener.path)
    try:
        async with asyncio.timeout(60):
            assert await got.get() == m.Scheduler()
            listener.spare(1, 70)
            listener.spare(2, 71)
            assert await got.get() == m.Output(0, 71, bytes([70]))
            await listener.close()
            assert await process.wait() == 1
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
