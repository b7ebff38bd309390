"""What routers are told: load, and the prefix cache, as a snapshot and then its changes.

We keep the set of cached keys, so a new router (or one that fell behind) is sent `cleared` and everything, then
changes. Each stream numbers its cache events from 1 without a gap. Load goes out at once when a request is admitted
(its reservation at the router ends), when it changed, at most each `LOAD_S`, and in any case each `ALIVE_S`: a stream
that says nothing is one of a stopped process.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence

from baton.engine.port import CacheEvent, Engine
from baton.v1 import kv_pb2
from baton.v1 import worker_pb2 as pb
from baton.worker.metrics import WorkerMetrics

LOAD_S = 0.25
ALIVE_S = 0.5
"""A stream says something at least this often."""
COALESCE_S = 0.02
CHUNK = 2048
"""Keys in one message."""
MAX_BEHIND = 1024
"""Changes a router may be behind before it is sent a snapshot instead."""
TIER = "device"


class Watcher:
    """One router's stream, from the side that fills it."""

    def __init__(self) -> None:
        self.behind = True
        """A snapshot is due."""
        self.changes: list[CacheEvent] = []
        self.admitted: list[str] = []
        self.wake = asyncio.Event()
        self.wake.set()

    def change(self, event: CacheEvent) -> bool:
        """Queue a change; False when the stream fell behind and gets a snapshot instead."""
        if self.behind:
            return True
        self.behind = len(self.changes) >= MAX_BEHIND
        if self.behind:
            self.changes.clear()
        else:
            self.changes.append(event)
        return not self.behind


class Watchers:
    """The watch streams of this process."""

    def __init__(
        self, epoch: int, load: Callable[[], pb.Load], metrics: WorkerMetrics, check: Callable[[], None] = lambda: None
    ) -> None:
        """`check` raises BatonError when this worker is not to be counted on: its streams end with that."""
        self._epoch = epoch
        self._check = check
        self._load = load
        self._metrics = metrics
        self._keys: dict[bytes, None] = {}
        self._live: set[Watcher] = set()

    def __len__(self) -> int:
        return len(self._live)

    def admitted(self, uid: str) -> None:
        """A request was admitted: routers drop what they had reserved for it."""
        for watcher in self._live:
            watcher.admitted.append(uid)
            watcher.wake.set()

    def changed(self) -> None:
        """Load may have changed."""
        for watcher in self._live:
            watcher.wake.set()

    def apply(self, event: CacheEvent) -> None:
        """A change of the cache."""
        if event.cleared:
            self._keys.clear()
        for key in event.removed:
            self._keys.pop(key, None)
        self._keys.update(dict.fromkeys(event.stored))
        for watcher in self._live:
            if not watcher.change(event):
                self._metrics.watch_resets.inc()
            watcher.wake.set()

    async def follow(self, engine: Engine) -> None:
        """Apply the engine's changes for ever. One task of the process."""
        async for events in engine.cache_events():
            for event in events:
                self.apply(event)

    async def tick(self) -> None:
        """Look at the load each LOAD_S, for ever; wake the streams when it has changed, and each ALIVE_S.

        One task of the process.
        """
        before, same = None, 0
        while True:
            await asyncio.sleep(LOAD_S)
            now = self._load()
            before, same = now, same + 1 if now == before else 0
            if same % round(ALIVE_S / LOAD_S) == 0:
                self.changed()

    async def serve(self, write: Callable[[pb.WorkerUpdate], Awaitable[None]]) -> None:
        """Run one stream until it is cancelled. Raises BatonError: what `check` found."""
        watcher = Watcher()
        self._live.add(watcher)
        seq = 0
        told: pb.Load | None = None
        told_at = 0.0
        try:
            while True:
                await watcher.wake.wait()
                watcher.wake.clear()
                self._check()
                if watcher.behind:
                    watcher.behind = False
                    messages = _snapshot(list(self._keys))
                else:
                    messages = [m for change in watcher.changes for m in _change(change)]
                watcher.changes = []
                for message in messages:
                    seq += 1
                    message.seq = seq
                    await write(pb.WorkerUpdate(epoch=self._epoch, cache=message))
                load = self._load()
                now = time.monotonic()
                if load != told or watcher.admitted or now - told_at > ALIVE_S - LOAD_S / 2:
                    told, told_at = load, now
                    update = pb.WorkerUpdate(epoch=self._epoch, load=load)
                    update.load.alive_s = ALIVE_S
                    update.load.admitted.extend(watcher.admitted)
                    watcher.admitted = []
                    await write(update)
                await asyncio.sleep(COALESCE_S)
        finally:
            self._live.discard(watcher)


def _snapshot(keys: Sequence[bytes]) -> list[kv_pb2.CacheEvent]:
    return [kv_pb2.CacheEvent(cleared=True, tier=TIER), *_stored(keys)]


def _stored(keys: Sequence[bytes]) -> Iterator[kv_pb2.CacheEvent]:
    for start in range(0, len(keys), CHUNK):
        yield kv_pb2.CacheEvent(stored=keys[start : start + CHUNK], tier=TIER)


def _change(event: CacheEvent) -> Iterator[kv_pb2.CacheEvent]:
    """As messages that say one thing each, in the order in which `apply` takes them: cleared, removed, stored."""
    if event.cleared:
        yield kv_pb2.CacheEvent(cleared=True, tier=TIER)
    for start in range(0, len(event.removed), CHUNK):
        yield kv_pb2.CacheEvent(removed=event.removed[start : start + CHUNK], tier=TIER)
    yield from _stored(event.stored)
