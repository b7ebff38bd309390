"""Responses that are kept to be fetched and gone on with: in this process, bounded, and gone with it.

No more than `count` of them and `size` bytes, none longer than `keep_s` after it was last changed; the oldest goes
first. Those that still run stay. Conversations share what they have in common: a turn holds its own items and refers to
those before it, which therefore outlive the response that they came with. Bytes that are shared count once.
"""

from __future__ import annotations

import threading
import time
from collections import Counter as Counts
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
from prometheus_client import Counter, Gauge

from baton.errors import BatonError, Reason
from services.frontend.responses.run import Run

MAX_RESPONSES = 4096
MAX_BYTES = 128 << 20
KEEP_S = 24 * 3600.0
OVERHEAD = 64
"""Bytes that holding a part takes besides the part's own."""


@dataclass(frozen=True)
class Kept:
    """One response. The parts are JSON: `response` is the object that is told, `items` and `output` are members of
    lists, without brackets. `earlier`: the same of the turns before. `run`: of a response in the background. `tenant`:
    whose it is; for anybody else it is not there."""

    id: str
    status: str
    response: bytes
    items: bytes
    output: bytes
    earlier: tuple[bytes, ...] = ()
    run: Run | None = None
    tenant: str = ""

    @property
    def running(self) -> bool:
        """Whether it has not ended."""
        return self.status in ("queued", "in_progress")

    @property
    def input(self) -> bytes:
        """The items that the response was made of, as a JSON list."""
        return listed((*self.earlier, self.items))

    @property
    def conversation(self) -> tuple[bytes, ...]:
        """What the next turn has before it."""
        return tuple(part for part in (*self.earlier, self.items, self.output) if part)

    @property
    def parts(self) -> tuple[bytes, ...]:
        """Everything that takes memory. Of a run that has not ended the events are not known: `Log` bounds them."""
        events = (self.run.log.sealed,) if self.run is not None and not self.running else ()
        return (self.response, self.items, self.output, *self.earlier, *events)


class ResponseStore:
    """See the module. Thread-safe."""

    def __init__(
        self,
        evicted: Counter,
        held: Gauge,
        *,
        count: int = MAX_RESPONSES,
        size: int = MAX_BYTES,
        keep_s: float = KEEP_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`evicted` counts by why; `held` shows the bytes."""
        self._evicted, self._held = evicted, held
        self._count, self._size, self._keep_s, self._clock = count, size, keep_s, clock
        self._kept: OrderedDict[str, tuple[Kept, float]] = OrderedDict()
        self._holders: Counts[int] = Counts()
        """Of each part, by its identity: how often it is held."""
        self.bytes = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._kept)

    def put(self, kept: Kept) -> None:
        """Keep it, in the place of what has its id. What is too large by itself is evicted at once."""
        with self._lock:
            self._drop(kept.id)
            self._kept[kept.id] = (kept, self._clock())
            self.bytes += OVERHEAD * len(kept.parts)
            for part in kept.parts:
                if not self._holders[id(part)]:
                    self.bytes += len(part)
                self._holders[id(part)] += 1
            self._evict()

    def get(self, id: str, tenant: str) -> Kept:
        """The tenant's response. Raises BatonError(NOT_FOUND)."""
        with self._lock:
            self._evict()
            found = self._kept.get(id)
        if found is None or found[0].tenant != tenant:
            raise BatonError(Reason.NOT_FOUND, f"Response with id '{id[:80]}' not found.")
        return found[0]

    def delete(self, id: str) -> None:
        """Forget it, if it is there."""
        with self._lock:
            self._drop(id)
            self._held.set(self.bytes)

    def check_integrity(self) -> list[str]:
        """What does not add up; empty when all does."""
        with self._lock:
            parts = {id(part): len(part) for kept, _ in self._kept.values() for part in kept.parts}
            holders = Counts(id(part) for kept, _ in self._kept.values() for part in kept.parts)
            held = sum(parts.values()) + OVERHEAD * holders.total()
        found = [] if held == self.bytes else [f"{self.bytes} bytes counted, {held} held"]
        return found + ([] if holders == +self._holders else ["the holders of parts are counted wrong"])

    def _evict(self) -> None:
        """Let the oldest go that have ended, until everything is within its bounds."""
        now = self._clock()
        while (victim := self._victim(now)) is not None:
            id, why = victim
            self._drop(id)
            self._evicted.labels(why).inc()
        self._held.set(self.bytes)

    def _victim(self, now: float) -> tuple[str, str] | None:
        """Who has to go next, and why."""
        for id, (kept, at) in self._kept.items():
            if now - at > self._keep_s:
                why = "age"
            elif len(self._kept) > self._count:
                why = "count"
            elif self.bytes > self._size:
                why = "bytes"
            else:
                return None
            if not kept.running:
                return id, why
        return None

    def _drop(self, id_: str) -> None:
        found = self._kept.pop(id_, None)
        if found is None:
            return
        self.bytes -= OVERHEAD * len(found[0].parts)
        for part in found[0].parts:
            self._holders[id(part)] -= 1
            if not self._holders[id(part)]:
                del self._holders[id(part)]
                self.bytes -= len(part)


class _Identified(msgspec.Struct):
    id: str


_raws = msgspec.json.Decoder(list[msgspec.Raw]).decode
_id = msgspec.json.Decoder(_Identified).decode


def with_ids(items: bytes) -> list[tuple[str, msgspec.Raw]]:
    """The items of a JSON list, each behind its id."""
    return [(_id(item).id, item) for item in _raws(items)]


def listed(parts: tuple[bytes, ...]) -> bytes:
    """Parts of a conversation as one JSON list."""
    return b"[" + b",".join(part for part in parts if part) + b"]"
