"""The machines that compute prompts: one at a time, in order, beside a cache and, with tiers, a store."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from bench.sim.cache import Cache
from bench.sim.tiers import Store, Tiers
from bench.sim.trace import Request


@dataclass(frozen=True)
class Setting:
    """The fleet. Rates of a node in tokens, bytes, seconds; `cache_tokens` is each node's own."""

    prefills: int = 8
    decodes: int = 0
    """0: streams are not simulated, only first tokens."""
    prefill_tok_s: float = 6000.0
    cache_tokens: int = 3_000_000
    kv_bytes: int = 327_680
    """Of one token: 80 layers x 8 KV heads x 128 x 2 (K, V) x 2 bytes, a 70B model."""
    link_bytes_s: float = 20e9
    """What a node sends, one request at a time: a 200 Gb/s port at 80 %."""
    max_streams: int = 128
    step_s: float = 0.02
    step_stream_s: float = 0.0003
    """A step of n streams takes `step_s + n * step_stream_s`."""
    tiers: Tiers | None = None
    """None: one cache is both, a hit in place and what the others read. Else `cache_tokens` is the device's."""


@dataclass(eq=False, slots=True)
class Job:
    """A request on its way. `source` and `upto` are its placement's; of `cached` tokens `loaded` were, of them
    `disk` from a disk."""

    request: Request
    decode: int = -1
    source: int = -1
    upto: int | None = None
    emitted: int = 0
    work_s: float = 0.0
    started: float = -1.0
    first_token: float = -1.0
    done: float = -1.0
    attempts: int = 0
    refused: bool = False
    cached: int = 0
    loaded: int = 0
    disk: int = 0

    @property
    def prompt(self) -> int:
        """Tokens to be there before the next one can be drawn."""
        return self.request.prompt + self.emitted


@dataclass(eq=False)
class Prefill:
    """One node. `busy_until` is when its running job ends, `waiting_s` the work of those that wait; `store` is there
    with tiers only."""

    number: int
    cache: Cache
    store: Store | None = None
    queue: deque[Job] = field(default_factory=deque)
    running: Job | None = None
    busy_until: float = 0.0
    waiting_s: float = 0.0
    link_free: float = 0.0
    down: bool = False
    lives: int = 0

    def backlog(self, now: float) -> float:
        """Seconds until a job that comes now would start."""
        return max(0.0, self.busy_until - now) + self.waiting_s

    def prefix(self, keys: Sequence[bytes]) -> int:
        """How many of `keys` the node holds somewhere, from the first on."""
        on_device = self.cache.prefix(keys)
        return max(on_device, len(self.store.run(keys))) if self.store else on_device
