"""Frames of a session that come late, twice or never: the client gets each token once and in order all the same.

The frontend is the real one, over HTTP and gRPC; the worker's end of the session is disturbed by a seed.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from baton.model.card import Model, load_model
from baton.v1 import worker_pb2 as pb
from tests.integration.asking import Answer, ask, plain_client
from tests.unit.frontend.peers import Attempt, ScriptedWorker, running

pytestmark = pytest.mark.integration

TEXT = "Each token of this line is a byte; none may be missing, none may come twice: 0123456789 abcdefghij."
STREAMS = 12

Fate = Callable[[pb.Frame], list[pb.Frame]]


@pytest.fixture(scope="module")
def model(tiny: Path) -> Model:
    """The text side of the tiny model."""
    return load_model(tiny, "tiny")


def lost(random_: random.Random) -> Fate:
    return lambda frame: [] if frame.events and random_.random() < 0.04 else [frame]


def doubled(random_: random.Random) -> Fate:
    return lambda frame: [frame] * (1 + (random_.random() < 0.3))


def late(random_: random.Random) -> Fate:
    """A frame is overtaken by the next ones."""
    held: list[pb.Frame] = []

    def fate(frame: pb.Frame) -> list[pb.Frame]:
        if not held and random_.random() < 0.04:
            held.append(frame)
            return []
        if held and random_.random() < 0.5:
            return [frame, held.pop()]
        return [frame]

    return fate


def repeated_much_later(random_: random.Random) -> Fate:
    """What was said long ago is said again."""
    said: list[pb.Frame] = []

    def fate(frame: pb.Frame) -> list[pb.Frame]:
        said.append(frame)
        return [frame, random_.choice(said)] if random_.random() < 0.3 else [frame]

    return fate


FATES = {"lost": lost, "doubled": doubled, "late": late, "repeated much later": repeated_much_later}


@pytest.mark.parametrize("kind", FATES)
@pytest.mark.parametrize("seed", range(4))
async def test_each_token_once_and_in_order(model: Model, kind: str, seed: int) -> None:
    """Streams over a disturbed worker and a sound one, under way at once."""
    ids = [*model.tokenizer.encode(TEXT, add_special=False), model.generation.eos_ids[0]]

    async def speaks(attempt: Attempt) -> None:
        await attempt.play(ids, pause_s=0.001)

    disturbed, sound = ScriptedWorker("disturbed", speaks), ScriptedWorker("sound", speaks)
    disturbed.fate = FATES[kind](random.Random(f"{kind} {seed}"))
    async with running(model, disturbed, sound) as stack, plain_client() as client:
        answers = await asyncio.gather(*(_ask(client, stack.url) for _ in range(STREAMS)))
        moved = stack.count("resumes", reason="SESSION_LOST")
        dropped = stack.count("dropped_events", why="frame")
    assert [a.text for a in answers] == [TEXT] * STREAMS
    assert [a.finish for a in answers] == ["stop"] * STREAMS
    assert {a.usage["completion_tokens"] for a in answers} <= {len(ids), len(ids) - 1}
    if kind in ("lost", "late"):
        assert moved > 0, "nothing was missing: the test tests nothing"
    else:
        assert dropped > 0
        assert moved == 0, "a frame that came twice is no reason to leave"


async def _ask(client: httpx.AsyncClient, url: str) -> Answer:
    return await ask(client, url, "go", 200, model="tiny", ignore_eos=False)


async def test_the_last_frame_is_lost(model: Model) -> None:
    """Nothing follows that could show the gap but a heartbeat: it is seen by that, long before the deadline."""
    ids = [*model.tokenizer.encode(TEXT, add_special=False), model.generation.eos_ids[0]]

    async def speaks(attempt: Attempt) -> None:
        await attempt.play(ids)

    disturbed, sound = ScriptedWorker("disturbed", speaks), ScriptedWorker("sound", speaks)
    disturbed.fate = lambda frame: [] if any(event.finish for event in frame.events) else [frame]
    async with running(model, disturbed, sound) as stack, plain_client() as client, asyncio.timeout(10.0):
        answer = await _ask(client, stack.url)
    assert (answer.text, answer.finish) == (TEXT, "stop")
