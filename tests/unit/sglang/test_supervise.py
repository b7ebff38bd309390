"""Children live and die together: real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from baton.cli.ports import free_port

HANG_S = 60.0
SLEEP = f"{sys.executable} -c 'import time; time.sleep(600)'"


def supervisor(*children: str) -> subprocess.Popen[str]:
    """A process that supervises; each child is the source of a `Child`."""
    source = (
        "import shlex, sys\n"
        "from baton.engine.sglang.launch.supervise import Child, Supervisor\n"
        f"sys.exit(Supervisor([{', '.join(children)}]).run())\n"
    )
    return subprocess.Popen(
        [sys.executable, "-c", source], stderr=subprocess.PIPE, text=True, cwd=Path(__file__).parents[3]
    )


def child(name: str, command: str, *more: str) -> str:
    return f"Child({', '.join([repr(name), f'shlex.split({command!r})', *more])})"


def started(process: subprocess.Popen[str], count: int) -> list[psutil.Process]:
    """The children, once there are so many."""
    end = time.monotonic() + HANG_S
    while len(found := psutil.Process(process.pid).children()) < count:
        assert time.monotonic() < end
        assert process.poll() is None
        time.sleep(0.05)
    return found


def gone(processes: list[psutil.Process]) -> bool:
    _, alive = psutil.wait_procs(processes, timeout=HANG_S)
    return not alive


@pytest.mark.parametrize(("end", "code"), [("sys.exit(7)", 7), ("os.kill(os.getpid(), 9)", 137)])
def test_the_exit_of_one_is_everybodys(end: str, code: int) -> None:
    dies = f'{sys.executable} -c "import os, sys, time; time.sleep(0.5); {end}"'
    process = supervisor(child("stays", SLEEP), child("dies", dies))
    children = started(process, 1)
    _, said = process.communicate(timeout=HANG_S)
    assert process.returncode == code
    assert "dies: ended with" in said
    assert gone(children)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGKILL, -9)])
def test_children_do_not_outlive_it(number: int, code: int) -> None:
    process = supervisor(child("one", SLEEP), child("two", SLEEP))
    children = started(process, 2)
    os.kill(process.pid, number)
    assert process.wait(HANG_S) == code
    assert gone(children)


def test_the_next_one_starts_when_the_one_before_is_ready(tmp_path: Path) -> None:
    port = free_port()
    serve = f"{sys.executable} -m http.server {port} --bind 127.0.0.1 --directory {tmp_path}"
    ready = f"ready_url='http://127.0.0.1:{port}/'"
    done = f"{sys.executable} -c 'import urllib.request as u; u.urlopen(\"http://127.0.0.1:{port}/\")'"
    process = supervisor(child("server", serve, ready), child("asks", done))
    _, said = process.communicate(timeout=HANG_S)
    assert process.returncode == 0, said
    assert said.index("server: ready") < said.index("asks: started") < said.index("asks: ended with 0")


def test_one_that_is_never_ready() -> None:
    ready = f"ready_url='http://127.0.0.1:{free_port()}/', ready_s=0.3"
    process = supervisor(child("server", SLEEP, ready), child("never", SLEEP))
    _, said = process.communicate(timeout=HANG_S)
    assert process.returncode == 1
    assert "server: not ready after 0.3 s" in said
    assert "never" not in said
