"""`/v1/embeddings` over scripted workers: what is asked of whom, what is made of an answer, and without one."""

from __future__ import annotations

import asyncio
import base64
import math
import struct
import time
from typing import Any

import httpx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from baton.errors import BatonError, Reason
from baton.model.card import Model
from baton.rpc.errors import failure
from baton.v1 import registry_pb2, worker_pb2
from services.frontend.batches import lane as lane_module
from services.frontend.batches.idle import Seen
from services.frontend.batches.metrics import BatchMetrics
from services.frontend.embeddings import place
from services.frontend.embeddings.answer import unit
from services.frontend.embeddings.place import GROUP_INPUTS, GROUP_TOKENS, MAX_FAILURES, embed, grouped
from services.frontend.lately import AWAY_S
from tests.unit.frontend.peers import HANG_S, ScriptedWorker, Stack, running, until
from tests.unit.frontend.test_failures import says

pytestmark = pytest.mark.timeout(60)


def vector(ids: Any) -> bytes:
    """Three numbers that tell the input."""
    return struct.pack("<3f", len(ids), ids[0], 1.0)


async def embeds(request: worker_pb2.EmbedRequest) -> worker_pb2.EmbedReply:
    return worker_pb2.EmbedReply(vectors=[vector(one.ids) for one in request.inputs])


def embedder(model: Model, id: str = "a", **fields: Any) -> ScriptedWorker:
    worker = ScriptedWorker(id, says(model), **fields)
    worker.embed = embeds
    return worker


async def ask(stack: Stack, **fields: Any) -> httpx.Response:
    async with httpx.AsyncClient(trust_env=False) as client:
        return await client.post(f"{stack.url}/v1/embeddings", json={"model": stack.model.name, **fields})


async def test_many_inputs_go_in_groups_and_come_back_in_order(model: Model) -> None:
    async with running(model, embedder(model)) as stack:
        inputs = [[n % 900 + 1] * (n % 50 + 1) for n in range(300)]
        answer = (await ask(stack, input=inputs)).json()
        assert [one["index"] for one in answer["data"]] == list(range(300))
        for ids, one in zip(inputs, answer["data"], strict=True):
            length = math.sqrt(len(ids) ** 2 + ids[0] ** 2 + 1)
            assert one["embedding"] == pytest.approx([len(ids) / length, ids[0] / length, 1 / length], abs=1e-6)
        total = sum(map(len, inputs))
        assert answer["usage"] == {"prompt_tokens": total, "total_tokens": total}
        assert len(stack.workers[0].embeds) == len(grouped("u", inputs)) > 1
        assert all(list(one.needs) == ["embeddings"] for one in stack.router.requests)
        assert stack.frontend.gate.held == (0, 0)


async def test_base64_is_the_same_numbers(model: Model) -> None:
    async with running(model, embedder(model)) as stack:
        plain = (await ask(stack, input=[[5, 6]])).json()["data"][0]["embedding"]
        coded = (await ask(stack, input=[[5, 6]], encoding_format="base64")).json()["data"][0]["embedding"]
        assert list(struct.unpack("<3f", base64.b64decode(coded))) == pytest.approx(plain, abs=1e-7)
        short = (await ask(stack, input=[[5, 6]], dimensions=2)).json()["data"][0]["embedding"]
        assert math.hypot(*short) == pytest.approx(1.0, abs=1e-6)
        assert short[0] / short[1] == pytest.approx(plain[0] / plain[1])


async def test_a_worker_that_fails_is_left_for_another(model: Model) -> None:
    gone, full, good = embedder(model, "gone"), embedder(model, "full"), embedder(model, "good")
    gone.embed = None

    async def refuse(_: worker_pb2.EmbedRequest) -> worker_pb2.EmbedReply:
        return worker_pb2.EmbedReply(failure=failure(BatonError(Reason.NO_CAPACITY, "full")))

    full.embed = refuse
    async with running(model, gone, full, good) as stack:
        answer = await ask(stack, input="hi")
        assert answer.status_code == 200, answer.text
        assert [len(one.embeds) for one in (gone, full, good)] == [1, 1, 1]
        await until(lambda: any("gone" in one.failed_workers for one in stack.router.outcomes))


