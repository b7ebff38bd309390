"""Places: who gets one, who gives one up, and that none is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from baton.errors import Reason
from services.frontend.batches.idle import ARRIVING_S, PAUSE_S, Seen
from services.frontend.batches.lane import LEAVE_S, LONG_S, Lane, Place
from services.frontend.batches.metrics import BatchMetrics
from services.frontend.turn import Asking

GPU = Seen("a", "host/gpu:0", streams=2, interactive=0, quiet_s=1e9, yields=True)
OTHER = replace(GPU, id="b", shares="host/gpu:1", streams=3)
DEAF = replace(GPU, yields=False)


class World:
    """Workers as a test says they are, and a lane over them."""

    def __init__(self, *seen: Seen) -> None:
        self.seen: Sequence[Seen] = seen
        self.paused: list[str] = []
        self.told = asyncio.Event()
        self.arriving = False
        metrics = BatchMetrics(CollectorRegistry())
        self.lane = Lane(lambda _: self.seen, lambda: self.arriving, self.pause, metrics)
        self.gave_way: list[Place] = []
        self.begun: list[Place] = []

    def pause(self, worker: str, seconds: float) -> None:
        assert seconds == (ARRIVING_S if self.arriving else PAUSE_S)
        self.paused.append(worker)
        self.told.set()

    async def ask(self, outputs: int = 1, needs: Sequence[str] = (), tokens: int = 10) -> Place:
        """A request that waits for its place."""
        place = self.lane.turn(outputs)
        place.bind(Asking(lambda: self.gave_way.append(place), lambda: place in self.begun, needs, lambda: tokens))
        self.wait(place)
        await asyncio.sleep(0)
        return place

    def wait(self, place: Place) -> asyncio.Task[object]:
        task: asyncio.Task[object] = asyncio.ensure_future(place.wait())
        self.tasks = [*getattr(self, "tasks", []), task]
        return task

    def close(self) -> None:
        for task in getattr(self, "tasks", []):
            task.cancel()


async def test_places_go_to_who_asked_first_where_there_is_most_room() -> None:
    world = World(GPU, OTHER)
    places = [await world.ask() for _ in range(7)]
    world.lane.tick()
    assert [place.worker for place in places if place.placed] == ["b", "a", "b", "a", "b"]
    assert await places[0].wait() == {"a"}, "the others, to be left out"
    places[1].leave()
    world.lane.tick()
    assert places[5].worker == "a"
    assert not places[6].placed
    assert world.lane.lines == 4 + 2 * 5
    world.close()


async def test_the_youngest_gives_its_place_up_and_comes_again() -> None:
    world = World(DEAF)
    first, second = await world.ask(), await world.ask()
    world.lane.tick()
    world.seen = [replace(DEAF, others=1)]
    world.lane.tick()
    assert world.gave_way == [second]
    assert first.placed
    assert not second.placed
    again = world.wait(second)
    await asyncio.sleep(0)
    world.lane.tick()
    assert not again.done()
    world.seen = [DEAF]
    world.lane.tick()
    await asyncio.wait_for(again, 10)
    world.close()


async def test_what_runs_pauses_beside_others_and_keeps_its_place() -> None:
    shared = [replace(GPU, id=id, shares="host/") for id in ("a", "b")]
    world = World(*shared)
    world.seen = busy = [replace(shared[0], interactive=1), shared[1]]
    world.lane.tick()
    assert world.paused == [], "nothing of the lane is anywhere"
    world.seen = shared
    places = [await world.ask() for _ in range(4)]
    world.lane.tick()
    world.begun = [places[0]]
    world.seen = busy
    for _ in range(3):
        world.lane.tick()
    assert world.paused == ["b"], "told once, for a while"
    world.lane._paused["b"] -= PAUSE_S * 0.51
    world.lane.tick()
    assert world.paused == ["b", "b"], "and again before it is over"
    world.seen = shared
    world.lane.tick()
    world.arriving = True
    world.lane.tick()
    assert sorted(world.paused) == ["a", "b", "b"], "the one pauses for longer than that already"
    assert all(place.placed for place in places)
    assert world.gave_way == []
    world.close()


async def test_prompts_that_wait_for_long_leave_one_by_one() -> None:
    shared = [replace(GPU, id=id, shares="host/") for id in ("a", "b")]
    world = World(*shared)
    places = [await world.ask() for _ in range(4)]
    world.lane.tick()
    world.begun = places[:1]
    world.seen = [replace(shared[0], interactive=1), shared[1]]
    world.lane.tick()
    world.lane._no_prompts["a"] -= LONG_S
    world.lane.tick()
    assert world.gave_way == [place for place in places[1:] if place.worker == "a"], "on the other it is not long yet"
    world.lane._no_prompts["b"] -= LONG_S
    for left in (1, 2, 3, 3):
        world.lane.tick()
        assert len(world.gave_way) == left, "not two so soon"
        world.lane._left_at -= LEAVE_S
    assert sorted(world.gave_way, key=places.index) == places[1:]
    assert places[0].placed, "it generates"
    world.seen = shared
    world.lane.tick()
    assert world.lane._no_prompts == {}
    world.close()


async def test_what_runs_stops_where_the_engine_does_not_yield() -> None:
    shared = [replace(DEAF, id=id, shares="host/") for id in ("a", "b")]
    world = World(*shared)
    places = [await world.ask() for _ in range(4)]
    world.lane.tick()
    world.begun = [places[0], places[1]]
    world.seen = [replace(shared[0], interactive=1), shared[1]]
    world.lane.tick()
    assert world.gave_way == places[::-1]
    assert world.paused == []
    world.close()


async def test_one_that_is_larger_than_all_places_runs_alone() -> None:
    world = World(GPU)
    large, small = await world.ask(outputs=9), await world.ask()
    world.lane.tick()
    world.lane.tick()
    assert large.placed
    assert not small.placed
    world.seen = [replace(GPU, others=2)]
    world.lane.tick()
    assert world.gave_way == [large]
    world.close()


async def test_one_goes_where_there_is_room_for_its_tokens() -> None:
    world = World(replace(GPU, max_context=100), replace(OTHER, max_context=50))
    places = [await world.ask(tokens=tokens) for tokens in (99, 99, 99, 49, 100)]
    world.lane.tick()
    assert [place.worker for place in places] == ["a", "a", "", "b", ""]
    assert [place.placed for place in places] == [True, True, False, True, True], "of the last the router knows more"
    world.close()


async def test_a_need_is_looked_at_and_one_that_nobody_has_is_the_routers_to_refuse() -> None:
    world = World(replace(GPU, lacks=frozenset({"x"})), OTHER)
    some, none = await world.ask(needs=["x"]), await world.ask(needs=["y"])
    world.seen = [replace(worker, lacks=worker.lacks | {"y"}) for worker in world.seen]
    world.lane.tick()
    assert some.worker == "b"
    assert none.placed
    assert await none.wait() == ()
    world.close()


async def test_a_refusal_waits_a_while_and_a_lost_worker_frees_its_places() -> None:
    world = World(GPU)
    place = await world.ask()
    world.lane.tick()
    await place.refused(Reason.NO_CAPACITY)
    assert not place.placed
    again = world.wait(place)
    await asyncio.sleep(0)
    world.lane.tick()
    assert not again.done(), "too soon"
    place.not_before = 0.0
    world.lane.tick()
    await asyncio.wait_for(again, 10)
    world.seen = []
    world.lane.tick()
    assert not place.placed
    assert world.gave_way == [], "its attempt is known to be lost already"
    world.close()


async def test_the_loop_runs_while_there_is_something_to_do() -> None:
    world = World(GPU)
    running = asyncio.ensure_future(world.lane.run())
    place = world.lane.turn(1)
    assert await asyncio.wait_for(place.wait(), 10) == set()
    place.leave()
    place.leave()
    waiting = asyncio.ensure_future(world.lane.turn(1).wait())
    await asyncio.wait_for(waiting, 10)
    running.cancel()


async def test_a_request_of_others_is_looked_at_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.frontend.batches.lane.TICK_S", 1e6)
    world = World(replace(GPU, shares="host/"), replace(GPU, id="b", shares="host/"))
    running = asyncio.ensure_future(world.lane.run())
    await asyncio.wait_for(world.lane.turn(1).wait(), 10)
    world.arriving = True
    world.lane.hurry()
    await asyncio.wait_for(world.told.wait(), 10)
    assert world.paused
    running.cancel()


@settings(max_examples=50)
@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["ask", "leave", "cancel", "load", "tick"]), st.integers(0, 5)), max_size=40
    )
)
def test_whatever_happens_places_add_up(steps: list[tuple[str, int]]) -> None:
    async def play() -> None:
        world = World(GPU, OTHER)
        places: list[Place] = []
        for what, n in steps:
            if what == "ask":
                places.append(await world.ask(outputs=n % 3 + 1))
            elif what == "leave" and places:
                places.pop(n % len(places)).leave()
            elif what == "cancel" and getattr(world, "tasks", []):
                world.tasks[n % len(world.tasks)].cancel()
                await asyncio.sleep(0)
            elif what == "load":
                world.seen = [replace(GPU, interactive=n % 3), replace(OTHER, interactive=n)]
            world.lane.tick()
            await asyncio.sleep(0)
            for worker in world.seen:
                there = [place for place in world.lane._placed if place.worker == worker.id]
                left = worker.streams - (0 if worker.yields else worker.interactive)
                assert sum(place.outputs for place in there) <= left or (left and len(there) == 1)
            assert not set(world.lane._placed) & set(world.lane._waiting)
        for place in places:
            place.leave()
        world.close()
        assert not [place for place in world.lane._placed if place in places]

    asyncio.run(play())
