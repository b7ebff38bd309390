"""The clock: arrivals, prompts that end, hand-overs, streams that end, machines that die and come back.

A prompt waits its turn on its node, loads what the plan names from another node's cache when that still has it,
computes the rest, and hands over; its first token is there when the last of it is computed. A dead node's requests are
placed anew with what they have emitted.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from bench.sim.decode import Decode
from bench.sim.fleet import Cache, Job, Prefill, Setting
from bench.sim.trace import Trace

HANDOVER_S = 0.005
MOST_ATTEMPTS = 5


@dataclass(frozen=True)
class Placement:
    """Where a job goes: node numbers. `source` is the node to load a longer prefix from, -1 for none."""

    prefill: int
    decode: int = -1
    source: int = -1


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

    def stored(self, node: int, stored: Sequence[bytes], removed: Sequence[bytes]) -> None:
        """The node's cache has changed."""

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
        self.prefills = [Prefill(n, Cache(setting.cache_tokens // trace.block)) for n in range(setting.prefills)]
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

    def work(self, node: Prefill, job: Job) -> tuple[int, int, float]:
        """(cached tokens, of these loaded, seconds) if `node` started `job` now."""
        most = job.prompt - 1
        own = min(most, node.cache.prefix(job.request.keys) * self.block)
        there = own
        if job.source >= 0 and not self.prefills[job.source].down:
            there = min(most, self.prefills[job.source].cache.prefix(job.request.keys) * self.block)
        loaded = max(0, there - own)
        seconds = (job.prompt - own - loaded) / self.setting.prefill_tok_s
        if loaded:
            link = self.prefills[job.source]
            seconds += max(0.0, link.link_free - self.now) + self.transfer_s(loaded)
        return own + loaded, loaded, seconds

    def transfer_s(self, tokens: int) -> float:
        """Seconds to move the KV of so many tokens."""
        return tokens * self.setting.kv_bytes / self.setting.link_bytes_s

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
        job.decode, job.source = placement.decode, placement.source
        if job.decode >= 0:
            self.decodes[job.decode].coming += 1
        job.work_s = self.work(node, job)[2]
        node.queue.append(job)
        node.waiting_s += job.work_s
        if node.running is None:
            self._start(node)
        self._policy.changed(self, node.number)

    def _start(self, node: Prefill) -> None:
        job = node.running = node.queue.popleft()
        node.waiting_s -= job.work_s
        job.started = self.now
        job.cached, job.loaded, seconds = self.work(node, job)
        if job.loaded:
            source = self.prefills[job.source]
            source.link_free = max(source.link_free, self.now) + self.transfer_s(job.loaded)
            self._use(source, job.request.keys[: job.cached // self.block])
        node.busy_until = self.now + seconds
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
            missing = self.transfer_s(job.prompt)
            self._at(self.now + HANDOVER_S + missing, self._handed_over, job, self.decodes[job.decode])
        if node.queue:
            self._start(node)
        self._policy.changed(self, node.number)

    def _use(self, node: Prefill, keys: Sequence[bytes]) -> None:
        stored, removed = node.cache.use(keys)
        if stored or removed:
            self._policy.stored(node.number, stored, removed)

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
        self._policy.changed(self, node.number)
        for job in lost:
            if job.decode >= 0:
                self.decodes[job.decode].coming -= 1
            self._place(job)
        self._at(self.now + failure.down_s, self._back, node)

    def _back(self, node: Prefill | Decode) -> None:
        node.down = False
        if isinstance(node, Prefill):
            self._policy.changed(self, node.number)
