"""`baton down`: end everything of this home, in order, and leave nothing behind."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from baton.cli.home import Home
from baton.cli.process import Record, children_of, end, marked, process_of, records
from baton.cli.stack import STOP_ORDER

GRACE_S = 30.0
"""How long a process may take to drain: as Kubernetes gives it, more than its own bound."""

CHILD_GRACE_S = 2.0


@dataclass(frozen=True)
class Stopped:
    """Names of the processes that ended by themselves, and of those that had to be killed."""

    stopped: list[str]
    killed: list[str]


def down(home: Home) -> Stopped:
    """End the run. Idempotent. Raises CliError when another `up` or `down` is at work."""
    with home.locked():
        done = stop(home, records(home))
        for process in end(marked(home), GRACE_S):  # what a crash left without a record
            done.killed.append(str(process.pid))
        (home.run / "up.json").unlink(missing_ok=True)
        return done


def stop(home: Home, of: Iterable[Record]) -> Stopped:
    """End these processes, and their children, role by role; forget their records."""
    of = list(of)
    done = Stopped([], [])
    for role in STOP_ORDER:
        group = {process.pid: process for record in of if record.role == role and (process := process_of(record))}
        names = {record.pid: record.name for record in of}
        # Children end with their parents; those that do not are known only while their parents live.
        children = [child for process in group.values() for child in children_of(process)]
        killed = {process.pid for process in end(group.values(), GRACE_S)}
        end(children, CHILD_GRACE_S)
        for pid in group:
            (done.killed if pid in killed else done.stopped).append(names[pid])
    for record in of:
        record.forget(home)
    return done
