"""Whatever workers say, in whatever order and however often: the client gets every token once, in order."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from baton.errors import BatonError, Reason
from baton.rpc.tasks import Background
from baton.v1 import registry_pb2, router_pb2, worker_pb2
from services.frontend.inbox import Inbox
from services.frontend.lately import AWAY_S
from services.frontend.metrics import FrontendMetrics
from services.frontend.prompt import Prompt, Prompts
from services.frontend.request import MAX_FAILURES, Backend, Broken, Generation, Item, Output, Work
from services.frontend.route import RouterClient
from services.frontend.session import Sink
from services.frontend.sessions import Sessions
from services.frontend.turn import Asking

LENGTH = 12


def true_token(choice: int, offset: int) -> int:
    return 100 * (choice + 1) + offset


@dataclass
class Submitted:
    """An attempt that a worker took, and where its events go."""

    sink: Sink
    message: worker_pb2.Attempt

    def tokens(self, choice: int, offset: int, count: int) -> worker_pb2.Event:
        end = min(LENGTH, offset + count)
        ids = [true_token(choice, i) for i in range(offset, end)]
        tokens = worker_pb2.Tokens(ids=ids)
        event = worker_pb2.Event(
            uid=self.message.uid, attempt=self.message.attempt, choice=choice, offset=offset, tokens=tokens
        )
        if end == LENGTH:
            event.finish = "length"
        return event


class Peers:
    """Session, sessions and router in one: takes every attempt but the first few of `refusals`."""

    worker = "w"
    connected = True

    def __init__(self, refusals: int) -> None:
        self.refusals = refusals
        self.nowhere: BatonError | None = None
        """What the router says instead of a plan."""
        self.submitted: list[Submitted] = []
        self.outcomes: list[router_pb2.Outcome] = []
        self.attached: set[tuple[str, int]] = set()

    async def route(self, request: router_pb2.RouteRequest, away_s: float = AWAY_S) -> worker_pb2.Plan:
        if self.nowhere is not None:
            raise self.nowhere
        return worker_pb2.Plan(mode=worker_pb2.MODE_MERGED, worker=worker_pb2.Target(id=f"w{request.attempt}"))

    def report(self, outcome: router_pb2.Outcome) -> None:
        self.outcomes.append(outcome)

    @property
    def alive_at(self) -> float:
        return time.monotonic()

    def to(self, target: worker_pb2.Target) -> Peers:
        return self

    async def submit(self, request: worker_pb2.SubmitRequest, sink: Sink, deadline: float) -> None:
        await asyncio.sleep(0)
        if self.refusals:
            self.refusals -= 1
            raise BatonError(Reason.NO_CAPACITY, "full")
        self.attached.add((request.attempt.uid, request.attempt.attempt))
        self.submitted.append(Submitted(sink, request.attempt))

    def detach(self, key: tuple[str, int]) -> None:
        self.attached.discard(key)

    async def abort(self, key: tuple[str, int]) -> None:
        pass

    def extended(self, prompt: Prompt, emitted: Sequence[int]) -> tuple[bytes, ...]:
        return ()

    def parted(self, prompt: Prompt) -> bool:
        return False


class Places:
    """A turn of the batch lane that has a place for whoever asks, until it is told to take it away."""

    placed = True

    def __init__(self) -> None:
        self.refusals = 0
        self.left = 0
        self.give_way: Callable[[], None] = lambda: None
        self.begun: Callable[[], bool] = lambda: False

    def bind(self, asking: Asking) -> None:
        self.give_way, self.begun = asking.give_way, asking.begun

    async def wait(self) -> Collection[str]:
        return ()

    async def refused(self, reason: Reason) -> None:
        self.refusals += 1

    def leave(self) -> None:
        self.left += 1


def make(peers: Peers, choices: int, turn: Places | None = None) -> tuple[Generation, Inbox[Item]]:
    inbox: Inbox[Item] = Inbox()
    backend = Backend(
        card=registry_pb2.ModelCard(model="m"),
        eos_ids=(2,),
        prompts=cast(Prompts, peers),
        router=cast(RouterClient, peers),
        sessions=cast(Sessions, peers),
        background=Background("test"),
        metrics=FrontendMetrics(CollectorRegistry()),
        fallback=worker_pb2.FALLBACK_AUTO,
        resume_patience_s=0.5,
    )
    sampling = worker_pb2.Sampling(max_tokens=LENGTH)
    work = Work("uid", Prompt((1, 2), (), ""), sampling, choices, time.time() + 60, turn=turn)
    return Generation(work, backend, inbox), inbox


_action = st.one_of(
    st.tuples(st.just("tokens"), st.integers(0, 9), st.integers(0, 2), st.integers(1, 4)),
    st.tuples(st.just("doubled"), st.integers(0, 9), st.integers(0, 2), st.integers(0, LENGTH)),
    st.tuples(st.just("gap"), st.integers(0, 9), st.integers(0, 2), st.integers(1, 3)),
    st.tuples(st.just("full"), st.integers(0, 9), st.integers(0, 2), st.integers(1, 4)),
    st.tuples(st.just("lost"), st.integers(0, 9), st.just(0), st.just(0)),
    st.tuples(st.just("handback"), st.integers(0, 9), st.just(0), st.just(0)),
    st.tuples(st.just("gives way"), st.just(0), st.just(0), st.just(0)),
    st.tuples(st.just("read"), st.just(0), st.just(0), st.just(0)),
)


class Reader:
    """The client's side: reads, mends, and checks each token's place."""

    def __init__(self, generation: Generation, inbox: Inbox[Item], choices: int) -> None:
        self.generation = generation
        self.inbox = inbox
        self.received: list[list[int]] = [[] for _ in range(choices)]
        self.finishes = [0] * choices

    async def read(self) -> None:
        if not self.inbox._items:
            return
        for item in await self.inbox.take(time.time() + 1):
            if isinstance(item, Broken):
                await self.generation.mend(item)
            else:
                assert isinstance(item, Output)
                self.take(item)

    def take(self, item: Output) -> None:
        self.received[item.choice].extend(item.ids)
        self.finishes[item.choice] += bool(item.finish)
        expected = [true_token(item.choice, i) for i in range(len(self.received[item.choice]))]
        assert self.received[item.choice] == expected


@given(st.integers(1, 3), st.lists(_action, max_size=40), st.integers(0, 2), st.booleans())
@settings(deadline=None, max_examples=300)
def test_every_token_comes_once_and_in_order(choices: int, actions: list[Any], refusals: int, lane: bool) -> None:
    asyncio.run(_run(choices, actions, refusals, Places() if lane else None))


async def _run(choices: int, actions: list[Any], refusals: int, turn: Places | None) -> None:
    peers = Peers(refusals)
    generation, inbox = make(peers, choices, turn)
    reader = Reader(generation, inbox, choices)
    # How far each attempt's worker has come with each choice: its own view, right or wrong.
    sent: dict[tuple[int, int], int] = {}
    failures = 0
    await generation.start()
    for kind, which, choice, amount in actions:
        attempt = peers.submitted[which % len(peers.submitted)]
        choice = attempt.message.choices[choice % len(attempt.message.choices)]
        at = sent.setdefault((attempt.message.attempt, choice), len(attempt.message.emitted_ids))
        if kind == "tokens" and at < LENGTH:
            attempt.sink.on_event(attempt.tokens(choice, at, amount))
            sent[attempt.message.attempt, choice] = min(LENGTH, at + amount)
        elif kind == "full" and at + amount < LENGTH:
            event = attempt.tokens(choice, at, amount)
            event.finish = "length"
            attempt.sink.on_event(event)
            sent[attempt.message.attempt, choice] = LENGTH
        elif kind == "doubled":
            attempt.sink.on_event(attempt.tokens(choice, min(amount, at), 2)) if min(amount, at) < at else None
        elif kind == "gap" and at + amount < LENGTH and failures < 5:
            failures += 1
            attempt.sink.on_event(attempt.tokens(choice, at + amount, 2))
        elif kind == "lost" and failures < 5:
            failures += 1
            attempt.sink.on_lost(BatonError(Reason.SESSION_LOST, "gone"))
        elif kind == "handback" and failures < 5:
            failures += 1
            event = worker_pb2.Event(uid="uid", attempt=attempt.message.attempt)
            event.handback.reason = "PREFILL_UNAVAILABLE"
            attempt.sink.on_event(event)
        elif kind == "gives way" and turn is not None:
            turn.give_way()
        elif kind == "read":
            await reader.read()
    # From here every live attempt does its work.
    for _ in range(20):
        await reader.read()
        for attempt in list(peers.submitted):
            for choice in attempt.message.choices:
                at = sent.get((attempt.message.attempt, choice), len(attempt.message.emitted_ids))
                if at < LENGTH:
                    attempt.sink.on_event(attempt.tokens(choice, at, LENGTH))
                    sent[attempt.message.attempt, choice] = LENGTH
        if generation.finished:
            break
    await reader.read()
    assert generation.finished
    assert reader.received == [[true_token(c, i) for i in range(LENGTH)] for c in range(choices)]
    assert reader.finishes == [1] * choices
    # Nothing is left behind: each attempt was detached and reported once, and numbers were never used twice.
    assert not peers.attached
    numbers = [attempt.message.attempt for attempt in peers.submitted]
    assert len(set(numbers)) == len(numbers)
    reported = [outcome.attempt for outcome in peers.outcomes]
    assert sorted(reported) == sorted(set(reported))
    assert set(numbers) <= set(reported)
    for attempt in peers.submitted:
        choice = attempt.message.choices[0]
        emitted = list(attempt.message.emitted_ids)
        assert emitted == [true_token(choice, i) for i in range(len(emitted))]
        assert not emitted or len(attempt.message.choices) == 1
        assert attempt.message.batch == (turn is not None)
    assert not generation._backend.placed.outputs()
    generation.close()
    assert turn is None or (turn.left, turn.refusals) == (1, refusals)


async def test_close_ends_everything_and_is_idempotent() -> None:
    peers = Peers(0)
    generation, inbox = make(peers, 2)
    await generation.start()
    generation.close(Reason.ABORTED)
    generation.close()
    peers.submitted[0].sink.on_event(peers.submitted[0].tokens(0, 0, 1))
    peers.submitted[0].sink.on_lost(BatonError(Reason.SESSION_LOST, "gone"))
    assert not inbox._items
    assert not peers.attached
    assert [outcome.reason for outcome in peers.outcomes] == ["ABORTED"]


async def test_a_context_that_ends_before_what_was_asked_for_is_left() -> None:
    peers = Peers(0)
    generation, inbox = make(peers, 1)
    reader = Reader(generation, inbox, 1)
    await generation.start()
    for at in (0, 3, 6, 9):
        event = peers.submitted[-1].tokens(0, at, 3)
        event.finish = "length"
        peers.submitted[-1].sink.on_event(event)
        await reader.read()
    assert [len(attempt.message.emitted_ids) for attempt in peers.submitted] == [0, 3, 6, 9]
    assert (len(reader.received[0]), reader.finishes, generation.finished) == (LENGTH, [1], True)
    assert generation._exclude == {"w0", "w1", "w2"}, "by their own count there might be room"
    generation.close()


async def test_a_context_without_room_for_a_token_is_told() -> None:
    peers = Peers(0)
    generation, inbox = make(peers, 1)
    await generation.start()
    event = worker_pb2.Event(uid="uid", attempt=0, choice=0, finish="length")
    peers.submitted[0].sink.on_event(event)
    (broken,) = await inbox.take(time.time() + 1)
    assert isinstance(broken, Broken)
    with pytest.raises(BatonError, match="ended at 0 output tokens") as caught:
        await generation.mend(broken)
    assert caught.value.reason is Reason.CONTEXT_LENGTH_EXCEEDED
    generation.close()


async def test_one_of_the_lane_is_never_failed_for_want_of_room() -> None:
    peers, turn = Peers(30), Places()
    generation, _ = make(peers, 1, turn)
    await generation.start()
    assert turn.refusals == 30
    assert not turn.begun()
    peers.submitted[0].sink.on_event(peers.submitted[0].tokens(0, 0, 1))
    assert turn.begun()
    assert not generation._backend.placed.outputs(), "it is nobody's load"
    generation.close()


async def test_one_of_the_lane_is_never_failed_by_an_engine_that_is_away() -> None:
    """Its worker takes attempts and fails them at once, until it knows."""
    peers, turn = Peers(0), Places()
    generation, inbox = make(peers, 1, turn)
    reader = Reader(generation, inbox, 1)
    await generation.start()
    for _ in range(3 * MAX_FAILURES):
        attempt = peers.submitted[-1]
        event = worker_pb2.Event(uid="uid", attempt=attempt.message.attempt)
        event.failure.reason = "DECODE_UNAVAILABLE"
        attempt.sink.on_event(event)
        await reader.read()
    assert turn.refusals == 3 * MAX_FAILURES
    generation.close()


async def test_one_of_the_lane_that_kills_its_worker_each_time_ends() -> None:
    peers = Peers(0)
    generation, inbox = make(peers, 1, Places())
    reader = Reader(generation, inbox, 1)
    await generation.start()
    for _ in range(MAX_FAILURES):
        peers.submitted[-1].sink.on_lost(BatonError(Reason.SESSION_LOST, "gone"))
        await reader.read()
    peers.submitted[-1].sink.on_lost(BatonError(Reason.SESSION_LOST, "gone"))
    with pytest.raises(BatonError, match="gone"):
        await reader.read()
    generation.close()


async def test_what_is_placed_is_known_until_it_ends() -> None:
    peers = Peers(0)
    generation, _ = make(peers, 2)
    await generation.start()
    assert generation._backend.placed.outputs() == {"w0": 2}
    generation.close()
    assert not generation._backend.placed.outputs()


async def test_failures_in_a_row_end_a_request() -> None:
    peers = Peers(100)
    generation, _ = make(peers, 1)
    try:
        await generation.start()
    except BatonError as error:
        assert error.reason is Reason.NO_CAPACITY  # noqa: PT017
    else:
        raise AssertionError("nobody took it")
    assert 2 <= len(peers.outcomes) <= 10


async def test_without_a_longer_context_it_ends_with_length() -> None:
    peers = Peers(0)
    generation, inbox = make(peers, 1)
    reader = Reader(generation, inbox, 1)
    await generation.start()
    event = peers.submitted[0].tokens(0, 0, 3)
    event.finish = "length"
    peers.nowhere = BatonError(Reason.DECODE_UNAVAILABLE, "w0 takes 5 tokens")
    peers.submitted[0].sink.on_event(event)
    await reader.read()
    await reader.read()
    assert (len(reader.received[0]), reader.finishes, generation.finished) == (3, [1], True)
    generation.close()
