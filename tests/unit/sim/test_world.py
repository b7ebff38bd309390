"""The simulator against what can be computed by hand, and its promises: nothing is lost, no node does two things."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.sim.cache import Cache
from bench.sim.figures import Slo, figures
from bench.sim.fleet import Job, Setting
from bench.sim.frozen import BASELINES, LeastLoaded, LeastLoadedLoading, MaxPrefix, Random, RoundRobin
from bench.sim.ours import Ours
from bench.sim.trace import Request, Trace, azure, mooncake
from bench.sim.world import Failure, Placement, Policy, World

BLOCK = 512


def keys(*numbers: int) -> tuple[bytes, ...]:
    return tuple(number.to_bytes(16, "little") for number in numbers)


def trace(*requests: Request) -> Trace:
    return Trace("made", BLOCK, list(requests))


class Fixed(LeastLoaded):
    """Always the same place."""

    def __init__(self, placement: Placement) -> None:
        super().__init__(1)
        self._placement = placement

    def place(self, world: World, job: Job) -> Placement | None:
        return self._placement


def made_trace(seed: int, count: int = 300, chains: int = 20) -> Trace:
    """Conversations that grow, with lengths of some thousand tokens."""
    rng = random.Random(seed)
    grown: dict[int, int] = dict.fromkeys(range(chains), 2)
    found, at = [], 0.0
    for _ in range(count):
        at += rng.expovariate(2.0)
        chain = rng.randrange(chains)
        grown[chain] = min(30, grown[chain] + rng.randint(0, 4))
        blocks = grown[chain]
        names = keys(*(1000 * chain + place for place in range(blocks)))
        found.append(Request(at, blocks * BLOCK - rng.randrange(BLOCK), rng.randint(1, 300), names))
    return trace(*found)


def policies() -> list[Policy]:
    return [*(kind(1) for kind in BASELINES), LeastLoadedLoading(1), Ours(), Ours(loads=False), Ours(ttft_slo_s=5.0)]


def test_a_prompt_waits_computes_and_reuses() -> None:
    setting = Setting(prefills=1, prefill_tok_s=1000.0)
    first, second = Request(0.0, 1024, 1, keys(1, 2)), Request(0.5, 1536, 1, keys(1, 2, 3))
    jobs = World(setting, trace(first, second), Random(1)).run()
    assert jobs[0].first_token == pytest.approx(1.024)
    assert jobs[1].cached == 1024
    assert jobs[1].first_token == pytest.approx(1.024 + 0.512)


def test_the_last_token_is_always_computed() -> None:
    setting = Setting(prefills=1, prefill_tok_s=1000.0)
    request = Request(0.0, 1024, 1, keys(1, 2))
    jobs = World(setting, trace(request, Request(5.0, 1024, 1, keys(1, 2))), Random(1)).run()
    assert jobs[1].cached == 1023


def test_loading_takes_the_link_and_the_others_wait_for_it() -> None:
    setting = Setting(prefills=3, prefill_tok_s=1000.0, kv_bytes=1000, link_bytes_s=1_024_000.0)
    long = keys(*range(10))
    requests = trace(
        Request(0.0, 5120, 1, long),
        Request(10.0, 5632, 1, (*long, *keys(50))),
        Request(10.0, 5632, 1, (*long, *keys(60))),
    )
    world = World(setting, requests, Fixed(Placement(0)))
    where = iter([Placement(0), Placement(1, source=0), Placement(2, source=0)])
    world._policy.place = lambda world, job: next(where)  # type: ignore[method-assign]
    jobs = world.run()
    assert [job.loaded for job in jobs] == [0, 5120, 5120]
    assert jobs[1].first_token == pytest.approx(10.0 + 5.0 + 0.512)
    assert jobs[2].first_token == pytest.approx(10.0 + 5.0 + 5.0 + 0.512)


def test_streams_share_a_step() -> None:
    setting = Setting(
        prefills=1, decodes=1, prefill_tok_s=1e9, kv_bytes=0, step_s=0.1, step_stream_s=0.1, max_streams=2
    )
    jobs = World(setting, trace(*(Request(0.0, 512, 11, ()) for _ in range(3))), Random(1)).run()
    # two together: ten steps of 0.3 s; then the third alone: ten of 0.2 s
    assert jobs[0].done == pytest.approx(3.0, abs=0.02)
    assert jobs[1].done == pytest.approx(3.0, abs=0.02)
    assert jobs[2].done == pytest.approx(5.0, abs=0.02)


def test_a_dead_nodes_requests_are_placed_anew_and_its_cache_is_gone() -> None:
    setting = Setting(prefills=2, decodes=2, prefill_tok_s=1000.0)
    requests = made_trace(3, 60)
    for policy in policies():
        failures = [Failure(5.0, "prefill", 0, 5.0), Failure(9.0, "decode", 0, 5.0)]
        world = World(setting, requests, policy, failures)
        jobs = world.run()
        assert all(job.refused or job.done >= job.first_token >= job.request.at for job in jobs), policy.name
        assert any(job.attempts > 1 for job in jobs), policy.name
        assert all(node.running is None and not node.queue and abs(node.waiting_s) < 1e-6 for node in world.prefills)
        assert all(node.streams == 0 for node in world.decodes), policy.name


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 1000), st.integers(1, 6), st.integers(0, 3))
def test_every_request_is_answered_once(seed: int, prefills: int, decodes: int) -> None:
    requests = made_trace(seed, 80)
    setting = Setting(prefills=prefills, decodes=decodes, cache_tokens=40 * BLOCK)
    for policy in policies():
        world = World(setting, requests, policy)
        jobs = world.run()
        assert [job.request for job in jobs] == requests.requests
        for job in jobs:
            assert job.refused or job.done >= job.first_token > job.request.at
        assert all(len(node.cache) <= 40 for node in world.prefills)


def test_what_the_index_was_told_is_what_the_caches_hold() -> None:
    policy = Ours()
    world = World(
        Setting(prefills=4, cache_tokens=40 * BLOCK), made_trace(5), policy, [Failure(20.0, "prefill", 1, 9.0)]
    )
    world.run()
    assert policy._index.check_integrity() == []
    for node in world.prefills:
        assert policy._index.held_by(f"prefill-{node.number}") == len(node.cache)
        assert all(policy._index.holds(f"prefill-{node.number}", key) for key in node.cache._keys)


def test_ours_is_not_slower_than_any_baseline_where_prefixes_are_shared() -> None:
    requests, setting = made_trace(7, 1500, 40), Setting(prefills=4, cache_tokens=200 * BLOCK)
    means = {}
    for policy in [*(kind(1) for kind in BASELINES), Ours()]:
        means[policy.name] = figures(World(setting, requests, policy).run(), Slo()).ttft_mean
    assert min(means, key=means.__getitem__) == "ours", means


def test_refusals_count_as_failures() -> None:
    setting = Setting(prefills=1, prefill_tok_s=100.0)
    jobs = World(setting, trace(*(Request(0.0, 512, 1, ()) for _ in range(4))), Ours(ttft_slo_s=6.0)).run()
    assert [job.refused for job in jobs] == [False, True, True, True]
    assert figures(jobs, Slo(ttft_s=6.0)).goodput == 0.25


def test_all_nodes_down_refuses() -> None:
    failures = [Failure(0.5, "prefill", 0, 1.0)]
    for policy in (Random(1), RoundRobin(1), MaxPrefix(1), Ours()):
        jobs = World(Setting(prefills=1), trace(Request(1.0, 512, 1, ())), policy, failures).run()
        assert jobs[0].refused, policy.name


def test_the_cache_lets_the_end_of_a_prompt_go_first() -> None:
    cache = Cache(3)
    cache.use(keys(1, 2, 3))
    assert cache.use(keys(7)) == (list(keys(7)), list(keys(3)))
    assert cache.prefix(keys(1, 2, 3)) == 2


def test_traces_are_read(tmp_path: Path) -> None:
    lines = [{"timestamp": 1500, "input_length": 1100, "output_length": 5, "hash_ids": [0, 1, 2]}]
    (tmp_path / "mooncake_x_trace.jsonl").write_text("\n".join(map(json.dumps, lines)))
    read = mooncake(tmp_path / "mooncake_x_trace.jsonl")
    assert read.name == "mooncake_x"
    assert read.requests == [Request(1.5, 1100, 5, keys(0, 1, 2))]
    csv = (
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,48,10\n2023-11-16 18:17:04.4799600,8,1\n"
    )
    (tmp_path / "a.csv").write_text(csv)
    assert azure(tmp_path / "a.csv").requests == [Request(0.0, 48, 10, ()), Request(pytest.approx(0.5), 8, 1, ())]


def test_copies_share_nothing_and_keep_the_rate() -> None:
    one = made_trace(1)
    many = one.copies(3)
    assert len(many.requests) == 900
    assert many.seconds <= one.requests[-1].at + 1e-3
    assert [r.at for r in many.requests] == sorted(r.at for r in many.requests)
    assert len({key for r in many.requests for key in r.keys}) == 3 * len({key for r in one.requests for key in r.keys})
    assert one.copies(3, seconds=20.0) == many.window(20.0)
    assert one.faster(2.0).seconds == pytest.approx(one.seconds / 2)
