"""What we are compared with. Frozen: these, the seeds and the arrivals do not change with our policy.

All see the exact state of every node at every moment, where ours has load reports and its own reservations. Each node
reuses what it happens to hold, whoever placed the prompt there; none of them loads from another node. Streams go to the
decode node with the fewest. `LeastLoadedLoading` is no baseline but tells the two gains apart: placed by load, loaded
like ours.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from bench.sim.fleet import Job, Prefill
from bench.sim.world import Placement, World

SEEDS = (1, 2, 3, 4, 5)
"""A figure of a baseline is the mean over runs with these."""


class Baseline:
    """What the four have in common."""

    name = ""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._turn = -1

    def place(self, world: World, job: Job) -> Placement | None:
        """Where `job` goes; None when every node is down."""
        alive = [node for node in world.prefills if not node.down]
        streams = [node for node in world.decodes if not node.down]
        if not alive or (world.decodes and not streams):
            return None
        decode = min(streams, key=lambda n: (n.streams, self._random.random())).number if streams else -1
        chosen = self._choose(world, job, alive)
        return Placement(chosen.number, decode, self._source(job, alive, chosen))

    def stored(self, node: int, stored: Sequence[bytes], removed: Sequence[bytes]) -> None:
        """Not needed: it looks into the nodes themselves."""

    def changed(self, world: World, node: int) -> None:
        """Not needed."""

    def _choose(self, world: World, job: Job, alive: list[Prefill]) -> Prefill:
        raise NotImplementedError

    def _source(self, job: Job, alive: list[Prefill], chosen: Prefill) -> int:
        return -1


class Random(Baseline):
    """Any node."""

    name = "random"

    def _choose(self, world: World, job: Job, alive: list[Prefill]) -> Prefill:
        return self._random.choice(alive)


class RoundRobin(Baseline):
    """The next node."""

    name = "round_robin"

    def _choose(self, world: World, job: Job, alive: list[Prefill]) -> Prefill:
        self._turn += 1
        return alive[self._turn % len(alive)]


class LeastLoaded(Baseline):
    """The node with the least work ahead, in seconds, hits counted; equal ones by lot."""

    name = "least_loaded"

    def _choose(self, world: World, job: Job, alive: list[Prefill]) -> Prefill:
        return min(alive, key=lambda node: (node.backlog(world.now), self._random.random()))


class MaxPrefix(Baseline):
    """The node with the longest prefix, then the least loaded."""

    name = "max_prefix"

    def _choose(self, world: World, job: Job, alive: list[Prefill]) -> Prefill:
        return min(
            alive,
            key=lambda n: (-n.cache.prefix(job.request.keys), n.backlog(world.now), self._random.random()),
        )


class LeastLoadedLoading(LeastLoaded):
    """As least loaded; what another node holds is loaded from there."""

    name = "least_loaded_loading"

    def _source(self, job: Job, alive: list[Prefill], chosen: Prefill) -> int:
        keys = job.request.keys
        best = max(alive, key=lambda node: node.cache.prefix(keys))
        return best.number if best.cache.prefix(keys) > chosen.cache.prefix(keys) else -1


BASELINES: tuple[type[Baseline], ...] = (Random, RoundRobin, LeastLoaded, MaxPrefix)
