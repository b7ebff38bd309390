"""The machines that compute prompts: one at a time, in order, beside a cache that forgets what was used longest ago."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

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


@dataclass(eq=False, slots=True)
class Job:
    """A request on its way. `source` is the node to load a longer prefix from, -1 for none."""

    request: Request
    decode: int = -1
    source: int = -1
    emitted: int = 0
    work_s: float = 0.0
    started: float = -1.0
    first_token: float = -1.0
    done: float = -1.0
    attempts: int = 0
    refused: bool = False
    cached: int = 0
    loaded: int = 0

    @property
    def prompt(self) -> int:
        """Tokens to be there before the next one can be drawn."""
        return self.request.prompt + self.emitted


class Cache:
    """Blocks by key, least recently used first; of one prompt the last block goes first."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._keys: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._keys)

    def prefix(self, keys: Sequence[bytes]) -> int:
        """How many of `keys` are here, from the first on."""
        return next((place for place, key in enumerate(keys) if key not in self._keys), len(keys))

    def use(self, keys: Sequence[bytes]) -> tuple[list[bytes], list[bytes]]:
        """Hold `keys` from now on. Returns what is new and what had to go."""
        stored = [key for key in keys if key not in self._keys]
        for key in reversed(keys):
            self._keys[key] = None
            self._keys.move_to_end(key)
        removed = []
        while len(self._keys) > self._capacity:
            removed.append(self._keys.popitem(last=False)[0])
        return stored, removed

    def clear(self) -> list[bytes]:
        """The machine died. Returns what was here."""
        held = list(self._keys)
        self._keys.clear()
        return held


@dataclass(eq=False)
class Prefill:
    """One node. `busy_until` is when its running job ends, `waiting_s` the work of those that wait."""

    number: int
    cache: Cache
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
