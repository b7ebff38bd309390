"""The process that reads large bodies: one after another from its socket, until that ends.

It may take `MEMORY_BYTES` and no more: JSON of many small parts takes forty times its size once it is objects.
"""

from __future__ import annotations

import ctypes
import json
import resource
import signal
import socket
import sys
from pathlib import Path

from baton.errors import BatonError, Reason
from baton.model.card import load_model
from services.frontend.asked import Api, Reading, Unread, pack
from services.frontend.reader import ANSWER, ASK

MEMORY_BYTES = 2 << 30
PR_SET_PDEATHSIG = 1


def main() -> None:
    """`python -m services.frontend.large [MODEL, NAME, TOOLS, REASONING, SOCKET]`; started by `BodyReader` only."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    # Ctrl-C reaches the whole group: the frontend decides when this ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # When the machine runs out of memory this goes first, and its frontend lives.
    Path("/proc/self/oom_score_adj").write_text("1000")
    path, name, tools, reasoning, fd = json.loads(sys.argv[1])
    with socket.socket(fileno=fd) as connection:
        reading = Reading(load_model(path, name), tools, reasoning)
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
        connection.sendall(b"r")
        _serve(connection, reading)


def _serve(connection: socket.socket, reading: Reading) -> None:
    stream = connection.makefile("rb")
    while len(head := stream.read(ASK.size)) == ASK.size:
        api, limit, named, before, size = ASK.unpack(head)
        tenant = stream.read(named).decode()
        earlier = stream.read(before) if before >= 0 else None
        body = stream.read(size)
        if len(body) < size:
            return
        answer = _read(reading, Unread(body, Api(api), limit, earlier, tenant))
        connection.sendall(ANSWER.pack(len(answer)) + answer)


def _read(reading: Reading, unread: Unread) -> bytes:
    try:
        return pack(reading.read(unread))
    except BatonError as error:
        return pack(error)
    except MemoryError:
        return pack(BatonError(Reason.REQUEST_TOO_LARGE, "The body takes too much memory to read."))


if __name__ == "__main__":
    main()
