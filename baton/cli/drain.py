"""`baton drain`: ask one process to take no new work, finish or move what it has, and leave."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable

import grpc
import psutil

from baton.cli.again import up_again
from baton.cli.errors import CliError
from baton.cli.home import Home
from baton.cli.process import has_left, process_of, records
from baton.cli.rpc import ask
from baton.v1 import worker_pb2, worker_pb2_grpc

WORKERS = ("prefill", "decode", "merged")
AT_ONCE_S = 0.001
LEAVE_S = 30.0
"""What leaving may take, a worker's deadline aside."""


def drain(home: Home, name: str, deadline_s: float, told: Callable[[int], None] = lambda streams: None) -> int:
    """Drain the process of that id or name and wait until it has exited; returns the requests that were left.

    `deadline_s` is for workers: then requests are moved. Router, kvstore and frontend go by their own --drain-s.
    `told` hears how many requests a worker still has, whenever that has changed. Raises CliError.
    """
    known = records(home)
    chosen = next((r for r in known if name in (r.id, r.name)), None)
    if chosen is None:
        names = ", ".join(f"{r.name} ({r.id})" for r in known if r.role != "etcd" and process_of(r))
        raise CliError(f"there is no process {name}", f"processes: {names or 'none is running'}")
    process = process_of(chosen)
    if process is None:
        how = "has left already" if has_left(home, chosen.name) else "has died"
        raise CliError(f"{name} {how}", f"start it again: {up_again(home)}")
    if chosen.role == "etcd":
        raise CliError(f"{name} cannot be drained: everybody registers there", "`baton down` ends it with the rest")
    left = 0
    if chosen.role in WORKERS:
        left = ask(chosen.address, lambda channel: _drained(channel, deadline_s, told))
    else:
        process.send_signal(signal.SIGTERM)
    try:
        process.wait(LEAVE_S)
    except psutil.TimeoutExpired:
        raise CliError(f"{name} has not left", f"see `baton logs {chosen.name}`") from None
    return left


def _drained(channel: grpc.Channel, deadline_s: float, told: Callable[[int], None]) -> int:
    """Drain the worker there; the requests that were left. Raises grpc.RpcError."""
    stub = worker_pb2_grpc.WorkerServiceStub(channel)
    request = worker_pb2.DrainRequest(deadline_s=max(deadline_s, AT_ONCE_S))
    within_s = deadline_s + LEAVE_S
    draining = stub.Drain.future(request, timeout=within_s)
    watch = stub.Watch(worker_pb2.WatchRequest(), timeout=within_s)
    draining.add_done_callback(lambda _: watch.cancel())  # type: ignore[no-untyped-call]
    before = 0
    with contextlib.suppress(grpc.RpcError):  # ours, or the worker's end: what counts is what `Drain` answers
        for update in watch:
            streams = update.load.running + update.load.waiting
            if update.HasField("load") and streams != before:
                told(streams)
                before = streams
    return int(draining.result().remaining)
