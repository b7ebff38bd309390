"""Session streams: silence and stuck engines are losses, a moved worker is followed, a draining one is left alone."""

from __future__ import annotations

import asyncio

import pytest

from baton.model.card import Model
from baton.v1 import registry_pb2, worker_pb2
from services.frontend import sessions as module
from tests.unit.frontend.peers import HANG_S, Attempt, ScriptedWorker, running, until
from tests.unit.frontend.test_failures import TEXT, ids_of, says, stream_text

pytestmark = pytest.mark.timeout(60)


async def test_a_silent_worker_is_lost_and_its_stream_goes_on_elsewhere(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "HEARTBEAT_TIMEOUT_S", 0.6)

    async def falls_silent(attempt: Attempt) -> None:
        await attempt.tokens(ids_of(model)[:3], offset=0)
        attempt.worker.heartbeat = None

    first, second = ScriptedWorker("a", falls_silent), ScriptedWorker("b", says(model))
    async with running(model, first, second) as stack:
        text, story = await stream_text(stack)
    assert (text, story["worker"]) == (TEXT, "b")
    assert stack.count("sessions_lost", worker="a") >= 1


async def test_an_engine_stuck_in_a_step_is_dead_and_a_long_step_is_not(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "STEP_STALLED_S", 3.0)

    async def sticks(attempt: Attempt) -> None:
        await attempt.tokens(ids_of(model)[:3], offset=0)
        beat = worker_pb2.Heartbeat(time=105.0, step_started=100.0, step_predicted_s=2.0)
        attempt.worker.heartbeat = beat
        await asyncio.sleep(0.6)
        assert stack.connected(first)
        attempt.worker.heartbeat = worker_pb2.Heartbeat(time=150.0, step_started=100.0, step_predicted_s=2.0)

    first, second = ScriptedWorker("a", sticks), ScriptedWorker("b", says(model))
    async with running(model, first, second) as stack:
        text, story = await stream_text(stack)
        assert not first.background.failures
    assert (text, story["worker"]) == (TEXT, "b")


async def test_a_worker_that_moved_is_followed_and_a_stale_plan_does_not_disturb(model: Model) -> None:
    first = ScriptedWorker("same", says(model))
    second = ScriptedWorker("same", says(model))
    async with running(model, first) as stack:
        await second.start()
        try:
            stack.announce(second)
            await until(lambda: stack.connected(second) and not first.sessions)
            # The router still knows the old address, where a worker still answers.
            assert (await stream_text(stack))[0] == TEXT
            assert first.attempts
            session = stack.sessions.live()["same"]
            assert session.connected
            assert session.address == second.address
            stack.router.workers = [second]
            assert (await stream_text(stack))[0] == TEXT
            assert second.attempts
        finally:
            await second.stop()


async def test_only_streaming_workers_of_the_model_get_a_session(model: Model) -> None:
    prefill = ScriptedWorker("p", says(model), role=registry_pb2.ROLE_PREFILL)
    decode = ScriptedWorker("d", says(model), role=registry_pb2.ROLE_DECODE)
    async with running(model, decode) as stack:
        await prefill.start()
        try:
            stack.announce(prefill)
            other = decode.registration("another-model")
            other.id = "other"
            stack.sessions._changed("other", other)
            assert set(stack.sessions.live()) == {"d"}
        finally:
            await prefill.stop()


async def test_a_draining_worker_is_no_place_of_last_resort(model: Model) -> None:
    first, second = ScriptedWorker("a", says(model)), ScriptedWorker("b", says(model))
    first.heartbeat = worker_pb2.Heartbeat(time=1.0, draining=True)
    async with running(model, first, second) as stack:
        await until(lambda: stack.sessions.live()["a"].draining)
        await stack.router.stop()
        for _ in range(5):
            assert (await stream_text(stack))[1]["worker"] == "b"
        await second.stop()
        async with asyncio.timeout(HANG_S):
            await until(lambda: not stack.connected(second))
        assert [m.part for m in stack.readiness.missing()] == ["worker"]
