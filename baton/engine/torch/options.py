"""How a worker process starts its engine. Apart from the engine, so that the worker does not load torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Options:
    """What the worker process tells its engine on the command line, as JSON."""

    model: str
    dtype: str
    epoch: int
    max_streams: int
    chunk_tokens: int
    threads: int
    core: int | None
    parent: int
    socket_fd: int
    arena_fd: int
    page_fd: int
