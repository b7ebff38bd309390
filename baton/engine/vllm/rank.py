"""The end of the socket in vLLM's processes. Their worker is on the other one: when it is gone, so are they."""

from __future__ import annotations

import os
import socket
import threading
from collections import deque

from baton.engine.vllm.messages import LENGTH, FromVllm, Spare, frame, spares

START_S = 60.0


class HostLink:
    """Says who we are, gets the descriptors that the worker shares, and tells it what happens.

    `spares`: what the worker has said and nobody has taken yet, one for each job at most. Raises OSError when there is
    no worker any more.
    """

    def __init__(self, path: str, hello: FromVllm, descriptors: int) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(START_S)
        self._socket.connect(path)
        self._socket.sendall(frame(hello))
        _, self.descriptors, _, _ = socket.recv_fds(self._socket, 1, descriptors)
        if len(self.descriptors) != descriptors:
            raise OSError("the worker shares nothing")
        self._socket.settimeout(None)
        self._lock = threading.Lock()
        self.spares: deque[Spare] = deque()
        threading.Thread(target=self._listen, name="baton host", daemon=True).start()

    def _listen(self) -> None:
        """Until the worker is gone, which we do not outlive."""
        try:
            with self._socket.makefile("rb") as told:
                while head := told.read(LENGTH.size):
                    self.spares.append(spares.decode(told.read(*LENGTH.unpack(head))))
        finally:
            os._exit(1)

    def send(self, message: FromVllm) -> None:
        """From whichever thread."""
        with self._lock:
            self._socket.sendall(frame(message))
