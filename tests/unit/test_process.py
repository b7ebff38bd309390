"""The runner of every process: what it says, how it ends, and that it always does."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time

import pytest

from tests.worker_process import ROOT

HANG_S = 60.0
LEFT = '{"left": true, "id": "tested-1"}'
"""The last word of one that was told to leave, and did."""
SERVICE = """
import asyncio, sys
from baton.config import ServiceSettings
from baton.errors import BatonError, Reason
from baton.process import Process, run_process

async def serve(process: Process) -> None:
    for name in ("first", "second"):
        async def close(name: str = name) -> None:
            print("closed", name, flush=True)
        process.closing(close)
    print("starting", flush=True)
    {start}
    process.ready("127.0.0.1:1", "http://127.0.0.1:2/metrics")
    code = await process.stopped()
    print("leaving", code, flush=True)
    {leave}

run_process("tested", ServiceSettings(id="tested-1", etcd="127.0.0.1:1", drain_s=0.1), serve)
"""


def start(*, start: str = "pass", leave: str = "pass") -> subprocess.Popen[str]:
    """A process whose service does this when it starts, and that when it leaves."""
    code = SERVICE.format(start=start, leave=leave)
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, text=True, stdout=pipe, stderr=pipe)


def until(process: subprocess.Popen[str], word: str) -> str:
    """The first line with that word."""
    assert process.stdout is not None
    for line in process.stdout:
        if word in line:
            return line
    raise AssertionError(f"ended with {process.wait()} before {word!r}")


def rest(process: subprocess.Popen[str]) -> tuple[int, list[str], str]:
    """Exit code, the lines that were left on stdout, stderr."""
    out, err = process.communicate(timeout=HANG_S)
    return process.returncode, out.splitlines(), err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_told_to_leave(number: signal.Signals) -> None:
    process = start()
    ready = json.loads(until(process, "ready"))
    assert ready == {
        "ready": True,
        "id": "tested-1",
        "address": "127.0.0.1:1",
        "metrics": "http://127.0.0.1:2/metrics",
        "pid": process.pid,
    }
    process.send_signal(number)
    assert rest(process)[:2] == (0, ["leaving 0", "closed second", "closed first", LEFT])


def test_ends_by_itself_with_a_code() -> None:
    code, out, _ = rest(start(start="asyncio.get_running_loop().call_later(0.1, process.end, 3)"))
    assert code == 3
    assert LEFT not in out


def test_told_to_leave_while_it_starts() -> None:
    process = start(start="await asyncio.sleep(600)")
    until(process, "starting")
    process.send_signal(signal.SIGTERM)
    assert rest(process)[:2] == (0, ["closed second", "closed first"])


@pytest.mark.parametrize("moment", ["start", "leave"])
def test_failures_are_told_and_end_it(moment: str) -> None:
    process = start(**{moment: "raise BatonError(Reason.INVALID_REQUEST, 'a wrong flag')"})
    if moment == "leave":
        until(process, "ready")
        process.send_signal(signal.SIGTERM)
    code, out, err = rest(process)
    assert (code, out[-2:]) == (1, ["closed second", "closed first"])
    assert "a wrong flag" in err
    assert "Traceback" not in err


def test_a_fault_is_told_with_its_trace() -> None:
    code, _, err = rest(start(start="1 / 0"))
    assert code == 1
    assert "ZeroDivisionError" in err


def test_leaving_that_hangs_is_cut_short() -> None:
    process = start(leave="await asyncio.sleep(600)")
    until(process, "ready")
    process.send_signal(signal.SIGTERM)
    code, out, err = rest(process)
    assert (code, out[-3:]) == (0, ["closed second", "closed first", LEFT])
    assert "leaving took too long" in err


def test_a_second_signal_ends_it_at_once() -> None:
    process = start(leave="await asyncio.sleep(600)")
    until(process, "ready")
    process.send_signal(signal.SIGTERM)
    until(process, "leaving")
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    code, out, _ = rest(process)
    assert (code, out) == (1, [])
    assert time.monotonic() - began < HANG_S
