"""A process that works or wants to is told from one that is stopped, or waits."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from baton.engine.liveness import Liveness
from baton.engine.progress import STALL_S, stuck
from tests.unit.torch_engine.client import HANG_S, Client, request
from tests.unit.torch_engine.conftest import make_engine

SPIN = "while True: pass"
WAIT = "import threading; threading.Event().wait()"


@contextlib.contextmanager
def running(program: str, nice: int = 0, core: int | None = None) -> Iterator[int]:
    process = subprocess.Popen([sys.executable, "-c", program])
    try:
        if nice:
            os.setpriority(os.PRIO_PROCESS, process.pid, nice)
        if core is not None:
            os.sched_setaffinity(process.pid, {core})
        yield process.pid
    finally:
        process.kill()
        process.wait(HANG_S)


def until(liveness: Liveness, wanted: bool) -> None:
    hang = time.monotonic() + HANG_S
    while liveness.gets_on(time.monotonic()) is not wanted:
        assert time.monotonic() < hang
        time.sleep(0.05)


def test_what_computes_gets_on_until_it_is_stopped() -> None:
    with running(SPIN) as pid:
        liveness = Liveness(pid)
        assert not liveness.gets_on(time.monotonic()), "nothing is known yet"
        until(liveness, True)
        os.kill(pid, signal.SIGSTOP)
        until(liveness, False)
        os.kill(pid, signal.SIGCONT)
        until(liveness, True)


def test_what_waits_for_a_processor_gets_on() -> None:
    core = min(os.sched_getaffinity(0))
    with contextlib.ExitStack() as stack:
        for _ in range(4):
            stack.enter_context(running(SPIN, core=core))
        until(Liveness(stack.enter_context(running(SPIN, nice=10, core=core))), True)


def test_what_waits_for_anything_else_does_not() -> None:
    with running(WAIT) as pid:
        liveness = Liveness(pid)
        time.sleep(0.5)
        for _ in range(10):
            assert not liveness.gets_on(time.monotonic())
            time.sleep(0.05)


def test_what_has_ended_does_not() -> None:
    with running(SPIN) as pid:
        liveness = Liveness(pid)
        until(liveness, True)
    until(liveness, False)


@pytest.mark.slow
async def test_an_engine_that_has_no_processor_is_not_stuck(tiny_model: Path) -> None:
    """Steps that take far longer than was learnt, because others have the core."""
    if os.nice(0) > 0:
        pytest.skip("the others would be niced too, and leave the engine a share")
    core = min(os.sched_getaffinity(0))
    client = Client(make_engine(tiny_model, core=core))
    engine = client.engine
    await engine.start()
    try:
        await (await client.submit(request([1, 2, 3], max_tokens=50))).result()
        late = 0
        with contextlib.ExitStack() as others:
            for _ in range(3):
                others.enter_context(running(SPIN, core=core))
            for thread in psutil.Process(engine.link.pid).threads():
                os.sched_setscheduler(thread.id, os.SCHED_IDLE, os.sched_param(0))
            stream = await client.submit(request([7] * 600, max_tokens=40))
            hang = time.monotonic() + HANG_S
            while late < 20 and not stream.done.is_set():
                assert time.monotonic() < hang
                stats = engine.stats()
                now = time.time()
                if stats.step_started and now - stats.step_started > STALL_S:
                    late += 1
                    assert not stuck(stats.step_started, stats.step_predicted_s, now)
                await asyncio.sleep(0.05)
        assert late, "no step was late"
        await stream.result()
    finally:
        await client.close()