async def test_of_a_pair_it_is_the_prefill_workers_work(model: Model) -> None:
    prefill = embedder(model, "p", role=registry_pb2.ROLE_PREFILL)
    await prefill.start()
    decode = ScriptedWorker("d", says(model), registry_pb2.ROLE_DECODE)
    try:
        async with running(model, decode) as stack:
            plan = worker_pb2.Plan(
                mode=worker_pb2.MODE_DISAGGREGATED,
                worker=worker_pb2.Target(id="d", address=decode.address),
                prefill=worker_pb2.Target(id="p", address=prefill.address),
            )
            stack.router._plan = lambda *_: plan  # type: ignore[method-assign]
            assert (await ask(stack, input="hi")).status_code == 200
            assert (len(prefill.embeds), len(decode.embeds)) == (1, 0)
    finally:
        await prefill.stop()


async def test_what_cannot_be_is_told_in_words(model: Model) -> None:
    worker = embedder(model)
    worker.lacks = ["embeddings"]
    async with running(model, worker) as stack:
        stack.router.refusal = BatonError(Reason.INVALID_REQUEST, "LACKS: a cannot do embeddings")
        answer = await ask(stack, input="hi")
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "model")
        assert "cannot do embeddings" in answer.json()["error"]["message"]
        stack.router.refusal = BatonError(Reason.DEADLINE_EXCEEDED, "late")
        assert (await ask(stack, input="hi")).status_code == 504
        stack.router.refusal = None

        async def nonsense(request: worker_pb2.EmbedRequest) -> worker_pb2.EmbedReply:
            return worker_pb2.EmbedReply(vectors=[struct.pack("<2f", math.nan, 1.0)] * len(request.inputs))

        stack.workers[0].embed = nonsense
        assert (await ask(stack, input="hi")).status_code == 500
        assert stack.frontend.gate.held == (0, 0)


async def test_a_client_that_leaves_ends_the_call(model: Model) -> None:
    begun, ended = asyncio.Event(), asyncio.Event()

    async def slow(_: worker_pb2.EmbedRequest) -> worker_pb2.EmbedReply:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        raise AssertionError

    worker = embedder(model)
    worker.embed = slow
    async with running(model, worker) as stack:
        asking = asyncio.create_task(ask(stack, input="hi"))
        await begun.wait()
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await ended.wait()
        await until(lambda: stack.frontend.gate.held == (0, 0))


def replies(reason: Reason) -> worker_pb2.EmbedReply:
    return worker_pb2.EmbedReply(failure=failure(BatonError(reason, "not now")))


