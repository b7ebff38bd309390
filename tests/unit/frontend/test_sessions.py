"""Session streams: silence and stuck engines are losses, a moved worker is followed, a draining one is left alone."""

from __future__ import annotations

import asyncio
import time

import openai
import pytest

from baton.model.card import Model
from baton.v1 import registry_pb2, worker_pb2
from services.frontend import session as module
from tests.faults.proxy import proxy
from tests.unit.frontend.peers import HANG_S, Attempt, ScriptedWorker, running, until
from tests.unit.frontend.test_failures import TEXT, ids_of, says, stream_text

pytestmark = pytest.mark.timeout(60)


async def test_a_silent_worker_is_lost_and_its_stream_goes_on_elsewhere(model: Model) -> None:
    async def falls_silent(attempt: Attempt) -> None:
        await attempt.tokens(ids_of(model)[:3], offset=0)
        attempt.worker.heartbeat = None

    first, second = ScriptedWorker("a", falls_silent), ScriptedWorker("b", says(model))
    async with running(model, first, second) as stack:
        text, story = await stream_text(stack)
        resumed = stack.metrics.registry.get_sample_value
        assert resumed("baton_frontend_resume_seconds_sum", {"part": "detect"}) > 0.9
        assert resumed("baton_frontend_resume_seconds_count", {"part": "token"}) == 1
    assert (text, story["worker"]) == (TEXT, "b")
    assert stack.count("sessions_lost", worker="a", why="silent") >= 1


async def test_an_engine_stuck_in_a_step_is_dead_and_a_long_step_is_not(model: Model) -> None:
    """By the worker's own clock, and by what it predicts of the step."""

    async def sticks(attempt: Attempt) -> None:
        await attempt.tokens(ids_of(model)[:3], offset=0)
        attempt.worker.heartbeat = worker_pb2.Heartbeat(time=105.0, step_started=100.0, step_predicted_s=2.0)
        await asyncio.sleep(0.6)
        assert stack.connected(first)
        attempt.worker.heartbeat = worker_pb2.Heartbeat(time=150.0, step_started=100.0, step_predicted_s=2.0)

    first, second = ScriptedWorker("a", sticks), ScriptedWorker("b", says(model))
    async with running(model, first, second) as stack:
        text, story = await stream_text(stack)
        assert not first.background.failures
        await until(lambda: not stack.connected(first))
        first.heartbeat = worker_pb2.Heartbeat(time=151.0)
        await until(lambda: stack.connected(first))
    assert (text, story["worker"]) == (TEXT, "b")
    assert stack.count("sessions_lost", worker="a", why="stuck") >= 1


async def test_a_frontend_that_was_late_itself_reads_what_has_come_before_it_judges(model: Model) -> None:
    """A loop that stood still for longer than a worker may be silent loses no session."""
    worker = ScriptedWorker("a", says(model))
    async with running(model, worker) as stack:
        for _ in range(3):
            time.sleep(1.5)  # noqa: ASYNC251 - the loop stands still: that is the case
            await asyncio.sleep(0.3)
        assert (await stream_text(stack))[0] == TEXT
    assert stack.count("sessions_lost", worker="a", why="silent") == 0


async def test_another_process_behind_the_same_stream_is_a_loss(model: Model) -> None:
    async def is_replaced(attempt: Attempt) -> None:
        await attempt.tokens(ids_of(model)[:3], offset=0)
        attempt.worker.epoch += 1
        await attempt.tokens(ids_of(model)[3:5], offset=3)

    first, second = ScriptedWorker("a", is_replaced), ScriptedWorker("b", says(model))
    async with running(model, first, second) as stack:
        text, story = await stream_text(stack)
    assert (text, story["worker"]) == (TEXT, "b")
    assert list(second.attempts[0].message.emitted_ids) == ids_of(model)[:3]
    assert stack.count("sessions_lost", worker="a", why="restarted") == 1


async def test_a_submit_that_is_not_answered_ends_with_the_session(model: Model) -> None:
    """Not with its own, longer, deadline."""
    asked = asyncio.Event()

    async def never(attempt: Attempt) -> None:
        raise AssertionError("not run")

    class Deaf(ScriptedWorker):
        async def Submit(self, request: worker_pb2.SubmitRequest, context: object) -> worker_pb2.SubmitReply:
            asked.set()
            await asyncio.sleep(HANG_S)
            raise AssertionError("not reached")

    first, second = Deaf("a", never), ScriptedWorker("b", says(model))
    async with running(model, first, second) as stack:
        reading = asyncio.create_task(stream_text(stack))
        await asked.wait()
        began = time.monotonic()
        first.cut()
        text, story = await reading
        assert time.monotonic() - began < module.SUBMIT_TIMEOUT_S
    assert (text, story["worker"]) == (TEXT, "b")


async def test_a_worker_whose_session_is_down_is_not_waited_for(model: Model) -> None:
    """The router still proposes it: the request goes elsewhere, and nobody pays for the way there."""
    first, second = ScriptedWorker("a", says(model)), ScriptedWorker("b", says(model))
    async with running(model, first, second) as stack:
        await first.stop()
        await until(lambda: not stack.connected(first))
        began = time.monotonic()
        text, story = await stream_text(stack)
        assert time.monotonic() - began < module.OPEN_TIMEOUT_S
        assert (text, story["worker"]) == (TEXT, "b")
        assert [list(request.exclude) for request in stack.router.requests] == [[], ["a"]]


async def test_the_only_worker_may_be_away_for_a_moment(model: Model) -> None:
    """A request that has no token yet waits for it too, for a while."""
    worker = ScriptedWorker("only", says(model))
    async with running(model, worker) as stack:
        worker.cut()
        assert (await stream_text(stack))[0] == TEXT
        await worker.stop()
        await until(lambda: not stack.connected(worker))
        reading = asyncio.create_task(stream_text(stack))
        await asyncio.sleep(0.3)
        await worker.start()
        assert (await reading)[0] == TEXT
        await worker.stop()
        await until(lambda: not stack.connected(worker))
        with pytest.raises(openai.InternalServerError) as caught:
            await stream_text(stack)
        assert caught.value.code == "decode_unavailable"


async def test_a_connection_that_died_in_silence_is_not_tried_again(model: Model) -> None:
    """Sooner than gRPC finds out about it: the only worker is reached by another before a request gives up."""
    async with proxy() as line:

        class Behind(ScriptedWorker):
            async def start(self) -> None:
                await super().start()
                line.there, self.address = self.address, line.address

        async with running(model, Behind("only", says(model))) as stack:
            line.mute()
            text, story = await stream_text(stack)
        assert (text, story["worker"]) == (TEXT, "only")
        assert stack.count("sessions_lost", worker="only", why="silent") == 1


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


async def test_who_is_at_the_address_of_a_dead_worker_does_not_answer_for_it(model: Model) -> None:
    dead, heir = ScriptedWorker("dead", says(model)), ScriptedWorker("heir", says(model))
    async with running(model, dead) as stack:
        assert await stack.sessions.answers(dead.registration(model.name))
        await dead.stop()
        heir._port = dead._port
        await heir.start()
        try:
            session = stack.sessions.live()["dead"]
            session.retry()
            await until(lambda: session.connected and session.epoch == heir.epoch)
            assert not await stack.sessions.answers(dead.registration(model.name))
        finally:
            await heir.stop()


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
