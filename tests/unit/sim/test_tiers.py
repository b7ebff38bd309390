"""A store below the device's cache: what goes down, comes up, and how long that takes, by hand; and who decides it."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.sim.figures import Slo, figures
from bench.sim.fleet import Job, Setting
from bench.sim.ours import Ours
from bench.sim.tiers import HOST, NVME, Change, Store, Tiers
from bench.sim.trace import Request
from bench.sim.world import Failure, Placement, World
from bench.sweep import lines
from tests.unit.sim.test_world import BLOCK, Fixed, keys, made_trace, policies, trace

TOKEN_S = 1e-3
SLOW = Tiers(host_tokens=8 * BLOCK, nvme_tokens=100 * BLOCK, local_bytes_s=1e4, nvme_bytes_s=2e3, read_s=0.01)
SETTING = Setting(
    prefills=1, prefill_tok_s=1 / TOKEN_S, cache_tokens=4 * BLOCK, kv_bytes=1, link_bytes_s=4e3, tiers=SLOW
)
"""A byte a token: from its own host memory 10,000 tokens a second, from another node's 4,000, from a disk 2,000,
computed 1,000. Devices hold 4 blocks, host memory 8."""
FIRST, SECOND, THIRD = keys(*range(10, 14)), keys(*range(20, 24)), keys(*range(30, 34))


def ask(at: float, names: tuple[bytes, ...]) -> Request:
    """A prompt of the blocks `names` and one block more that nobody shares."""
    return Request(at, (len(names) + 1) * BLOCK, 1, names)


def played(*requests: Request, setting: Setting = SETTING, places: tuple[Placement, ...] = ()) -> list[Job]:
    where = iter(places)
    policy = Fixed(Placement(0))
    if places:
        policy.place = lambda world, job: next(where)  # type: ignore[method-assign]
    return World(setting, trace(*requests), policy).run()


def test_what_host_memory_evicts_goes_to_the_disk_and_comes_up_when_it_is_read() -> None:
    store = Store(host=4, nvme=3)
    assert store.hold(keys(1, 2, 3)) == [Change(HOST, [*keys(1, 2, 3)], [])]
    assert store.hold(keys(4, 5)) == [Change(HOST, [*keys(4, 5)], [*keys(3)]), Change(NVME, [*keys(3)], [])]
    assert store.run(keys(1, 2, 3, 6)) == [HOST, HOST, NVME]
    up = store.hold(keys(1, 2, 3))
    assert up == [Change(HOST, [*keys(3)], [*keys(5)]), Change(NVME, [*keys(5)], [])]
    assert store.run(keys(1, 2, 3)) == [HOST, HOST, HOST]
    store.hold(keys(7, 8, 9, 10))
    assert [store.tier(key) for key in keys(7, 1, 2, 3)] == [HOST, NVME, NVME, NVME]
    assert [store.tier(key) for key in keys(4, 5)] == ["", ""]  # gone from the disk, too


def test_what_the_device_evicts_comes_into_host_memory_when_no_tier_has_it() -> None:
    store = Store(host=2, nvme=1)
    store.hold(keys(1, 2))
    assert store.demote([*keys(2, 3)]) == [Change(HOST, [*keys(3)], [*keys(2)]), Change(NVME, [*keys(2)], [])]


def test_a_prompt_that_the_device_lost_is_loaded_from_the_nodes_own_host_memory() -> None:
    jobs = played(ask(0.0, FIRST), ask(10.0, SECOND), ask(20.0, FIRST))
    assert [(job.cached, job.loaded, job.disk) for job in jobs] == [(0, 0, 0), (0, 0, 0), (4 * BLOCK, 4 * BLOCK, 0)]
    assert jobs[2].first_token == pytest.approx(20.0 + 0.01 + 4 * BLOCK / 1e4 + BLOCK * TOKEN_S)


def test_a_prompt_that_host_memory_lost_is_loaded_from_the_disk() -> None:
    jobs = played(ask(0.0, FIRST), ask(10.0, SECOND), ask(20.0, THIRD), ask(30.0, FIRST))
    assert (jobs[3].cached, jobs[3].loaded, jobs[3].disk) == (4 * BLOCK, 4 * BLOCK, 4 * BLOCK)
    assert jobs[3].first_token == pytest.approx(30.0 + 0.01 + 4 * BLOCK / 2e3 + BLOCK * TOKEN_S)
    run = figures(jobs, Slo())
    assert (run.hit, run.loaded, run.disk) == pytest.approx((0.2, 0.2, 0.2))


def test_another_nodes_disk_and_link_are_waited_for() -> None:
    three = replace(SETTING, prefills=3)
    there = [Placement(0)] * 3
    before = [ask(0.0, FIRST), ask(10.0, SECOND), ask(20.0, THIRD)]
    both = (Placement(1, source=0, upto=4 * BLOCK), Placement(2, source=0, upto=4 * BLOCK))
    jobs = played(*before, ask(30.0, FIRST), ask(30.0, THIRD), setting=three, places=(*there, *both))
    assert [(job.loaded, job.disk) for job in jobs[3:]] == [(4 * BLOCK, 4 * BLOCK), (4 * BLOCK, 0)]
    assert jobs[3].first_token == pytest.approx(30.0 + 0.01 + 4 * BLOCK / 2e3 + BLOCK * TOKEN_S)
    # THIRD lies in host memory, behind FIRST on the link
    assert jobs[4].first_token == pytest.approx(30.0 + 0.01 + 2 * 4 * BLOCK / 4e3 + BLOCK * TOKEN_S)
    again = (Placement(1, source=0, upto=2 * BLOCK), Placement(2, source=0, upto=2 * BLOCK))
    jobs = played(*before, ask(30.0, FIRST), ask(30.0, FIRST[:2]), setting=three, places=(*there, *again))
    assert jobs[3].disk == 2 * BLOCK
    assert jobs[4].disk == 0, "it came up for the first"


def test_a_plan_says_how_far_to_load() -> None:
    for upto, loaded in ((0, 0), (2 * BLOCK, 2 * BLOCK), (4 * BLOCK, 4 * BLOCK)):
        places = (Placement(0), Placement(0), Placement(0, source=0, upto=upto))
        jobs = played(ask(0.0, FIRST), ask(10.0, SECOND), ask(20.0, FIRST), places=places)
        assert jobs[2].loaded == loaded


def test_a_store_that_is_down_is_not_loaded_from() -> None:
    asks = [ask(0.0, FIRST), ask(10.0, SECOND), ask(20.0, FIRST)]
    where = iter([Placement(0), Placement(0), Placement(0, source=1, upto=4 * BLOCK)])
    policy = Fixed(Placement(0))
    policy.place = lambda world, job: next(where)  # type: ignore[method-assign]
    two = replace(SETTING, prefills=2)
    jobs = World(two, trace(*asks), policy, [Failure(15.0, "prefill", 1, 60.0)]).run()
    assert (jobs[2].cached, jobs[2].loaded) == (0, 0)


def test_left_to_itself_a_node_loads_only_what_is_sooner_there_than_computed() -> None:
    asks = ask(0.0, FIRST), ask(10.0, SECOND), ask(20.0, THIRD), ask(30.0, FIRST)
    slower = replace(SETTING, tiers=replace(SLOW, nvme_bytes_s=500.0))
    assert played(*asks, setting=slower)[3].loaded == 0
    mixed = replace(SETTING, tiers=replace(SLOW, host_tokens=10 * BLOCK, nvme_bytes_s=500.0))
    last = played(*asks, setting=mixed)[3]
    assert (last.loaded, last.disk) == (2 * BLOCK, 0), "two blocks are in host memory, two on a disk too slow"


def test_a_dead_nodes_memory_is_lost_and_its_disk_comes_back() -> None:
    asks = [ask(0.0, FIRST), ask(10.0, SECOND), ask(20.0, THIRD), ask(30.0, FIRST), ask(40.0, THIRD)]
    jobs = World(SETTING, trace(*asks), Fixed(Placement(0)), [Failure(26.0, "prefill", 0, 1.0)]).run()
    assert (jobs[3].loaded, jobs[3].disk) == (4 * BLOCK, 4 * BLOCK)
    assert jobs[4].cached == 0


def test_the_policy_loads_what_is_cheaper_to_load() -> None:
    asks = [ask(0.0, FIRST), ask(10.0, SECOND), ask(20.0, THIRD), ask(30.0, FIRST)]
    fast = replace(SETTING, kv_bytes=1000, link_bytes_s=2e7, tiers=replace(SLOW, local_bytes_s=5e7, nvme_bytes_s=6e6))
    assert World(fast, trace(*asks), Ours()).run()[3].disk == 4 * BLOCK
    slow = replace(fast, tiers=replace(SLOW, local_bytes_s=5e7, nvme_bytes_s=5e5))
    assert World(slow, trace(*asks), Ours()).run()[3].cached == 0
    assert World(fast, trace(*asks), Ours(loads=False)).run()[3].cached == 0


def test_the_policy_learns_that_a_tier_is_slower_than_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = [ask(10.0 * n, (FIRST, SECOND, THIRD)[n % 3]) for n in range(9)]
    fast = replace(SETTING, kv_bytes=1000, link_bytes_s=2e7, tiers=replace(SLOW, local_bytes_s=5e7, nvme_bytes_s=6e6))
    slow = replace(fast, tiers=replace(SLOW, local_bytes_s=5e7, nvme_bytes_s=5e5))
    policy = Ours()
    told = policy._rates.told
    monkeypatch.setattr(policy._rates, "told", lambda store, tier, rate, latency: told(store, tier, 2e7, latency))
    jobs = World(slow, trace(*turns), policy).run()
    assert jobs[3].disk == 4 * BLOCK
    assert [job.disk for job in jobs[4:6]] == [0, 0]


def test_the_index_knows_what_lies_on_which_tier() -> None:
    tiers = Tiers(host_tokens=60 * BLOCK, nvme_tokens=100 * BLOCK)
    setting = Setting(prefills=4, cache_tokens=30 * BLOCK, tiers=tiers)
    policy = Ours()
    requests = made_trace(5)
    world = World(setting, requests, policy, [Failure(20.0, "prefill", 1, 9.0)])
    world.run()
    assert policy._index.check_integrity() == []
    for node in world.prefills:
        assert policy._index.held_by(f"prefill-{node.number}") == len(node.cache)
        assert node.store is not None
        for request in requests.requests:
            packed = b"".join(request.keys)
            run = node.store.run(request.keys)
            found = policy._index.look_up(packed).stores.get(f"store-{node.number}", {})
            assert found == {tier: run.count(tier) for tier in (HOST, NVME) if tier in run}


@settings(deadline=None, max_examples=20)
@given(
    st.integers(0, 1000), st.integers(1, 4), st.integers(0, 2), st.sampled_from([0, 10, 60]), st.sampled_from([0, 80])
)
def test_every_request_is_answered_and_tiers_keep_their_bounds(
    seed: int, prefills: int, decodes: int, host: int, nvme: int
) -> None:
    requests = made_trace(seed, 80)
    tiers = Tiers(host_tokens=host * BLOCK, nvme_tokens=nvme * BLOCK)
    setting = Setting(prefills=prefills, decodes=decodes, cache_tokens=20 * BLOCK, tiers=tiers)
    failures = [Failure(10.0, "prefill", 0, 5.0)] if prefills > 1 else []
    for policy in policies():
        world = World(setting, requests, policy, failures)
        for job in world.run():
            assert job.refused or job.done >= job.first_token > job.request.at
            assert 0 <= job.disk <= job.loaded <= job.cached < job.prompt
        for node in world.prefills:
            assert node.store is not None
            assert len(node.cache) <= 20
            held = {tier: len(stored) for tier, stored, _ in node.store.held()}
            assert held[HOST] <= host
            assert held[NVME] <= nvme


def test_the_sweep_plays_the_same_machines_with_more_and_more_tiers() -> None:
    plain = lines(Setting(), tiers=False)
    assert {setting for _, setting in plain.values()} == {Setting()}
    tiered = lines(Setting(), tiers=True)
    ours = [setting.tiers for policy, setting in tiered.values() if policy == "ours"]
    assert [(bool(t.host_tokens), bool(t.nvme_tokens)) for t in ours if t] == [
        (False, False),
        (True, False),
        (True, True),
    ]
    requests = made_trace(3, 600, 30)
    means = []
    for host, nvme in ((0, 0), (100, 0), (100, 400)):
        tiers = Tiers(host_tokens=host * BLOCK, nvme_tokens=nvme * BLOCK)
        setting = Setting(prefills=3, cache_tokens=30 * BLOCK, tiers=tiers)
        means.append(figures(World(setting, requests, Ours()).run(), Slo()).ttft_mean)
    assert all(more > less for more, less in pairwise(means)), means
