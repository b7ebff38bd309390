"""The clock: arrivals, prompts that end, hand-overs, streams that end, machines that die and come back.

A prompt waits its turn on its node, loads what the plan names when that is still there (work.py), computes the rest,
and hands over; its first token is there when the last of it is computed. A dead node's requests are placed anew with
what they have emitted.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from bench.sim.cache import Cache
from bench.sim.decode import Decode
from bench.sim.fleet import Job, Prefill, Setting
from bench.sim.tiers import Change, Store
from bench.sim.trace import Trace
from bench.sim.work import Work, occupy, transfer_s, work

HANDOVER_S = 0.005
MOST_ATTEMPTS = 5


@dataclass(frozen=True)
class Placement:
    """Where a job goes: node numbers. `source` is the node to load a longer prefix from, -1 for none.

    With tiers `upto` tokens of the prompt are loaded as far as they are missing, 0 for none. None leaves it to the
    node, which then takes from its own store, or that of `source`, whatever is sooner there than computed.
    """

    prefill: int
    decode: int = -1
    source: int = -1
    upto: int | None = None


@dataclass(frozen=True)
class Failure:
    """A node is dead from second `at` for `down_s`. `kind` is prefill or decode."""

    at: float
    kind: str
    number: int
    down_s: float


class Policy(Protocol):
    """Decides where each job goes. The world tells it of everything that a router would be told."""

    name: str

    def place(self, world: World, job: Job) -> Placement | None:
        """Where `job` goes, or None to refuse it."""

    def stored(self, node: int, stored: Sequence[bytes], removed: Sequence[bytes], tier: str = "") -> None:
        """The node's cache has changed, or a tier of its store."""

    def loaded(self, world: World, node: int, begun: Work) -> None:
        """What `node` loaded from a store is there."""

    def changed(self, world: World, node: int) -> None:
        """The prefill node's load has changed, or it died or came back."""


