"""Processes: found again, ended, and never a stranger's."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from baton.cli.down import down, stop
from baton.cli.errors import CliError
from baton.cli.home import Home, find_home
from baton.cli.process import Record, end, has_left, is_alive, marked, process_of, ready_line, records, spawn, tail

SLEEP = "import time; time.sleep(600)"
IGNORES = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf'); time.sleep(600)"
PARENT = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {SLEEP!r}]).wait()"
HANG_S = 30.0


def python(code: str) -> list[str]:
    """A command that runs this code."""
    return [sys.executable, "-c", code]


def until(condition: Callable[[], bool]) -> None:
    """Wait; only a hang fails."""
    hang = time.monotonic() + HANG_S
    while not condition():
        assert time.monotonic() < hang
        time.sleep(0.01)


def test_started_process_is_found_again_by_its_record(home: Home) -> None:
    record, process = spawn(home, "router", "router", python(SLEEP))
    (found,) = records(home)
    assert found == record
    running = process_of(found)
    assert running is not None
    assert running.pid == process.pid
    assert os.getsid(process.pid) == process.pid
    assert stop(home, [found]).stopped == ["router"]
    assert process_of(found) is None
    assert records(home) == []


def test_reused_pid_is_a_stranger(home: Home) -> None:
    with subprocess.Popen(python(SLEEP)) as stranger:
        record = Record("router", "router", stranger.pid, psutil.Process(stranger.pid).create_time() - 60, [], "")
        record.save(home)
        assert process_of(record) is None
        done = down(home)
        assert done.stopped == done.killed == []
        assert stranger.poll() is None
        assert records(home) == []
        stranger.kill()


def test_process_that_ignores_sigterm_is_killed(home: Home) -> None:
    record, process = spawn(home, "decode-1", "decode", python(IGNORES))
    until(lambda: "deaf" in (home.run / "decode-1.out").read_text())
    running = process_of(record)
    assert running is not None
    assert end([running], 0.2) == [running]
    assert not is_alive(running)
    assert process.wait(HANG_S) == -signal.SIGKILL


def test_stopped_process_hears_the_end(home: Home) -> None:
    record, process = spawn(home, "decode-1", "decode", python(SLEEP))
    process.send_signal(signal.SIGSTOP)
    running = process_of(record)
    assert running is not None
    assert end([running], HANG_S) == []


def test_zombie_is_not_alive(home: Home) -> None:
    record, process = spawn(home, "decode-1", "decode", python("pass"))
    until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_ZOMBIE)
    assert process_of(record) is None
    process.wait()


def test_down_finds_what_has_no_record_and_the_children_of_the_dead(home: Home) -> None:
    _, parent = spawn(home, "prefill-1", "prefill", python(PARENT))
    until(lambda: len(marked(home)) == 2)
    parent.kill()
    parent.wait()
    (home.run / "prefill-1.json").unlink()
    assert len(marked(home)) == 1
    done = down(home)
    assert marked(home) == []
    assert done.stopped == []
    again = down(home)
    assert again.stopped == again.killed == []


def test_down_ends_children_whose_parent_is_killed(home: Home) -> None:
    spawn(home, "prefill-1", "prefill", python(PARENT))
    until(lambda: len(marked(home)) == 2)
    assert down(home).stopped == ["prefill-1"]
    assert marked(home) == []


def test_ready_line_is_found_among_noise_and_only_whole(home: Home) -> None:
    stdout = home.run / "router.out"
    assert ready_line(home, "router") is None
    said = {"ready": True, "id": "router-1", "address": "127.0.0.1:5"}
    noise = '2026 NIXL INFO hello\n{"ready": false}\n{broken\n[1]\n'
    stdout.write_text(noise + json.dumps(said))
    assert ready_line(home, "router") is None
    stdout.write_text(noise + json.dumps(said) + "\nmore")
    assert ready_line(home, "router") == said


def test_broken_record_is_skipped(home: Home) -> None:
    (home.run / "router.json").write_text("{")
    (home.run / "old.json").write_text('{"name": "x", "unknown": 1}')
    assert records(home) == []


def test_tail_reads_the_end(tmp_path: Path) -> None:
    record = Record("router", "router", 0, 0.0, [], str(tmp_path / "log"))
    Path(record.log).write_text("".join(f"line {n}\n" for n in range(10_000)))
    assert tail(record, 2) == "line 9998\nline 9999"
    record.log_from = 1 << 20  # somebody has cut it since
    assert tail(record, 2) == "line 9998\nline 9999"
    record.log = str(tmp_path / "none")
    assert tail(record, 2) == ""


def test_tail_is_of_this_process_whatever_its_lines_look_like(home: Home) -> None:
    said = "earlier", "--- Logging error ---\nTraceback (most recent call last):\n  why\n--- 2026-01-03 c"
    for words in said:
        record, process = spawn(home, "router", "router", python(f"import sys; sys.stderr.write({words!r})"))
        process.wait(HANG_S)
    assert "earlier" in Path(record.log).read_text()
    began, *lines = tail(record, 20).splitlines()
    assert began.startswith("--- 20")
    # The command line has the words too.
    assert lines[-4:] == said[1].splitlines()
    assert "earlier" not in tail(record, 20)


def test_one_that_says_that_it_left_has_not_died(home: Home) -> None:
    assert not has_left(home, "router")
    says = 'print(\'{"ready": true}\\n{"left": true}\')'
    for code, left in ((SLEEP, False), (says, True), ("pass", False)):
        record, process = spawn(home, "router", "router", python(code))
        if code == SLEEP:
            process.kill()
        process.wait(HANG_S)
        assert process_of(record) is None
        assert has_left(home, "router") is left, code


def test_only_one_at_a_time(home: Home) -> None:
    with home.locked(), pytest.raises(CliError, match="another"), home.locked():
        pass
    with home.locked():
        pass


def test_home_is_the_named_one(home: Home) -> None:
    assert find_home() == home
