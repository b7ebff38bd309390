"""`baton status`: each process as the machine sees it, and as the router sees it."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field

import psutil

from baton.cli.errors import CliError
from baton.cli.home import Home
from baton.cli.process import Record, children_of, has_left, process_of, records
from baton.cli.rpc import ask, running
from baton.cli.stack import STOP_ORDER
from baton.v1 import registry_pb2, router_pb2, router_pb2_grpc

SAMPLE_S = 0.5
"""How long CPU use is measured."""
VIEW_S = 3.0
DRAINED, DEAD = "drained", "dead"


@dataclass
class Row:
    """One process. `state` is running, starting, stopped (by SIGSTOP), drained (told to leave, and left) or dead.

    CPU and memory include its children (the engine); they are 0 for a worker that joined the run. `router` is empty for
    what no router sees, `engine` too.
    """

    name: str
    role: str
    id: str
    pid: int
    address: str
    state: str
    memory_bytes: int = 0
    """Of the process and its children; what they share counts once."""
    cpu_percent: float = 0.0
    uptime_s: float = 0.0
    log: str = ""
    metrics: str = ""
    engine: str = ""
    router: dict[str, object] = field(default_factory=dict)


@dataclass
class Status:
    """Every process, and how the router sees the registry."""

    rows: list[Row]
    registry: str = ""

    @property
    def healthy(self) -> bool:
        """Whether something runs, and nothing has died. Who was told to leave has not."""
        states = {row.state for row in self.rows}
        return "running" in states and states <= {"running", DRAINED}

    @property
    def gone(self) -> list[Row]:
        """Processes that left or died."""
        return [row for row in self.rows if row.state in (DRAINED, DEAD)]

    def as_json(self) -> dict[str, object]:
        """For programs."""
        return {"healthy": self.healthy, "registry": self.registry, "processes": [asdict(row) for row in self.rows]}


def status(home: Home) -> Status:
    """Measure, and ask the router. A router that does not answer leaves its column empty."""
    order = [*reversed(STOP_ORDER)]
    known = sorted(records(home), key=lambda record: (order.index(record.role), record.name))
    found = [(record, process_of(record)) for record in known]
    before = {record.name: _cpu_seconds(process) for record, process in found if process}
    began = time.monotonic()
    views: dict[str, router_pb2.WorkerView] = {}
    registry = ""
    try:
        reply = _view(home)
        views = {view.worker.id: view for view in reply.workers}
        registry = reply.registry
    except CliError as error:
        registry = f"unknown: {error.message}"
    time.sleep(max(0.0, SAMPLE_S - (time.monotonic() - began)))
    passed = time.monotonic() - began
    rows = []
    for record, process in found:
        row = _row(home, record, process)
        if process and record.name in before:
            row.cpu_percent = round(100 * max(0.0, _cpu_seconds(process) - before[record.name]) / passed, 1)
        if view := views.get(record.id):
            row.engine = view.worker.engine
            row.router = _seen(view)
        rows.append(row)
    ours = {record.id for record in known}
    rows += [_joined(view) for id, view in sorted(views.items()) if id not in ours]
    return Status(rows, registry if rows else "")


def _view(home: Home) -> router_pb2.ViewReply:
    record = running(home, "router")
    return ask(
        record.address,
        lambda channel: router_pb2_grpc.RouterServiceStub(channel).View(router_pb2.ViewRequest(), timeout=VIEW_S),
    )


def _row(home: Home, record: Record, process: psutil.Process | None) -> Row:
    gone = DRAINED if has_left(home, record.name) else DEAD
    row = Row(
        record.name, record.role, record.id, record.pid, record.address, gone, log=record.log, metrics=record.metrics
    )
    if process is None:
        return row
    try:
        stopped = process.status() == psutil.STATUS_STOPPED
        row.state = "stopped" if stopped else "running" if record.ready else "starting"
        row.memory_bytes = sum(_pss(p) for p in [process, *children_of(process)])
        row.uptime_s = round(time.time() - record.started, 1)
    except psutil.Error:
        row.state = gone
    return row


def _joined(view: router_pb2.WorkerView) -> Row:
    """One that this run did not start: what it registered is all that is known of it."""
    worker = view.worker
    role = registry_pb2.Role.Name(worker.role).removeprefix("ROLE_").lower()
    return Row(
        worker.id,
        role,
        worker.id,
        worker.pid,
        worker.address,
        "running",
        uptime_s=round(time.time() - worker.started, 1),
        metrics=worker.metrics_url,
        engine=worker.engine,
        router=_seen(view),
    )


def _seen(view: router_pb2.WorkerView) -> dict[str, object]:
    return {
        "state": view.state,
        "running": view.load.running,
        "waiting": view.load.waiting,
        "blocks_free": view.load.blocks_free,
        "blocks_total": view.load.blocks_total,
        "indexed_blocks": view.indexed_blocks,
    }


def _cpu_seconds(process: psutil.Process) -> float:
    total = 0.0
    for one in [process, *children_of(process)]:
        try:
            times = one.cpu_times()
            total += times.user + times.system
        except psutil.Error:
            continue
    return total


def _pss(process: psutil.Process) -> int:
    """Pages that several processes have are shared among them: a worker's pool is its engine's too."""
    try:
        return int(process.memory_full_info().pss)
    except psutil.Error:
        return 0