class World:
    """One run of one policy over one trace."""

    def __init__(
        self,
        setting: Setting,
        trace: Trace,
        policy: Policy,
        failures: Sequence[Failure] = (),
        seen: Callable[[], None] | None = None,
    ) -> None:
        self.setting = setting
        self.block = trace.block
        self.now = 0.0
        self.prefills = [self._prefill(number) for number in range(setting.prefills)]
        self.decodes = [Decode(n, setting) for n in range(setting.decodes)]
        self.jobs = [Job(request) for request in trace.requests]
        self._policy = policy
        self._seen = seen or (lambda: None)
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._number = 0
        for failure in failures:
            self._at(failure.at, self._fail, failure)

    def run(self) -> list[Job]:
        """Play it to the end. Every job comes back served or refused."""
        for job in self.jobs:
            self._play_until(job.request.at)
            self.now = job.request.at
            self._place(job)
            self._seen()
        self._play_until(float("inf"))
        return self.jobs

    def _prefill(self, number: int) -> Prefill:
        tiers, block = self.setting.tiers, self.block
        store = Store(tiers.host_tokens // block, tiers.nvme_tokens // block) if tiers else None
        return Prefill(number, Cache(self.setting.cache_tokens // block), store)

    def _work(self, node: Prefill, job: Job) -> Work:
        source = self.prefills[job.source] if job.source >= 0 else None
        return work(self.setting, self.block, node, source if source and not source.down else None, job, self.now)

    def _at(self, when: float, what: Callable[..., None], *args: Any) -> None:
        self._number += 1
        heapq.heappush(self._events, (when, self._number, what, args))

    def _play_until(self, when: float) -> None:
        while self._events and self._events[0][0] <= when:
            self.now, _, what, args = heapq.heappop(self._events)
            what(*args)

    def _place(self, job: Job) -> None:
        job.attempts += 1
        placement = self._policy.place(self, job) if job.attempts <= MOST_ATTEMPTS else None
        if placement is None:
            job.refused = True
            return
        node = self.prefills[placement.prefill]
        job.decode, job.source, job.upto = placement.decode, placement.source, placement.upto
        if job.decode >= 0:
            self.decodes[job.decode].coming += 1
        job.work_s = self._work(node, job).seconds
        node.queue.append(job)
        node.waiting_s += job.work_s
        if node.running is None:
            self._start(node)
        self._policy.changed(self, node.number)

    def _start(self, node: Prefill) -> None:
        job = node.running = node.queue.popleft()
        node.waiting_s -= job.work_s
        job.started = self.now
        begun = self._work(node, job)
        job.cached, job.loaded, job.disk = begun.cached, begun.loaded, begun.disk
        occupy(self.setting, node, begun, self.now)
        if begun.source:
            self._read(begun.source, job.request.keys[: job.cached // self.block])
            if self.setting.tiers:
                self._at(self.now + begun.load_s, self._policy.loaded, self, node.number, begun)
        node.busy_until = self.now + begun.seconds
        self._at(node.busy_until, self._computed, node, node.lives)

    def _computed(self, node: Prefill, life: int) -> None:
        if node.lives != life or node.running is None:
            return
        job, node.running = node.running, None
        if job.first_token < 0:
            job.first_token = self.now
        self._use(node, job.request.keys)
        if job.decode < 0:
            job.done = self.now
        else:
            missing = transfer_s(self.setting, job.prompt)
            self._at(self.now + HANDOVER_S + missing, self._handed_over, job, self.decodes[job.decode])
        if node.queue:
            self._start(node)
        self._policy.changed(self, node.number)

    def _use(self, node: Prefill, keys: Sequence[bytes]) -> None:
        """The device has `keys` now; what it computed is written behind, what it evicts is demoted."""
        stored, removed = node.cache.use(keys)
        if stored or removed:
            self._policy.stored(node.number, stored, removed)
        if node.store:
            self._changed(node, node.store.hold(keys) + node.store.demote(removed))

    def _read(self, node: Prefill, keys: Sequence[bytes]) -> None:
        """Somebody reads `keys` there."""
        if node.store:
            self._changed(node, node.store.hold(keys))
        else:
            self._use(node, keys)

    def _changed(self, node: Prefill, changes: Sequence[Change]) -> None:
        for tier, stored, removed in changes:
            self._policy.stored(node.number, stored, removed, tier)

    def _handed_over(self, job: Job, node: Decode) -> None:
        if node.down:
            self._give_up(job, node)
            return
        node.coming -= 1
        node.join(job, self.now)
        self._watch(node)

    def _watch(self, node: Decode) -> None:
        end = node.next_end()
        if end is not None:
            self._at(max(end, self.now), self._streamed, node, node.version)

    def _streamed(self, node: Decode, version: int) -> None:
        if node.version != version:
            return
        for job in node.ended(self.now):
            job.done = self.now
        self._watch(node)

    def _give_up(self, job: Job, node: Decode) -> None:
        node.coming -= 1
        self._place(job)

    def _fail(self, failure: Failure) -> None:
        if failure.kind == "decode":
            decode = self.decodes[failure.number]
            for job in decode.die(self.now):
                self._place(job)
            self._at(self.now + failure.down_s, self._back, decode)
            return
        node = self.prefills[failure.number]
        lost = [node.running, *node.queue] if node.running else list(node.queue)
        node.queue.clear()
        node.running, node.waiting_s, node.busy_until, node.down = None, 0.0, 0.0, True
        node.lives += 1
        self._policy.stored(node.number, (), node.cache.clear())
        if node.store:
            self._changed(node, node.store.die())
        self._policy.changed(self, node.number)
        for job in lost:
            if job.decode >= 0:
                self.decodes[job.decode].coming -= 1
            self._place(job)
        self._at(self.now + failure.down_s, self._back, node)

    def _back(self, node: Prefill | Decode) -> None:
        node.down = False
        if isinstance(node, Prefill):
            if node.store:
                self._changed(node, node.store.held())
            self._policy.changed(self, node.number)
