"""What stores hold of a prompt, and when a worker should load it rather than compute it. Pure.

A load is worth taking when it costs less, with a margin, than computing the same tokens on that worker: a hit must
never be slower than a miss. A store's run may end on any of its tiers, so each tier's end is an option of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

LoadTime = Callable[[str, str, str, float], float]
"""(store, tier, worker, bytes) -> seconds; infinite when the pair is not to be counted on."""


@dataclass(frozen=True, slots=True)
class StoredRun:
    """The prefix of a request that one store holds: blocks by tier, best first, in blocks of `block_size` tokens."""

    store: str
    fingerprint: str
    block_size: int
    blocks: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Load:
    """Load the first `tokens` of the prompt, as far as they are not there, in `seconds`. `tier` is the slowest."""

    store: str
    tier: str
    tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Reader:
    """What matters of the worker that would load: `have` tokens are there, at most `most` can be used."""

    worker: str
    fingerprint: str
    block_size: int
    block_bytes: int
    have: int
    most: int


def loads(runs: Sequence[StoredRun], reader: Reader, load_time: LoadTime) -> list[Load]:
    """Every load that would bring `reader` something: for each store, to the end of each tier's part of its run."""
    found: list[Load] = []
    for run in runs:
        if (run.fingerprint, run.block_size) != (reader.fingerprint, reader.block_size):
            continue
        end, seconds = 0, 0.0
        for tier, blocks in run.blocks.items():
            start, end = end, min(end + blocks * run.block_size, reader.most)
            new = (end - max(start, reader.have)) // run.block_size
            if new > 0:
                seconds += load_time(run.store, tier, reader.worker, new * reader.block_bytes)
                found.append(Load(run.store, tier, end, seconds))
    return found


def worth(found: Sequence[Load], have: int, compute: Callable[[int], float], margin: float) -> list[Load]:
    """Those that cost less than `compute(tokens)` seconds of the worker, `margin` times over.

    `compute` is what the prompt takes when its first `tokens` are there.
    """
    without = compute(have)
    return [load for load in found if load.seconds * margin < without - compute(load.tokens)]
