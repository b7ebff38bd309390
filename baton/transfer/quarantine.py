"""Destinations that a late read may still write to.

A one-sided read cannot be cancelled. From the moment its deadline passes (or its task is cancelled) until the library
says that it is done or failed, nobody may use its destination. One event loop owns a `Quarantine`.
"""

from __future__ import annotations


class Quarantine:
    """A set of local byte ranges, each known by its offset."""

    def __init__(self) -> None:
        self._lengths: dict[int, int] = {}

    def __bool__(self) -> bool:
        return bool(self._lengths)

    def add(self, offset: int, length: int) -> None:
        """`length` bytes at `offset` are untouchable. Reads over them are refused, so no offset is twice here."""
        self._lengths[offset] = length

    def release(self, offset: int) -> None:
        """The read into `offset` is over: nothing of it can arrive any more."""
        del self._lengths[offset]

    def touches(self, offset: int, length: int) -> bool:
        """Whether any byte of the range is untouchable."""
        return any(start < offset + length and offset < start + size for start, size in self._lengths.items())

    def offsets(self) -> frozenset[int]:
        """Where the untouchable ranges start."""
        return frozenset(self._lengths)
