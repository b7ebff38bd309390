"""What we are compared with, and on what. Frozen: nothing here changes with our policy.

Fleets, arrivals, objective, seeds, then the baselines. A unit test holds this file's digest, so that a change is a
deliberate act, made together with every figure that was measured on it; `ARRIVALS` holds the digests of the requests
as they are played, because the traces are not part of the project.

The baselines see the exact state of every node at every moment, where ours has load reports and its own reservations.
Each node reuses what it happens to hold, whoever placed the prompt there; none of them loads from another node.
Streams go to the decode node with the fewest. `LeastLoadedLoading` is no baseline but tells the two gains apart: placed
by load, loaded like ours.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence

from bench.sim.figures import Slo
from bench.sim.fleet import Job, Prefill, Setting
from bench.sim.trace import Trace
from bench.sim.work import Work
from bench.sim.world import Placement, World

FLEET = Setting(
    prefills=8, decodes=0, prefill_tok_s=6000.0, cache_tokens=3_000_000, kv_bytes=327_680, link_bytes_s=20e9, tiers=None
)
"""An LRU of 3 M tokens on each of 8 nodes; prompts only."""
LARGE_FLEET = Setting(
    prefills=1000, decodes=0, prefill_tok_s=6000.0, cache_tokens=3_000_000, kv_bytes=327_680, link_bytes_s=20e9,
    tiers=None,
)  # fmt: skip
LARGE_TRACE = "mooncake_conversation"
LARGE_COPIES = 125
"""One for each 8 nodes."""
LARGE_COPIES_SEED = 0
LARGE_S = 180.0
AZURE_LOAD = 0.6
"""Of what the fleet can compute. The Mooncake traces arrive by their own timestamps."""
SLO = Slo(ttft_s=10.0)
SEEDS = (1, 2, 3, 4, 5)
"""A figure of a baseline is the mean over runs with these."""
LARGE_SEEDS = (1,)
ARRIVALS: dict[str, str] = {
    "mooncake_conversation": "c2415607fd59c038",
    "mooncake_synthetic": "5a1c3d82f29dc7cc",
    "AzureLLMInferenceTrace_code": "dccd041f3de84e5a",
    "AzureLLMInferenceTrace_conv": "12aeb04201a1d544",
    "mooncake_conversation_1000": "99284ccac1104be4",
}
"""Digests of the arrivals by name (`Trace.digest`)."""


def arrivals(traces: Mapping[str, Trace]) -> Iterator[Trace]:
    """The traces as they are played on `FLEET`."""
    offered = AZURE_LOAD * FLEET.prefills * FLEET.prefill_tok_s
    for trace in traces.values():
        yield trace if trace.name.startswith("mooncake") else trace.faster(offered / trace.prompt_tok_s)


def large_arrivals(trace: Trace, seconds: float = LARGE_S) -> Trace:
    """The first `seconds` of what is played on `LARGE_FLEET`, out of `LARGE_TRACE`."""
    copies = trace.copies(LARGE_COPIES, LARGE_COPIES_SEED, seconds)
    return Trace(f"{trace.name}_{LARGE_FLEET.prefills}", copies.block, copies.requests)


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

    def stored(self, node: int, stored: Sequence[bytes], removed: Sequence[bytes], tier: str = "") -> None:
        """Not needed: it looks into the nodes themselves."""

    def loaded(self, world: World, node: int, begun: Work) -> None:
        """Not needed."""

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
            key=lambda n: (-n.prefix(job.request.keys), n.backlog(world.now), self._random.random()),
        )


class LeastLoadedLoading(LeastLoaded):
    """As least loaded; what another node holds is loaded from there."""

    name = "least_loaded_loading"

    def _source(self, job: Job, alive: list[Prefill], chosen: Prefill) -> int:
        keys = job.request.keys
        best = max(alive, key=lambda node: node.cache.prefix(keys))
        return best.number if best.cache.prefix(keys) > chosen.cache.prefix(keys) else -1


BASELINES: tuple[type[Baseline], ...] = (Random, RoundRobin, LeastLoaded, MaxPrefix)
