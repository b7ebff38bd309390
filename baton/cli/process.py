"""Processes that outlive the command that started them: start, find again, end. Never a stranger.

A record names a process by pid *and* start time, because pids are reused. Every process that is started, and so every
child of it, also carries `MARK` = the home in its environment: what a crash left without a record is found by that.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from baton.cli.home import HOME, Home, project_root

MARK = "BATON_STARTED_FOR"
_ONE_PROCESS = {"BATON_ID", "BATON_PORT", "BATON_METRICS_PORT"}
"""Settings that can be meant for one process only; all of a run would take the same port."""
KILL_S = 10.0
"""How long a killed process may take to be gone."""


@dataclass
class Record:
    """What is known of one started process. `id`, `address` and `metrics` come from its ready line."""

    name: str
    role: str
    pid: int
    started: float
    command: list[str]
    log: str
    log_from: int = 0
    """The byte of the log at which this process' part begins: earlier ones wrote what is before."""
    id: str = ""
    address: str = ""
    metrics: str = ""
    ready: bool = False

    def save(self, home: Home) -> None:
        """Write, whole or not at all."""
        path = home.run / f"{self.name}.json"
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(asdict(self), indent=1))
        partial.replace(path)

    def forget(self, home: Home) -> None:
        """Remove the record and the stdout file."""
        for suffix in (".json", ".out"):
            (home.run / f"{self.name}{suffix}").unlink(missing_ok=True)


def settings(environment: Mapping[str, str]) -> dict[str, str]:
    """What of an environment every process of a run reads as its settings."""
    ours = {k: v for k, v in environment.items() if k.startswith("BATON_")}
    return {k: v for k, v in ours.items() if k not in _ONE_PROCESS | {MARK, HOME}}


def records(home: Home) -> list[Record]:
    """Every record of this home, oldest process first. An unreadable one is skipped."""
    found = []
    for path in home.run.glob("*.json"):
        if path.name == "up.json":
            continue
        try:
            found.append(Record(**json.loads(path.read_text())))
        except (OSError, ValueError, TypeError):
            continue
    return sorted(found, key=lambda r: (r.started, r.name))


def process_of(record: Record) -> psutil.Process | None:
    """The recorded process, if it is still that one and not a zombie."""
    try:
        process = psutil.Process(record.pid)
        same = abs(process.create_time() - record.started) < 1.0
        return process if same and is_alive(process) else None
    except psutil.Error:
        return None


def spawn(
    home: Home, name: str, role: str, command: Sequence[str], cores: Set[int] = frozenset()
) -> tuple[Record, subprocess.Popen[bytes]]:
    """Start a process in a session of its own, stderr to its log, stdout to run/<name>.out, and record it.

    It runs on `cores` unless there are none; what it starts may pin itself elsewhere.
    """
    log = home.log(name)
    environment = {k: v for k, v in os.environ.items() if k not in _ONE_PROCESS}
    environment |= {MARK: str(home.root), "PYTHONUNBUFFERED": "1"}
    with log.open("ab") as err, (home.run / f"{name}.out").open("wb") as out:
        begins = err.tell()
        err.write(f"--- {time.strftime('%F %T')} {' '.join(command)}\n".encode())
        err.flush()
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
            env=environment,
            cwd=project_root(),
        )
    if cores:
        os.sched_setaffinity(process.pid, cores)
    record = Record(name, role, process.pid, _start_time(process.pid), list(command), str(log), begins)
    record.save(home)
    return record, process


def ready_line(home: Home, name: str) -> dict[str, object] | None:
    """The JSON ready line a service prints on stdout, once it is there whole."""
    return _said(home, name, "ready")


def has_left(home: Home, name: str) -> bool:
    """Whether the last process of that name said, as its last word on stdout, that it left because it was told to."""
    return _said(home, name, "left") is not None


def _said(home: Home, name: str, what: str) -> dict[str, object] | None:
    try:
        text = (home.run / f"{name}.out").read_text(errors="replace")
    except OSError:
        return None
    for line in text.splitlines(keepends=True):
        if line.startswith("{") and line.endswith("\n"):
            try:
                said = json.loads(line)
            except ValueError:
                continue
            if isinstance(said, dict) and said.get(what) is True:
                return said
    return None


def tail(record: Record, lines: int) -> str:
    """The last lines that this process wrote to its log."""
    try:
        with Path(record.log).open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            begin = record.log_from if record.log_from <= end else 0  # somebody has cut the log short since
            file.seek(max(begin, end - 400 * lines))
            return "\n".join(file.read().decode(errors="replace").strip("\n").splitlines()[-lines:])
    except OSError:
        return ""


def marked(home: Home) -> list[psutil.Process]:
    """Every process started for this home, whatever the records say. Not this one."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and is_alive(process) and process.environ().get(MARK) == str(home.root):
                found.append(process)
        except psutil.Error:  # gone, or somebody else's
            continue
    return found


def end(processes: Iterable[psutil.Process], grace_s: float) -> list[psutil.Process]:
    """SIGTERM, wait, then SIGKILL. Returns those that had to be killed. psutil refuses a reused pid."""
    asked = list(processes)
    for process in asked:
        _send(process, signal.SIGTERM)
        _send(process, signal.SIGCONT)  # a stopped process could not hear it
    left = _wait_gone(asked, grace_s)
    for process in left:
        _send(process, signal.SIGKILL)
    _wait_gone(left, KILL_S)
    return left


def children_of(process: psutil.Process) -> list[psutil.Process]:
    """Its descendants, none when it has ended."""
    try:
        return list(process.children(recursive=True))
    except psutil.Error:
        return []


def is_alive(process: psutil.Process) -> bool:
    """Whether it runs. A zombie does not: where pid 1 reaps nobody, it stays for ever."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _wait_gone(processes: list[psutil.Process], seconds: float) -> list[psutil.Process]:
    """Wait for their end; returns those still alive."""
    deadline = time.monotonic() + seconds
    while (left := [process for process in processes if is_alive(process)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def _send(process: psutil.Process, number: signal.Signals) -> None:
    with contextlib.suppress(psutil.Error):
        process.send_signal(number)


def service(name: str, *flags: str, python: str = sys.executable) -> list[str]:
    """The command line of one of our services."""
    return [python, "-m", f"services.{name}", *flags]


def _start_time(pid: int) -> float:
    try:
        return float(psutil.Process(pid).create_time())
    except psutil.Error:  # dead already: its exit is noticed by who waits for it
        return time.time()
