"""The bench of `Route` at a small size: every query gets a plan, and nothing is left over when it is done."""

from __future__ import annotations

from bench.route import Bench, in_process, summary


def test_the_bench_routes_and_leaves_a_sound_router() -> None:
    bench = Bench(count=60, blocks=4000)
    taken = list(in_process(bench, 100))
    assert len(taken) == 100
    said = summary(taken, bench)
    assert said["blocks"] == 4000
    assert said["workers"] == 60
    service = bench.service
    assert service._index.check_integrity() == []
    assert service._reservations.check_integrity() == []
    service._reservations.expire(1e12)
    service._speculation.expire(1e12)
    assert len(service._reservations) == 0
    assert len(service._speculation) == 0
    assert not service._speculation._by_first
