"""`baton drain`: ask one worker to take no new work and finish what it has."""

from __future__ import annotations

from baton.cli.errors import CliError
from baton.cli.home import Home
from baton.cli.process import process_of, records
from baton.cli.rpc import ask
from baton.v1 import worker_pb2, worker_pb2_grpc

WORKERS = ("prefill", "decode", "merged")


def drain(home: Home, name: str, deadline_s: float) -> int:
    """Drain the worker of that id or name; returns the requests left when it answered. Raises CliError."""
    workers = [record for record in records(home) if record.role in WORKERS and process_of(record)]
    chosen = next((record for record in workers if name in (record.id, record.name)), None)
    if chosen is None:
        known = ", ".join(f"{record.name} ({record.id})" for record in workers) or "none is running"
        raise CliError(f"there is no worker {name}", f"workers: {known}")
    request = worker_pb2.DrainRequest(deadline_s=deadline_s)
    reply = ask(
        chosen.address,
        lambda channel: worker_pb2_grpc.WorkerServiceStub(channel).Drain(request, timeout=deadline_s + 30.0),
    )
    return int(reply.remaining)
