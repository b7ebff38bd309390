"""What loads cost, learnt."""

from __future__ import annotations

import math

import pytest

from services.router.loads import LOOKUP_S, PRIOR_BYTES, LoadRates

MIB = 2**20


def test_before_any_load_the_tier_is_believed() -> None:
    rates = LoadRates()
    rates.told("s", "nvme", 2e8, 0.01)
    assert rates.seconds("s", "nvme", "w", 0, 0.0) == pytest.approx(LOOKUP_S + 0.01)
    assert rates.seconds("s", "nvme", "w", 2e8, 0.0) == pytest.approx(LOOKUP_S + 0.01 + 1.0)
    assert rates.seconds("other", "host", "w", 1e9, 0.0) == pytest.approx(LOOKUP_S + 1.0)


def test_no_tier_is_quicker_than_the_one_that_is_read_from() -> None:
    rates = LoadRates()
    host = rates.seconds("s", "host", "w", 1e9, 0.0)
    assert rates.seconds("s", "device", "w", 1e9, 0.0) == pytest.approx(host)
    rates.told("s", "device", 5e10, 0.001)
    assert rates.seconds("s", "device", "w", 1e9, 0.0) == pytest.approx(host + 0.001)
    assert rates.seconds("s", "nvme", "w", 1e9, 0.0) > host


def test_what_the_store_measured_of_its_host_is_believed_however_fast() -> None:
    rates = LoadRates()
    rates.told("s", "host", 2e10, 0.0)
    assert rates.seconds("s", "host", "w", 2e9, 0.0) == pytest.approx(LOOKUP_S + 0.1)
    rates.told("s", "nvme", 5e9, 0.0)
    assert rates.seconds("s", "nvme", "w", 2e9, 0.0) == pytest.approx(LOOKUP_S + 0.4)
    rates.told("s", "device", 5e11, 0.0)  # comes up through the host
    assert rates.seconds("s", "device", "w", 2e9, 0.0) == pytest.approx(LOOKUP_S + 0.1)


def test_a_line_is_learnt_from_loads_of_several_sizes() -> None:
    rates = LoadRates()
    for n in range(40):
        size = (1 + n % 8) * 4 * MIB
        rates.loaded("s", "host", "w", size, 0.05 + size / 1e8, 0.0)
    for size in (4 * MIB, 32 * MIB):
        assert rates.seconds("s", "host", "w", size, 0.0) == pytest.approx(0.05 + size / 1e8, rel=0.25)


def test_loads_of_one_size_say_what_that_size_costs() -> None:
    rates = LoadRates()
    for _ in range(40):
        rates.loaded("s", "host", "w", PRIOR_BYTES, 1.0, 0.0)
    assert rates.seconds("s", "host", "w", PRIOR_BYTES, 0.0) == pytest.approx(1.0, rel=0.1)
    assert rates.seconds("s", "host", "w", 2 * PRIOR_BYTES, 0.0) > 1.0


def test_a_change_is_followed() -> None:
    rates = LoadRates()
    for seconds in (0.1, 1.0):
        for _ in range(20):
            rates.loaded("s", "host", "w", 20 * MIB, seconds, 0.0)
    assert rates.seconds("s", "host", "w", 20 * MIB, 0.0) == pytest.approx(1.0, rel=0.2)


def test_what_was_too_slow_is_tried_again_in_time() -> None:
    """Nobody loads from it meanwhile, so nothing new is learnt."""
    rates = LoadRates()
    before = rates.seconds("s", "host", "w", 20 * MIB, 0.0)
    rates.loaded("s", "host", "w", 20 * MIB, 10.0, 0.0)
    assert rates.seconds("s", "host", "w", 20 * MIB, 1.0) > 20 * before
    assert rates.seconds("s", "host", "w", 20 * MIB, 1000.0) == pytest.approx(before)


def test_pairs_and_tiers_are_learnt_apart() -> None:
    rates = LoadRates()
    before = rates.seconds("s", "host", "v", 20 * MIB, 0.0)
    for _ in range(20):
        rates.loaded("s", "host", "w", 20 * MIB, 3.0, 0.0)
    assert rates.seconds("s", "host", "v", 20 * MIB, 0.0) == before
    assert rates.seconds("s", "nvme", "w", 20 * MIB, 0.0) < 1.0


def test_a_load_that_brought_nothing_rests_the_pair_longer_each_time() -> None:
    rates = LoadRates()
    rests = []
    now = 0.0
    for _ in range(4):
        rates.loaded("s", "host", "w", 0, 0.2, now)
        began = now
        while math.isinf(rates.seconds("s", "host", "w", MIB, now)):
            now += 0.05
        rests.append(now - began)
    assert rests == pytest.approx([0.5, 1.0, 2.0, 4.0], abs=0.1)
    assert not math.isinf(rates.seconds("s", "host", "v", MIB, 0.0))
    rates.loaded("s", "host", "w", MIB, 0.01, now)
    rates.loaded("s", "host", "w", 0, 0.2, now)
    assert not math.isinf(rates.seconds("s", "host", "w", MIB, now + 0.6))


def test_forgotten_with_either_side() -> None:
    rates = LoadRates()
    for id in ("s", "w"):
        rates.loaded("s", "host", "w", 0, 1.0, 0.0)
        rates.forget(id)
        assert not math.isinf(rates.seconds("s", "host", "w", MIB, 0.0))
