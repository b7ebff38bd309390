"""What figures are compared on stays what it is: the baselines, seeds, arrivals and fleets of the frozen file."""

from __future__ import annotations

import hashlib
from dataclasses import fields
from pathlib import Path

import pytest

from bench.routing import OURS, contenders, told
from bench.sim import frozen
from bench.sim.figures import figures
from bench.sim.fleet import Job
from bench.sim.trace import Request, Trace, shipped, traces_folder
from bench.sim.world import World

FROZEN = "ae708b4f2b909b9ca215e28266d09247597191d225c0e4e43b19c907098e7a5a"
"""Of the file. Change it only together with the figures in docs/benchmarks.md, measured anew."""
NOT_PLAYED = {"decodes", "max_streams", "step_s", "step_stream_s", "tiers"}
"""Of a fleet without streams and tiers."""


def made(name: str = "mooncake_made") -> Trace:
    requests = [
        Request(0.7 * n, 600 + 37 * n % 9000, 5, tuple((n % 7 * 100 + k).to_bytes(16, "little") for k in range(9)))
        for n in range(40)
    ]
    return Trace(name, 512, requests)


def test_the_frozen_file_is_as_it_was() -> None:
    assert hashlib.sha256(Path(frozen.__file__).read_bytes()).hexdigest() == FROZEN


def test_the_fleets_leave_nothing_to_defaults_that_counts() -> None:
    text = Path(frozen.__file__).read_text()
    for field in fields(frozen.FLEET):
        assert text.count(f"{field.name}=") >= 2 or field.name in NOT_PLAYED, field.name
    assert frozen.FLEET.decodes == frozen.LARGE_FLEET.decodes == 0
    assert frozen.FLEET.tiers is frozen.LARGE_FLEET.tiers is None


def test_arrivals_of_a_trace_are_always_the_same() -> None:
    played = {trace.name: trace.digest() for trace in frozen.arrivals({"a": made(), "b": made("azure_made")})}
    assert played == {"mooncake_made": "88cfd9019807c30a", "azure_made": "2653c1fbfcac3e6e"}
    assert frozen.large_arrivals(made(), 20.0).digest() == "ef013715281e635c"


def test_a_digest_tells_every_change_of_an_arrival() -> None:
    trace = made()
    other = [*trace.requests]
    found = {trace.digest(), trace.faster(1.01).digest(), trace.window(20.0).digest(), Trace("", 256, other).digest()}
    last = other[-1]
    for change in (
        Request(last.at, last.prompt + 1, last.output, last.keys),
        Request(last.at, last.prompt, last.output + 1, last.keys),
        Request(last.at, last.prompt, last.output, last.keys[:-1]),
    ):
        found.add(Trace("", 512, [*other[:-1], change]).digest())
    assert len(found) == 7


def test_the_shipped_traces_arrive_as_frozen() -> None:
    folder = traces_folder()
    traces = shipped(folder) if folder else {}
    if not traces:
        pytest.skip("no traces here")
    for trace in frozen.arrivals(traces):
        assert trace.digest() == frozen.ARRIVALS[trace.name], trace.name


@pytest.mark.parametrize(
    ("name", "placed"),
    [
        ("random", "2141777631706607431500006360377353374061"),
        ("round_robin", "0123456701234567012345670123456701234567"),
        ("least_loaded", "0542326070304305347021374314567016403673"),
        ("max_prefix", "0542326054232605423260542326054232605423"),
        ("least_loaded_loading", "0542326070334305347020314314557016613663"),
    ],
)
def test_baselines_place_as_they_did(name: str, placed: str) -> None:
    policy = contenders(ablations=True)[name](frozen.SEEDS[0])
    world = World(frozen.FLEET, made().faster(8.0), policy)
    where: list[str] = []
    place = policy.place

    def seen(world: World, job: Job) -> object:
        chosen = place(world, job)
        where.append(str(chosen.prefill) if chosen else "-")
        return chosen

    policy.place = seen  # type: ignore[method-assign, assignment]
    world.run()
    assert "".join(where) == placed


def test_a_run_says_whether_its_arrivals_are_the_frozen_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = made()
    jobs = World(frozen.FLEET, trace, contenders(ablations=False)[OURS](1)).run()
    found = {OURS: figures(jobs, frozen.SLO)}
    assert not told(trace, found)["frozen"]
    monkeypatch.setitem(frozen.ARRIVALS, trace.name, trace.digest())
    assert told(trace, found)["frozen"]
