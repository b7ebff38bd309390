"""How many requests of the batch lane each worker may have: what nobody else would feel. Pure.

Workers that compute on the same thing (a core; a host, unless they say what they compute on) are one group.

- A worker's idle places are its streams less what others run and wait for there.
- While others have work somewhere in a group, or had some a moment ago, nothing new of the lane starts there.
- What runs on a worker whose engine yields keeps its place: the engine sees to each of its steps, and gives others its
  blocks. It pauses while others of the group have work, or a request is on its way to nobody knows whom. Stopping it
  would cost more than it frees: an abort and a new attempt for each line, just when the processors are wanted. Only
  those whose prompt is not computed yet leave, when it takes long: they hold blocks that cannot be given to others.
- What runs on any other worker stops while others have work in its group.
- A worker that shares with nobody and whose engine yields takes what it has places for.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

PAUSE_S = 0.3
"""A pause, to be told again while it is wanted: a frontend that dies ends no lane."""
ARRIVING_S = 0.1
"""A pause for a request that is on its way: by then it is somewhere, or was refused."""
QUIET_S = 0.3
"""A group is idle when nothing else was there for so long: chats come in turns."""


@dataclass(frozen=True)
class Seen:
    """A worker as it is now. `streams`: as many as it runs at once; 0 for one that streams nothing (prefill)."""

    id: str
    shares: str
    """What it computes on."""
    streams: int
    interactive: int
    """Outputs there, running or waiting, that are not of the batch lane."""
    quiet_s: float
    """Since there was one."""
    others: int = 0
    """Outputs of other frontends' batch lanes."""
    yields: bool = False
    lacks: frozenset[str] = frozenset()
    max_context: int = 0
    """0: it does not say."""

    def can(self, needs: Iterable[str], tokens: int) -> bool:
        """Whether it can go on with a prompt and output of so many tokens."""
        return self.lacks.isdisjoint(needs) and (not self.max_context or tokens < self.max_context)


@dataclass(frozen=True)
class Room:
    """`start`: new ones may start while there are fewer; `keep`: more than so many give their places up; `prompts`:
    those may stay for long, too, whose prompt is being computed, wherever that is; `pause_s`: for so long none of them
    is to compute."""

    start: int
    keep: int
    prompts: bool = True
    pause_s: float = 0.0


def rooms(seen: Sequence[Seen], arriving: bool) -> dict[str, Room]:
    """The room of each worker. `arriving`: a request is on its way to some worker, nobody knows which."""
    groups: defaultdict[str, list[Seen]] = defaultdict(list)
    for worker in seen:
        groups[worker.shares].append(worker)
    return {w.id: _room(w, [other for other in groups[w.shares] if other is not w], arriving) for w in seen}


def _room(worker: Seen, beside: Sequence[Seen], arriving: bool) -> Room:
    idle = max(0, worker.streams - worker.interactive - worker.others)
    places = max(0, worker.streams - worker.others)
    if worker.yields and not beside:
        return Room(idle, places)
    elsewhere = any(other.interactive for other in beside)
    busy = arriving or any(w.interactive or w.quiet_s < QUIET_S for w in (worker, *beside))
    alone = not (elsewhere or worker.interactive)
    if worker.yields:
        pause_s = PAUSE_S if elsewhere else ARRIVING_S if arriving else 0.0
        return Room(0 if busy else idle, places, prompts=alone, pause_s=pause_s)
    keep = idle if alone else 0
    return Room(0 if busy else keep, keep, prompts=alone)
