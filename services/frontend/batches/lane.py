"""The batch lane of this frontend: who of its requests has a place, on which worker, and who has to give it up.

`idle.py` says how many places there are; this keeps the line of those that wait and the list of those that run. It
looks each `TICK_S` while there is anything of the lane, and at once when a request comes in here; those of other
frontends are known with the next heartbeat.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress

from baton.errors import Reason
from services.frontend.batches.idle import Room, Seen, rooms
from services.frontend.batches.metrics import BatchMetrics
from services.frontend.turn import Asking

TICK_S = 0.02
LONG_S = 1.0
"""After so long those leave whose prompt cannot be computed for now..."""
LEAVE_S = 0.1
"""...one at a time, so far apart: each costs others an abort."""
BACKOFF_S = (0.1, 2.0)
ANYWHERE = ""
"""The place of a request that no worker could run: the router says so."""
MOST_LINES = 1024
NOBODY = Asking(lambda: None, lambda: False, (), lambda: 0)


class Lane:
    """Places for requests. `look` tells of every worker, given the lane's own outputs by worker; `arriving` whether a
    request of others is on its way to one; `pause` tells a worker to compute nothing of the lane for some seconds."""

    def __init__(
        self,
        look: Callable[[dict[str, int]], Sequence[Seen]],
        arriving: Callable[[], bool],
        pause: Callable[[str, float], None],
        metrics: BatchMetrics,
    ) -> None:
        self._look = look
        self._arriving = arriving
        self._pause = pause
        self._paused: dict[str, float] = {}
        """Until when workers pause, by `time.monotonic()`."""
        self._no_prompts: dict[str, float] = {}
        """Since when there are no prompts to be computed on workers."""
        self._left_at = 0.0
        """When one left for that."""
        self._came = asyncio.Event()
        self._metrics = metrics
        self._waiting: dict[Place, None] = {}
        """Who asked first comes first."""
        self._placed: dict[Place, None] = {}
        """In the order in which they got their places."""
        self._workers: set[str] = set()
        self._some = asyncio.Event()
        self._places = 0

    @property
    def lines(self) -> int:
        """How many requests it is worth to have ready: as many as may run, and some that wait."""
        return min(MOST_LINES, 4 + 2 * self._places)

    def turn(self, outputs: int) -> Place:
        """The turn of a request with so many outputs."""
        return Place(self, outputs)

    async def run(self) -> None:
        """Give places and take them away, for ever."""
        while True:
            await self._some.wait()
            self.tick()
            if not self._waiting and not self._placed:
                self._some.clear()
            self._came.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._came.wait(), TICK_S)

    def hurry(self) -> None:
        """A request of others has come in."""
        self._came.set()

    def tick(self) -> None:
        """Look, and act on it."""
        seen = self._look(self.used())
        room = rooms(seen, self._arriving())
        self._workers = {worker.id for worker in seen if worker.streams}
        self._places = sum(one.start for one in room.values())
        now = time.monotonic()
        self._no_prompts = {id: self._no_prompts.get(id, now) for id, one in room.items() if not one.prompts}
        self._take_away(room, now)
        if self._placed:
            self._pause_those({id: one.pause_s for id, one in room.items() if one.pause_s}, now)
        self._give(seen, room)
        self._metrics.running.set(sum(place.outputs for place in self._placed))
        self._metrics.waiting.set(len(self._waiting))

    def used(self) -> dict[str, int]:
        """Outputs that run, by worker."""
        used: dict[str, int] = {}
        for place in self._placed:
            used[place.worker] = used.get(place.worker, 0) + place.outputs
        return used

    def others(self, worker: str) -> Collection[str]:
        """The workers that are not this one."""
        return () if worker == ANYWHERE else self._workers - {worker}

    def _take_away(self, room: dict[str, Room], now: float) -> None:
        used = self.used()
        may_leave = now - self._left_at >= LEAVE_S
        stuck = {id for id, since in self._no_prompts.items() if may_leave and now - since >= LONG_S}
        for place in reversed(list(self._placed)):
            left = room.get(place.worker)
            if left is None:
                # Its worker leaves, or is lost: what becomes of the attempt there is known already or will be told.
                if place.worker != ANYWHERE:
                    self.give_back(place)
                continue
            # One may be larger than all the places that there are.
            fits = used[place.worker] <= left.keep or (left.keep and used[place.worker] == place.outputs)
            if fits and (place.worker not in stuck or place.asking.begun()):
                continue
            if fits:
                stuck, self._left_at = set(), now
            used[place.worker] -= place.outputs
            self._metrics.gave_way.inc()
            self.give_back(place)
            place.asking.give_way()

    def _pause_those(self, seconds: dict[str, float], now: float) -> None:
        self._paused = {id: until for id, until in self._paused.items() if until > now}
        for id, pause_s in seconds.items():
            if self._paused.get(id, 0.0) < now + pause_s / 2:
                self._paused[id] = now + pause_s
                self._pause(id, pause_s)

    def _give(self, seen: Sequence[Seen], room: dict[str, Room]) -> None:
        used = self.used()
        streaming = [worker for worker in seen if worker.streams]
        now = time.monotonic()
        for place in list(self._waiting):
            if place.not_before > now:
                continue
            able = [worker.id for worker in streaming if worker.can(place.asking.needs, place.asking.tokens())]
            if streaming and not able:
                self._put(place, ANYWHERE)
                continue
            free = {id: room[id].start - used.get(id, 0) for id in able if room[id].start > used.get(id, 0)}
            # One with more outputs than any worker has places for has one to itself.
            fits = [id for id in free if place.outputs <= free[id] or not used.get(id)]
            if fits:
                self._put(place, max(fits, key=lambda id: free[id]))
                used[place.worker] = used.get(place.worker, 0) + place.outputs
            elif free:
                break  # there will be more room soon, unless those behind it take what there is

    def _put(self, place: Place, worker: str) -> None:
        del self._waiting[place]
        self._placed[place] = None
        place.put(worker)

    def ask(self, place: Place) -> None:
        """Into the line."""
        self._waiting[place] = None
        self._some.set()

    def give_back(self, place: Place) -> None:
        """Out of the line, or off its worker. Idempotent."""
        self._waiting.pop(place, None)
        self._placed.pop(place, None)
        place.taken()


class Place:
    """One request's turn (`services.frontend.turn.Turn`)."""

    def __init__(self, lane: Lane, outputs: int) -> None:
        self.outputs = outputs
        self.asking = NOBODY
        self.worker = ANYWHERE
        self.not_before = 0.0
        """`time.monotonic()`."""
        self._lane = lane
        self._has = asyncio.Event()
        self._asks = False
        self._backoff = BACKOFF_S[0]

    @property
    def placed(self) -> bool:
        """Whether it has its place."""
        return self._has.is_set()

    def bind(self, asking: Asking) -> None:
        """See `Turn.bind`."""
        self.asking = asking

    async def wait(self) -> Collection[str]:
        """See `Turn.wait`."""
        if not self.placed and not self._asks:
            self._asks = True
            self._lane.ask(self)
        try:
            await self._has.wait()
        except asyncio.CancelledError:
            self._lane.give_back(self)
            raise
        return self._lane.others(self.worker)

    async def refused(self, reason: Reason) -> None:
        """See `Turn.refused`."""
        self._lane._metrics.retries.labels(reason.name).inc()
        self._lane.give_back(self)
        self.not_before = time.monotonic() + self._backoff * random.uniform(0.5, 1.0)
        self._backoff = min(BACKOFF_S[1], self._backoff * 2)

    def put(self, worker: str) -> None:
        """From the lane: here it may run."""
        self.worker, self._asks = worker, False
        self._has.set()

    def taken(self) -> None:
        """From the lane: it has no place any more."""
        self._asks = False
        self._has.clear()

    def leave(self) -> None:
        """See `Turn.leave`."""
        self._lane.give_back(self)
