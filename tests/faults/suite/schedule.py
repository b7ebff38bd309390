"""What breaks, in which order and for how long: a pure function of a seed.

Times are the earliest ones. The injector waits, fault by fault, until the target is well and what must stay well is
well, so a slow machine gets the same faults in the same order, later.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum


class Kind(StrEnum):
    """How something breaks."""

    KILL = "kill"
    """kill -9; started again after a while."""
    RESTART = "restart"
    """kill -9 and started again in place at once, on the same port: a new epoch at an old address."""
    STOP = "stop"
    """SIGSTOP of the process and its engine, SIGCONT after a while: ports stay open, nothing answers."""
    FREEZE = "freeze"
    """SIGSTOP of the engine alone, behind a gRPC server that lives."""
    TERM = "term"
    """SIGTERM: it drains and leaves by itself; started again."""
    COMPACT = "compact"
    """etcd forgets its history, under the feet of watches."""
    LEADER = "leader"
    """kill -9 of etcd's leader; started again after a while."""
    FLIP = "flip"
    """A byte in every 4 KiB of a worker's idle pool: each block in its cache is wrong."""
    CORRUPT = "corrupt"
    """Bytes of KV flipped between two hosts, with TCP's checksum put right."""
    CUT = "cut"
    """Nothing passes between two hosts."""
    DELAY = "delay"
    """Everything between two hosts comes late."""
    THROTTLE = "throttle"
    """Little passes between two hosts."""
    LOSS = "loss"
    """Some packets between two hosts do not arrive."""


ENDING = frozenset({Kind.KILL, Kind.RESTART, Kind.TERM})
NETWORK = frozenset({Kind.CORRUPT, Kind.CUT, Kind.DELAY, Kind.THROTTLE, Kind.LOSS})


@dataclass(frozen=True)
class Fault:
    """One fault: not before `at_s` seconds into the run, on `target`, undone after `for_s` seconds."""

    number: int
    at_s: float
    kind: Kind
    target: str
    for_s: float

    def __str__(self) -> str:
        return f"{self.number}: {self.kind} {self.target} for {self.for_s:.1f} s"


@dataclass(frozen=True)
class Menu:
    """What a run can break: targets and relative frequency by kind, and the seconds between two faults."""

    targets: Mapping[Kind, Sequence[str]]
    weights: Mapping[Kind, float]
    every_s: float

    def __post_init__(self) -> None:
        missing = [kind for kind in self.weights if not self.targets.get(kind)]
        if missing:
            raise ValueError(f"no targets for {missing}")

    def sparing(self, names: Collection[str]) -> Menu:
        """The same, but `names` are never ended: what is stopped or cut off goes on as the same process."""
        left = {
            kind: [name for name in targets if name not in names] if kind in ENDING else targets
            for kind, targets in self.targets.items()
        }
        return replace(self, targets=left)


_LASTS_S = {
    Kind.KILL: (0.3, 2.0),
    Kind.RESTART: (0.0, 0.0),
    Kind.STOP: (0.5, 4.0),
    Kind.FREEZE: (0.5, 4.0),
    Kind.TERM: (0.0, 1.0),
    Kind.COMPACT: (0.0, 0.0),
    Kind.LEADER: (0.5, 3.0),
    Kind.FLIP: (0.0, 0.0),
    Kind.CORRUPT: (0.5, 3.0),
    Kind.CUT: (0.5, 4.0),
    Kind.DELAY: (0.5, 4.0),
    Kind.THROTTLE: (0.5, 4.0),
    Kind.LOSS: (0.5, 4.0),
}


def schedule(seed: int, count: int, menu: Menu) -> list[Fault]:
    """`count` faults, the same for the same arguments. Each kind of the menu comes before any comes twice."""
    chance = random.Random(seed)
    kinds = sorted(menu.weights)
    deck: list[Kind] = []
    faults = []
    at = 0.0
    for number in range(count):
        if not deck and number < len(kinds):
            deck = chance.sample(kinds, len(kinds))
        kind = deck.pop() if deck else chance.choices(kinds, [menu.weights[k] for k in kinds])[0]
        low, high = _LASTS_S[kind]
        at += menu.every_s * chance.uniform(0.5, 1.5)
        faults.append(Fault(number, at, kind, chance.choice(menu.targets[kind]), chance.uniform(low, high)))
    return faults
