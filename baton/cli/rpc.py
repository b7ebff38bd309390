"""One call to a service of the run, with a deadline, from a program that has no event loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import grpc

from baton.cli.again import up_again
from baton.cli.errors import CliError
from baton.cli.home import Home
from baton.cli.process import Record, process_of, records

T = TypeVar("T")


def running(home: Home, role: str) -> Record:
    """The first living process of a role. Raises CliError when there is none."""
    known = records(home)
    for record in known:
        if record.role == role and record.address and process_of(record):
            return record
    raise CliError(f"no {role} is running", f"start it: {up_again(home)}" if known else "start with `baton up`")


def ask(address: str, call: Callable[[grpc.Channel], T]) -> T:
    """`call` on a channel to `address`; what fails on the way becomes a CliError."""
    options = [("grpc.enable_http_proxy", 0), ("grpc.max_receive_message_length", -1)]
    with grpc.insecure_channel(address, options=options) as channel:
        try:
            return call(channel)
        except grpc.RpcError as error:
            code = error.code().name if isinstance(error, grpc.Call) else "UNKNOWN"
            details = error.details() if isinstance(error, grpc.Call) else str(error)
            raise CliError(f"{address} answers {code}: {details}", "see `baton status` and `baton logs`") from error
