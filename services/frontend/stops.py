"""Stop strings: found over any token edge, and never leaked.

Text is held back while it could still become a stop string: the longest suffix that is a proper prefix of one. The
first stop string to be *complete* wins (of those that end together the longest), so the result does not depend on how
the text was cut into pieces.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """The filter for one output. After a stop was found, nothing more comes out. `include`: the stop itself is text."""

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._stops = tuple(stops)
        self._include = include
        self._longest = max(map(len, stops), default=0)
        self._held = ""
        self.stopped = False
        self.matched = ""
        """The stop string that was completed."""

    def push(self, text: str) -> str:
        """The text that may be shown now; `stopped` tells whether a stop string was completed."""
        if self.stopped:
            return ""
        if not self._stops:
            return text
        buffer = self._held + text
        found = self._find(buffer)
        if found is not None:
            cut, self.matched = found
            self.stopped = True
            self._held = ""
            return buffer[:cut]
        keep = self._possible(buffer)
        self._held = buffer[len(buffer) - keep :]
        return buffer[: len(buffer) - keep]

    def flush(self) -> str:
        """The output has ended otherwise: what was held back is text after all."""
        held, self._held = self._held, ""
        return held

    def _find(self, buffer: str) -> tuple[int, str] | None:
        """Where to cut: the start (or end) of the stop string that is complete first; and that string."""
        best: tuple[int, int] | None = None
        for stop in self._stops:
            start = buffer.find(stop)
            if start >= 0 and (best is None or (start + len(stop), start) < best):
                best = (start + len(stop), start)
        if best is None:
            return None
        end, start = best
        return end if self._include else start, buffer[start:end]

    def _possible(self, buffer: str) -> int:
        """The length of the longest suffix with which a stop string begins."""
        for size in range(min(len(buffer), self._longest - 1), 0, -1):
            tail = buffer[-size:]
            if any(stop.startswith(tail) for stop in self._stops):
                return size
        return 0
