"""The fleet as the router sees it: streams, gaps, restarts, quarantine, drains and cards."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable

import pytest

from baton.cli.ports import free_port
from baton.rpc.tasks import Background
from baton.v1 import registry_pb2
from services.router.costs import Parameters
from services.router.index import PrefixIndex
from services.router.quarantine import Quarantine
from services.router.rates import PrefillShare, Rates
from services.router.reservations import Held, Reservations
from services.router.speculation import Speculation
from services.router.workers import Workers, card_differences
from tests.unit.router.scripted_worker import registration, scripted

HANG_S = 30.0
PREFILL, DECODE, MERGED = registry_pb2.ROLE_PREFILL, registry_pb2.ROLE_DECODE, registry_pb2.ROLE_MERGED
KEYS = [bytes([n]) * 16 for n in range(6)]


class Fleet:
    """Workers with everything they keep up to date."""

    def __init__(self) -> None:
        self.background = Background("test")
        self.index, self.reservations, self.rates = PrefixIndex(1000), Reservations(), Rates()
        self.speculation = Speculation(self.index)
        self.quarantine = Quarantine(first_s=0.02, most_s=0.2, random_=random.Random(1))
        self.workers = Workers(
            self.background,
            self.index,
            self.reservations,
            self.rates,
            PrefillShare(),
            self.quarantine,
            self.speculation,
            Parameters(),
        )

    def state(self, id: str) -> str:
        return self.workers.state(self.workers.get(id))

    async def until(self, wanted: Callable[[], bool]) -> None:
        async with asyncio.timeout(HANG_S):
            while not wanted():  # noqa: ASYNC110 - what is waited for happens in many places
                await asyncio.sleep(0.005)

    async def close(self) -> None:
        self.workers.close()
        await self.background.close()
        assert self.background.failures == 0


@pytest.fixture
async def fleet() -> AsyncIterator[Fleet]:
    found = Fleet()
    yield found
    assert found.index.check_integrity() == []
    assert found.reservations.check_integrity() == []
    await found.close()
    assert list(found.workers.all()) == []
    assert len(found.index) == 0


async def test_a_registered_worker_is_usable_at_once_and_serving_when_watched(fleet: Fleet) -> None:
    async with scripted("p", PREFILL) as worker:
        fleet.workers.registered("p", worker.describes)
        assert fleet.state("p") == "degraded"
        assert fleet.workers.snapshot(fleet.workers.get("p"), 0.0).unusable == ""
        await fleet.until(lambda: fleet.state("p") == "serving")
        worker.say(worker.load(running=2, waiting=1, queued_prefill_tokens=70, blocks_total=90, blocks_free=40,
                               prefill_tok_s=800, decode_step_s=0.02))  # fmt: skip
        await fleet.until(lambda: fleet.workers.get("p").load.running == 2)
        fleet.reservations.take("u", 0, {"p": Held(prefill_tokens=30, streams=1, blocks=5)}, 0.0)
        known = fleet.workers.get("p")
        state = fleet.workers.snapshot(known, known.reported_at)
        assert (state.streams, state.queued_tokens) == (4, 100)
        assert (state.blocks_total, state.blocks_free) == (90, 35)
        assert state.prefill_tok_s == 800
        assert state.step_s + state.stream_s == pytest.approx(0.02), "with the two streams that it runs"


async def test_admitted_requests_end_their_reservation(fleet: Fleet) -> None:
    async with scripted("p", PREFILL) as worker:
        fleet.workers.registered("p", worker.describes)
        fleet.reservations.take("u", 3, {"p": Held(prefill_tokens=30), "d": Held(streams=1)}, 0.0)
        worker.say(worker.load(queued_prefill_tokens=30, admitted=["u", "stranger"]))
        await fleet.until(lambda: fleet.reservations.on("p") == Held())
        assert fleet.reservations.on("d").streams == 1
        fleet.reservations.end("u", 3)


async def test_a_gap_drops_the_entries_and_subscribes_again(fleet: Fleet) -> None:
    async with scripted("p", PREFILL) as worker:
        fleet.workers.registered("p", worker.describes)
        worker.say(worker.cache(2, stored=KEYS[:3]))
        await fleet.until(lambda: fleet.index.held_by("p") == 3)
        worker.say(worker.cache(4, stored=KEYS[3:]))
        await fleet.until(lambda: worker.watches == 2 and fleet.state("p") == "serving")
        assert fleet.index.held_by("p") == 0
        assert fleet.quarantine.why("p") == "", "a gap is no failure"
        assert fleet.index.gaps == 1


async def test_a_stream_that_says_less_than_it_promised_means_out(fleet: Fleet) -> None:
    """A stopped process keeps its connections: only its silence tells."""
    async with scripted("p", PREFILL) as worker:
        fleet.workers.registered("p", worker.describes)
        worker.say(worker.load(alive_s=0.1))
        await fleet.until(lambda: fleet.quarantine.why("p") == "is silent")
        await fleet.until(lambda: worker.watches == 2 and fleet.state("p") == "serving")


async def test_a_stream_that_promised_nothing_may_say_nothing(fleet: Fleet) -> None:
    async with scripted("p", PREFILL) as worker:
        fleet.workers.registered("p", worker.describes)
        worker.say(worker.load(running=1))
        await asyncio.sleep(0.5)
        assert fleet.state("p") == "serving"
        assert worker.watches == 1


async def test_a_stream_that_ends_means_out_and_the_next_one_in(fleet: Fleet) -> None:
    async with scripted("p", PREFILL) as worker:
        fleet.workers.registered("p", worker.describes)
        worker.say(worker.cache(2, stored=KEYS))
        await fleet.until(lambda: fleet.index.held_by("p") == len(KEYS))
        worker.say(None)
        await fleet.until(lambda: fleet.state("p") == "quarantined")
        assert fleet.index.held_by("p") == 0
        assert fleet.workers.snapshot(fleet.workers.get("p"), 0.0).unusable.startswith("QUARANTINED: p")
        await fleet.until(lambda: fleet.state("p") == "serving")
        assert worker.watches == 2


async def test_a_dead_port_stays_out_and_is_asked_again(fleet: Fleet) -> None:
    port = free_port()
    async with scripted("p", PREFILL, port=port) as worker:
        gone = worker.describes
    fleet.workers.registered("p", gone)
    fleet.reservations.take("u", 0, {"p": Held(prefill_tokens=30)}, 0.0)
    await fleet.until(lambda: fleet.state("p") == "quarantined")
    assert fleet.reservations.on("p") == Held(), "nothing is coming to it"
    async with scripted("p", PREFILL, epoch=9, port=port):
        await fleet.until(lambda: fleet.state("p") == "serving")
        assert fleet.workers.get("p").worker.epoch == 9, "what it says of itself beats an old registration"


async def test_a_told_failure_is_believed_once_and_probed(fleet: Fleet) -> None:
    async with scripted("p", PREFILL) as worker:
        fleet.workers.registered("p", worker.describes)
        await fleet.until(lambda: fleet.state("p") == "serving")
        fleet.workers.failed("p", "a frontend says so")
        assert fleet.state("p") == "quarantined"
        due = fleet.quarantine.due("p")
        for _ in range(50):
            fleet.workers.failed("p", "many frontends say so")
        assert fleet.quarantine.due("p") == due, "fifty reports of one failure are one failure"
        await fleet.until(lambda: fleet.state("p") == "serving")
        fleet.workers.failed("never heard of", "x")


async def test_another_worker_at_the_address_is_not_taken_for_it(fleet: Fleet) -> None:
    async with scripted("impostor", PREFILL) as worker:
        fleet.workers.registered("p", registration("p", PREFILL, worker.describes.address))
        await fleet.until(lambda: "impostor" in fleet.quarantine.why("p"))


async def test_a_worker_of_a_newer_release_does_not_hurt(fleet: Fleet) -> None:
    """An unknown dtype has no size here, an unknown role has no place: neither stops the router."""
    async with scripted("p", PREFILL) as worker, scripted("q", PREFILL) as other:
        worker.describes.layout.dtype = "float4_from_the_future"
        fleet.workers.registered("p", worker.describes)
        await fleet.until(lambda: fleet.state("p") == "serving")
        assert fleet.workers.get("p").block_bytes == 0
        known = registration("q", PREFILL, other.describes.address)
        other.describes.role = 17  # type: ignore[assignment]
        fleet.workers.registered("q", known)
        await fleet.until(lambda: "role 17" in fleet.quarantine.why("q"))
        fleet.workers.registered("r", other.describes)
        assert {k.worker.id for k in fleet.workers.all()} == {"p", "q"}


async def test_a_new_epoch_forgets_the_old_one_at_once(fleet: Fleet) -> None:
    async with scripted("p", PREFILL) as old:
        fleet.workers.registered("p", old.describes)
        old.say(old.cache(2, stored=KEYS))
        await fleet.until(lambda: fleet.index.held_by("p") == len(KEYS))
        fleet.rates.reported("p", 12345.0, 0.0, 0, 0.0)
        async with scripted("p", PREFILL, epoch=2) as new:
            fleet.workers.registered("p", new.describes)
            assert fleet.index.held_by("p") == 0
            assert fleet.rates.speed("p").prefill_tok_s == 500
            await fleet.until(lambda: fleet.state("p") == "serving")
            assert new.watches == 1


async def test_an_update_of_another_epoch_ends_the_stream(fleet: Fleet) -> None:
    async with scripted("p", PREFILL) as worker:
        fleet.workers.registered("p", worker.describes)
        await fleet.until(lambda: fleet.state("p") == "serving")
        worker.say(worker.cache(2, epoch=77, stored=KEYS))
        await fleet.until(lambda: worker.watches == 2)
        assert fleet.index.held_by("p") == 0


async def test_draining_is_told_by_load_or_registration(fleet: Fleet) -> None:
    async with scripted("p", PREFILL) as worker:
        fleet.workers.registered("p", worker.describes)
        await fleet.until(lambda: fleet.state("p") == "serving")
        worker.say(worker.load(draining=True))
        await fleet.until(lambda: fleet.state("p") == "draining")
        assert fleet.workers.snapshot(fleet.workers.get("p"), 0.0).unusable == "DRAINING: p"
        worker.say(worker.load())
        await fleet.until(lambda: fleet.state("p") == "serving")
        told = registry_pb2.Worker()
        told.CopyFrom(worker.describes)
        told.draining = True
        fleet.workers.registered("p", told)
        assert fleet.state("p") == "draining"


async def test_a_removed_worker_leaves_nothing(fleet: Fleet) -> None:
    async with scripted("p", PREFILL) as worker:
        fleet.workers.registered("p", worker.describes)
        worker.say(worker.cache(2, stored=KEYS))
        await fleet.until(lambda: fleet.index.held_by("p") == len(KEYS))
        fleet.reservations.take("u", 0, {"p": Held(prefill_tokens=1)}, 0.0)
        fleet.speculation.expect("p", b"k" * 16, 0, 1e9)
        fleet.workers.registered("p", None)
        assert list(fleet.workers.of_model("tiny")) == []
        assert not fleet.workers.knows("tiny")
        assert len(fleet.index) == len(fleet.reservations) == len(fleet.speculation) == 0
        fleet.workers.registered("p", None)


async def test_answers_only_for_the_very_epoch(fleet: Fleet) -> None:
    async with scripted("p", PREFILL, epoch=5) as worker:
        assert await fleet.workers.answers(worker.describes)
        assert not await fleet.workers.answers(registration("p", PREFILL, worker.describes.address, epoch=4))
    assert not await fleet.workers.answers(worker.describes)


async def test_cards_that_differ_are_refused_by_name(fleet: Fleet) -> None:
    other = registry_pb2.ModelCard(model="tiny", weights="w", tokenizer="OTHER", chat_template="c")
    async with scripted("a", DECODE) as first, scripted("b", MERGED, card=other, started=2.0) as second:
        fleet.workers.registered("a", first.describes)
        fleet.workers.registered("b", second.describes)

        def why(id: str) -> str:
            return fleet.workers.snapshot(fleet.workers.get(id), 0.0).unusable

        assert why("a") == ""
        assert why("b") == "VERSION_MISMATCH: b: tokenizer differ from the card of tiny"
        fleet.workers.card_stands("tiny", other)
        assert why("a") == "VERSION_MISMATCH: a: tokenizer differ from the card of tiny"
        assert why("b") == ""
        fleet.workers.card_stands("tiny", None)
        assert why("a") == ""


def test_empty_digests_are_not_compared() -> None:
    full = registry_pb2.ModelCard(weights="w", tokenizer="t", chat_template="c", generation_config="g")
    assert card_differences(registry_pb2.ModelCard(weights="w"), full) == []
    assert card_differences(registry_pb2.ModelCard(weights="x", generation_config="h"), full) == [
        "weights",
        "generation_config",
    ]
