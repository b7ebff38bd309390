"""How many places there are, at the edges."""

from __future__ import annotations

from dataclasses import replace

import pytest

from services.frontend.batches.idle import ARRIVING_S, PAUSE_S, QUIET_S, Room, Seen, rooms

ALONE = Seen("w", "host/gpu:0", streams=8, interactive=0, quiet_s=1e9, yields=True)
DECODE = Seen("d", "host/", streams=8, interactive=0, quiet_s=1e9, yields=True)
MERGED = replace(DECODE, id="m")
PREFILL = replace(DECODE, id="p", streams=0)
NONE, STOP = Room(0, 0), Room(0, 0, prompts=False)
STAY, PAUSE = Room(0, 8, prompts=False), Room(0, 8, prompts=False, pause_s=PAUSE_S)


def of(*seen: Seen, arriving: bool = False) -> dict[str, Room]:
    return rooms(seen, arriving)


def busy(worker: Seen, interactive: int = 1) -> Seen:
    return replace(worker, interactive=interactive, quiet_s=0.0)


@pytest.mark.parametrize(
    ("interactive", "others", "left"), [(0, 0, 8), (1, 0, 7), (7, 0, 1), (8, 0, 0), (9, 0, 0), (3, 4, 1), (4, 4, 0)]
)
def test_what_others_leave_of_a_worker_of_its_own(interactive: int, others: int, left: int) -> None:
    worker = replace(ALONE, interactive=interactive, others=others, quiet_s=0.0)
    assert of(worker, arriving=True) == {"w": Room(left, 8 - others)}, "what runs, the engine sees to"


def test_an_idle_group_takes_what_it_has_places_for() -> None:
    assert of(DECODE, MERGED, PREFILL) == {"d": Room(8, 8), "m": Room(8, 8), "p": NONE}


def test_what_is_beside_work_of_others_pauses() -> None:
    idle = Room(0, 0, prompts=False, pause_s=PAUSE_S)
    assert of(busy(DECODE), MERGED, PREFILL) == {"d": STAY, "m": PAUSE, "p": idle}
    assert of(busy(DECODE), busy(MERGED), PREFILL) == {"d": PAUSE, "m": PAUSE, "p": idle}
    assert of(DECODE, MERGED, busy(PREFILL)) == {"d": PAUSE, "m": PAUSE, "p": STOP}


def test_work_of_others_stops_what_is_on_engines_that_do_not_yield() -> None:
    decode, merged, prefill = (replace(worker, yields=False) for worker in (DECODE, MERGED, PREFILL))
    assert of(busy(decode), merged, prefill) == {"d": STOP, "m": STOP, "p": STOP}
    assert of(decode, merged, busy(prefill)) == {"d": STOP, "m": STOP, "p": STOP}
    assert of(decode, MERGED, busy(prefill)) == {"d": STOP, "m": PAUSE, "p": STOP}, "each as it is"


@pytest.mark.parametrize(("quiet_s", "start"), [(0.0, 0), (QUIET_S * 0.999, 0), (QUIET_S, 8)])
def test_a_pause_is_not_the_end(quiet_s: float, start: int) -> None:
    assert of(replace(DECODE, quiet_s=quiet_s), MERGED) == {"d": Room(start, 8), "m": Room(start, 8)}


def test_nothing_starts_or_goes_on_while_a_request_is_on_its_way() -> None:
    short = Room(0, 8, pause_s=ARRIVING_S)
    assert of(DECODE, MERGED, arriving=True) == {"d": short, "m": short}
    assert of(DECODE, replace(MERGED, yields=False), arriving=True) == {"d": short, "m": Room(0, 8)}
    assert of(busy(DECODE), MERGED, arriving=True) == {"d": replace(short, prompts=False), "m": PAUSE}


def test_an_engine_that_does_not_yield_runs_nothing_beside_others() -> None:
    deaf = replace(ALONE, yields=False)
    assert of(deaf) == {"w": Room(8, 8)}
    assert of(busy(deaf)) == {"w": STOP}
    assert of(replace(deaf, quiet_s=0.0)) == {"w": Room(0, 8)}


def test_groups_know_nothing_of_each_other() -> None:
    there = replace(MERGED, id="far", shares="another/")
    assert of(busy(DECODE), MERGED, there, replace(there, id="far-2"))["far"] == Room(8, 8)


def test_nobody_is_there() -> None:
    assert of() == {}
