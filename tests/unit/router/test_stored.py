"""When a load is worth taking: never when computing would be quicker."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from services.router.costs import Ask, Parameters, Role, WorkerState, own_cost, prefill_seconds, worthwhile_loads
from services.router.policy import Mode, candidates, choose
from services.router.stored import Load, Reader, StoredRun, loads

BLOCK = 32
BLOCK_BYTES = 737_280
P = Parameters()


def worker(id: str = "w", role: Role = Role.MERGED, *, tok_s: float = 700.0, step_s: float = 0.03) -> WorkerState:
    """An idle one."""
    return WorkerState(id, role, "f", BLOCK, BLOCK_BYTES, 2048, 8, 0, 0.0, 1000, 1000, tok_s, step_s)


def run(fingerprint: str = "f", **blocks: int) -> StoredRun:
    """What store `s` holds."""
    return StoredRun("s", fingerprint, BLOCK, blocks)


def at_rate(bytes_s: float, fixed_s: float = 0.0) -> object:
    """A LoadTime."""
    return lambda store, tier, worker, size: fixed_s + size / bytes_s


def reader(have: int = 0, most: int = 10_000) -> Reader:
    """Of layout `f`."""
    return Reader("w", "f", BLOCK, BLOCK_BYTES, have, most)


def test_each_tier_ends_an_option() -> None:
    found = loads([run(host=4, nvme=6)], reader(), lambda s, tier, w, size: 1.0 if tier == "host" else 10.0)
    assert found == [Load("s", "host", 128, 1.0), Load("s", "nvme", 320, 11.0)]


def test_only_what_is_missing_is_paid_for() -> None:
    one = BLOCK_BYTES
    (load,) = loads([run(host=4)], reader(have=64), lambda s, t, w, size: size / one)
    assert load == Load("s", "host", 128, 2.0)
    assert loads([run(host=4)], reader(have=128), lambda s, t, w, size: 1.0) == []


def test_the_last_token_is_computed() -> None:
    (load,) = loads([run(host=4)], reader(most=96), lambda s, t, w, size: 1.0)
    assert load.tokens == 96


def test_another_layout_is_nothing() -> None:
    assert loads([run("other", host=4)], reader(), lambda s, t, w, size: 1.0) == []


def test_an_idle_worker_loads_a_long_prefix_and_computes_a_short_one() -> None:
    quick = at_rate(1e9, 0.005)
    long = Ask("u", 1000, 64, stored=[run(host=31)])
    (load,) = worthwhile_loads(worker(), long, quick, P)  # type: ignore[arg-type]
    terms = own_cost(worker(), long, P, load)
    assert terms.load + terms.prefill < own_cost(worker(), long, P).prefill / 5
    short = Ask("u", 20, 64, stored=[run(host=1)])
    assert worthwhile_loads(worker(), short, quick, P) == []  # type: ignore[arg-type]


def test_a_slow_store_is_left_alone() -> None:
    ask = Ask("u", 1000, 64, stored=[run(host=31)])
    assert worthwhile_loads(worker(), ask, at_rate(1e7), P) == []  # type: ignore[arg-type]
    assert worthwhile_loads(worker(), ask, lambda s, t, w, size: math.inf, P) == []


@given(
    prompt=st.integers(1, 4000),
    host=st.integers(0, 130),
    nvme=st.integers(0, 130),
    hit=st.integers(0, 130),
    tok_s=st.floats(10, 1e5),
    bytes_s=st.floats(1e6, 1e11),
    fixed_s=st.floats(0, 1),
)
def test_a_hit_is_never_predicted_slower_than_a_miss(
    prompt: int, host: int, nvme: int, hit: int, tok_s: float, bytes_s: float, fixed_s: float
) -> None:
    w = worker(tok_s=tok_s)
    ask = Ask("u", prompt, 64, hits={"w": hit * BLOCK}, stored=[run(host=host, nvme=nvme)])
    without = prefill_seconds(w, prompt - ask.cached(w))
    for load in worthwhile_loads(w, ask, at_rate(bytes_s, fixed_s), P):  # type: ignore[arg-type]
        assert ask.cached(w) < load.tokens < prompt
        assert load.seconds + prefill_seconds(w, prompt - load.tokens) < without


def test_a_candidate_takes_the_cheapest_store() -> None:
    ask = Ask("u", 1000, 64, stored=[run(host=31), StoredRun("t", "f", BLOCK, {"host": 31})])
    found = candidates(
        [worker()],
        ask,
        lambda p, d: 1e9,
        P,
        load_time=lambda store, tier, w, size: 0.2 if store == "s" else 0.1,
    )
    assert found[0].load is not None
    assert found[0].load.store == "t"
    assert found[0].ttft == found[0].terms.ttft


def test_a_pair_loads_on_its_prefill() -> None:
    fleet = [worker("p", Role.PREFILL), worker("d", Role.DECODE)]
    ask = Ask("u", 1000, 64, stored=[run(host=31)])
    load_time = at_rate(1e9, 0.005)
    found = candidates(fleet, ask, lambda p, d: 1e9, P, load_time=load_time)  # type: ignore[arg-type]
    pair = next(c for c in found if c.mode is Mode.DISAGGREGATED)
    assert pair.load is not None
    assert pair.terms.load == pair.load.seconds
    assert not isinstance(choose(found, ask, P), str)
