"""Session streams: one frame a step, heartbeats, the bound, the end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from prometheus_client import CollectorRegistry

from baton.errors import BatonError, Reason
from baton.v1 import worker_pb2 as pb
from baton.worker import sessions as module
from baton.worker.metrics import WorkerMetrics
from baton.worker.sessions import Session, Sessions

HANG_S = 20.0


class Frontend:
    """Reads frames of one session; `pause` stops reading, as a stopped process would."""

    def __init__(self, sessions: Sessions, id: str = "s1") -> None:
        self.frames: list[pb.Frame] = []
        self.reading = asyncio.Event()
        self.reading.set()
        self.news = asyncio.Event()
        self.task = asyncio.create_task(sessions.serve(id, "frontend-1", self.write))

    async def write(self, frame: pb.Frame) -> None:
        await self.reading.wait()
        self.frames.append(frame)
        self.news.set()

    async def until(self, n: int) -> None:
        async with asyncio.timeout(HANG_S):
            while len(self.frames) < n:
                self.news.clear()
                await self.news.wait()

    @property
    def events(self) -> list[pb.Event]:
        return [e for f in self.frames for e in f.events]


@pytest.fixture
async def ended() -> list[str]:
    return []


@pytest.fixture
async def sessions(ended: list[str]) -> AsyncIterator[Sessions]:
    hub = Sessions(7, WorkerMetrics(CollectorRegistry()), pb.Heartbeat, lambda s: ended.append(s.id))
    yield hub
    assert not hub.findings()
    assert not len(hub)


async def stop(frontend: Frontend) -> None:
    frontend.task.cancel()
    await asyncio.gather(frontend.task, return_exceptions=True)


async def test_first_frame_says_open_and_a_step_is_one_frame(sessions: Sessions, ended: list[str]) -> None:
    frontend = Frontend(sessions)
    await frontend.until(1)
    assert frontend.frames[0].HasField("heartbeat")
    assert frontend.frames[0].epoch == 7
    session = sessions.get("s1")
    for i in range(64):
        session.push(pb.Event(uid=f"r{i}"))
    await frontend.until(2)
    assert [e.uid for e in frontend.frames[1].events] == [f"r{i}" for i in range(64)]
    assert not frontend.frames[1].HasField("heartbeat")
    assert [f.seq for f in frontend.frames] == [1, 2]
    await stop(frontend)
    assert ended == ["s1"]
    with pytest.raises(BatonError) as lost:
        sessions.get("s1")
    assert lost.value.reason is Reason.SESSION_LOST


async def test_heartbeats_come_while_nothing_else_does(sessions: Sessions) -> None:
    frontend = Frontend(sessions)
    beat = asyncio.create_task(sessions.beat())
    await frontend.until(3)
    assert all(f.HasField("heartbeat") and not f.events for f in frontend.frames)
    beat.cancel()
    await stop(frontend)


async def test_a_frontend_that_does_not_read_is_cut_off(
    sessions: Sessions, ended: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_PENDING", 10)
    frontend = Frontend(sessions)
    await frontend.until(1)
    frontend.reading.clear()
    session = sessions.get("s1")
    session.push(pb.Event(uid="taken by the writer"))
    await asyncio.sleep(0)
    for i in range(12):
        session.push(pb.Event(uid=f"r{i}"))
        await asyncio.sleep(0)
    assert session.overflowed
    assert session.pending == 0
    assert ended == ["s1"]  # its requests are aborted at once, before the stream has ended
    with pytest.raises(BatonError):
        sessions.get("s1")
    frontend.reading.set()
    with pytest.raises(BatonError) as slow:
        await asyncio.wait_for(frontend.task, HANG_S)
    assert slow.value.reason is Reason.SLOW_CLIENT


async def test_ending_sends_what_is_pending_first(sessions: Sessions) -> None:
    frontend = Frontend(sessions)
    await frontend.until(1)
    sessions.get("s1").push(pb.Event(uid="last words"))
    await sessions.end_all(HANG_S)
    assert [e.uid for e in frontend.events] == ["last words"]
    await asyncio.wait_for(frontend.task, HANG_S)


async def test_ids_are_used_once_at_a_time(sessions: Sessions) -> None:
    frontend = Frontend(sessions)
    await frontend.until(1)
    with pytest.raises(BatonError) as taken:
        await sessions.serve("s1", "frontend-2", frontend.write)
    assert taken.value.reason is Reason.INVALID_REQUEST
    assert sessions.get("s1").frontend == "frontend-1"
    await stop(frontend)


async def test_push_after_the_end_is_dropped() -> None:
    session = Session("s", "f")
    session.end()
    session.push(pb.Event(uid="late"))
    assert session.pending == 0


@pytest.mark.parametrize("field", ["", "running", "waiting", "step_started"])
async def test_without_work_every_second_heartbeat_is_left_out(monkeypatch: pytest.MonkeyPatch, field: str) -> None:
    monkeypatch.setattr(module, "HEARTBEAT_S", 0.02)
    asked = 0

    def state() -> pb.Heartbeat:
        nonlocal asked
        asked += 1
        return pb.Heartbeat(**{field: 1} if field else {})

    hub = Sessions(7, WorkerMetrics(CollectorRegistry()), state, lambda _: None)
    frontend = Frontend(hub)
    await frontend.until(1)
    before = asked
    beating = asyncio.create_task(hub.beat())
    await frontend.until(9)
    rounds = asked - before - 8  # the others went into frames
    assert rounds in ((8, 9) if field else (16, 17))
    beating.cancel()
    await stop(frontend)