async def test_who_was_away_for_a_moment_makes_them(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """However often it said so: what is refused has not failed."""
    monkeypatch.setattr(place, "_RETRY_S", (0.005, 0.01))
    monkeypatch.setattr(place, "PATIENCE_S", HANG_S)
    worker = embedder(model)

    async def away(request: worker_pb2.EmbedRequest) -> worker_pb2.EmbedReply:
        return replies(Reason.DECODE_UNAVAILABLE) if len(worker.embeds) < MAX_FAILURES + 3 else await embeds(request)

    worker.embed = away
    async with running(model, worker) as stack:
        assert (await ask(stack, input="hi")).status_code == 200


async def test_who_is_lost_in_a_long_call_is_waited_for_as_at_its_start(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(place, "PATIENCE_S", 0.3)
    worker = embedder(model)

    async def lost_once(request: worker_pb2.EmbedRequest) -> worker_pb2.EmbedReply:
        if len(worker.embeds) > 1:
            return await embeds(request)
        await asyncio.sleep(0.5)
        raise RuntimeError("the process is gone")

    worker.embed = lost_once
    async with running(model, worker) as stack:
        assert (await ask(stack, input="hi")).status_code == 200


class InLane:
    """A lane over workers as a test says they are, and what it makes of an input."""

    def __init__(self, *seen: Seen) -> None:
        self.seen = {one.id: one for one in seen}
        look = lambda _: list(self.seen.values())  # noqa: E731
        self.lane = lane_module.Lane(look, lambda: False, lambda *_: None, BatchMetrics(CollectorRegistry()))

    async def __aenter__(self) -> InLane:
        self._running = asyncio.create_task(self.lane.run())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._running.cancel()
        await asyncio.gather(self._running, return_exceptions=True)
        assert self.lane.used() == {}

    async def make(self, stack: Stack) -> list[bytes]:
        return await embed(stack.frontend.backend, "u", [[7, 8]], 100, time.time() + 60, self.lane.turn)


@pytest.fixture
def short_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lane_module, "BACKOFF_S", (0.001, 0.002))


IDLE, BUSY = Seen("a", "cpu/a", 4, 0, 1e9), Seen("a", "cpu/a", 4, 1, 0.0)


@pytest.mark.usefixtures("short_backoff")
async def test_in_the_lane_it_gives_way_and_comes_again(model: Model) -> None:
    worker, other = embedder(model), embedder(model, "b")
    stopped = asyncio.Event()

    async def slow(_: worker_pb2.EmbedRequest) -> worker_pb2.EmbedReply:
        try:
            await asyncio.Event().wait()
        finally:
            stopped.set()
        raise AssertionError

    worker.embed = slow
    no_place = Seen("b", "cpu/b", 4, 4, 0.0)
    async with running(model, other, worker) as stack, InLane(IDLE, no_place) as world:
        making = asyncio.create_task(world.make(stack))
        await until(lambda: len(worker.embeds) == 1)
        world.seen["a"] = BUSY
        await stopped.wait()
        await until(lambda: not world.lane.used())
        worker.embed = embeds
        await asyncio.sleep(3 * lane_module.TICK_S)
        assert len(worker.embeds) == 1, "it waits for its turn"
        world.seen["a"] = IDLE
        assert await making == [vector([7, 8])]
        assert other.embeds == []
        assert all(one.batch for one in worker.embeds)
        assert not stack.router.outcomes, "nobody failed"


@pytest.mark.usefixtures("short_backoff")
@pytest.mark.parametrize("reason", [Reason.NO_CAPACITY, Reason.DRAINING, Reason.DECODE_UNAVAILABLE])
async def test_in_the_lane_a_refusal_is_no_failure(model: Model, reason: Reason) -> None:
    worker = embedder(model)

    async def refuse_often(request: worker_pb2.EmbedRequest) -> worker_pb2.EmbedReply:
        return replies(reason) if len(worker.embeds) < 2 * MAX_FAILURES else await embeds(request)

    worker.embed = refuse_often
    async with running(model, worker) as stack, InLane(IDLE) as world:
        assert await world.make(stack) == [vector([7, 8])]
        assert not stack.router.outcomes, "nobody failed"


@pytest.mark.usefixtures("short_backoff")
@pytest.mark.parametrize("away_s", [1.0, 2 * AWAY_S])
async def test_in_the_lane_it_waits_for_the_only_one_who_can(model: Model, away_s: float) -> None:
    """For longer than a client would: until it is back."""
    able, other = embedder(model), embedder(model, "other")
    other.lacks = ["embeddings"]
    async with running(model, able, other) as stack, InLane(Seen("o", "cpu/o", 4, 0, 1e9)) as world:
        world.seen["o"] = Seen("o", "cpu/o", 4, 0, 1e9, lacks=frozenset({"embeddings"}))
        stack.worker_view.change("a", None)
        now = time.monotonic() + away_s
        stack.client.lately._clock = lambda: now
        stack.router.refusal = BatonError(Reason.INVALID_REQUEST, "LACKS: other cannot do embeddings")
        making = asyncio.create_task(world.make(stack))
        await until(lambda: making.done() or len(stack.router.requests) > 3 * MAX_FAILURES)
        assert not making.done()
        stack.router.refusal = None
        world.seen["a"] = IDLE
        assert await making == [vector([7, 8])]


@pytest.mark.usefixtures("short_backoff")
async def test_in_the_lane_what_kills_who_makes_it_ends(model: Model) -> None:
    worker = embedder(model)
    worker.embed = None
    async with running(model, worker) as stack, InLane(IDLE) as world:
        with pytest.raises(BatonError) as caught:
            await world.make(stack)
        assert caught.value.reason is Reason.SESSION_LOST
        assert len(worker.embeds) == MAX_FAILURES


@given(st.lists(st.integers(1, 3000), max_size=200))
def test_groups_keep_order_and_bounds(lengths: list[int]) -> None:
    inputs = [[n] * length for n, length in enumerate(lengths)]
    groups = grouped("u", inputs)
    assert [one for group in groups for one in group.inputs] == inputs
    assert len({group.uid for group in groups}) == len(groups)
    for group in groups:
        assert 1 <= len(group.inputs) <= GROUP_INPUTS
        assert group.tokens <= GROUP_TOKENS or len(group.inputs) == 1


@given(st.lists(st.floats(-1e3, 1e3, width=32), min_size=4, max_size=40), st.integers(0, 4))
def test_vectors_are_of_length_one(values: list[float], dimensions: int) -> None:
    made = unit(np.array(values, "<f4").tobytes(), dimensions)
    kept = np.array(values[: dimensions or None], np.float64)
    assert len(made) == len(kept)
    if kept.any():
        assert np.linalg.norm(made.astype(np.float64)) == pytest.approx(1.0, abs=1e-6)
        assert made == pytest.approx(kept / np.linalg.norm(kept), abs=1e-6)
    else:
        assert not made.any()
