"""Server-sent events out of pieces of bytes, however they are cut. Pure; what it keeps is bounded.

The format: <https://html.spec.whatwg.org/multipage/server-sent-events.html>. Only `data` is of use here: comments
(servers ping with them) and other fields are skipped.
"""

from __future__ import annotations

from collections.abc import Iterator

MAX_EVENT_BYTES = 1 << 20
"""Of one event. A chunk of a completion has some hundred bytes; who sends a megabyte without an end sends garbage."""


class TooLargeError(ValueError):
    """An event, or a line, is larger than `MAX_EVENT_BYTES`."""


class EventParser:
    """Feed it what arrives; it gives the data of each event that is complete."""

    def __init__(self, limit: int = MAX_EVENT_BYTES) -> None:
        self._limit = limit
        self._line = bytearray()
        self._data: list[bytes] = []
        self._size = 0
        self._after_cr = False

    def feed(self, piece: bytes) -> Iterator[bytes]:
        """Data of the events that `piece` completes. Raises TooLargeError; nothing can be fed after that."""
        if not piece:
            return
        if self._after_cr and piece[:1] == b"\n":  # the second half of a line's end
            piece = piece[1:]
        self._after_cr = piece[-1:] == b"\r"
        *whole, rest = piece.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        for line in whole:
            self._line += line
            ended = self._take(bytes(self._line))
            self._line.clear()
            if ended is not None:
                yield ended
        self._line += rest
        self._check(len(self._line))

    def _take(self, line: bytes) -> bytes | None:
        """One whole line. The data of the event that it ends, if it does."""
        self._check(len(line))
        if not line:
            data, self._data, self._size = self._data, [], 0
            return b"\n".join(data) if data else None
        field, _, value = line.partition(b":")
        if field == b"data":
            self._data.append(value.removeprefix(b" "))
            self._size += len(value) + 1
        return None

    def _check(self, more: int) -> None:
        if self._size + more > self._limit:
            raise TooLargeError(f"an event of more than {self._limit} bytes")
