"""Expected blocks lengthen prefixes until they come or their time is over."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.router.index import PrefixIndex
from services.router.speculation import Speculation

KEYS = [bytes([n]) * 16 for n in range(6)]


def extended(speculation: Speculation, found: dict[str, int] | None = None) -> dict[str, int]:
    found = dict(found or {})
    speculation.extend(found, b"".join(KEYS))
    return found


def test_a_prefix_of_known_and_expected_blocks_is_one_prefix() -> None:
    index = PrefixIndex(100)
    index.apply("p", 1, 1, stored=[KEYS[0], KEYS[3]], removed=[], cleared=True)
    speculation = Speculation(index)
    speculation.expect("p", b"".join(KEYS[:3]), 1, until=10.0)
    assert extended(speculation, index.prefix(b"".join(KEYS))) == {"p": 4}
    assert len(speculation) == 2


def test_a_hole_ends_it_and_other_workers_are_not_touched() -> None:
    speculation = Speculation(PrefixIndex(100))
    speculation.expect("p", b"".join(KEYS[:1]), 0, until=10.0)
    speculation.expect("p", b"".join(KEYS[:3]), 2, until=10.0)
    assert extended(speculation, {"q": 3}) == {"p": 1, "q": 3}
    speculation.expect("q", b"".join(KEYS), 4, until=10.0)
    assert extended(speculation) == {"p": 1}


def test_prompts_go_together_as_far_as_their_keys_are_equal() -> None:
    speculation = Speculation(PrefixIndex(100))
    for shared in range(1, 7):
        other = KEYS[:shared] + [bytes([100 + n]) * 16 for n in range(shared, 6)]
        speculation.expect(f"p{shared}", b"".join(other), 0, until=10.0)
    assert extended(speculation) == {f"p{shared}": shared for shared in range(1, 7)}


def test_one_expectation_continues_another() -> None:
    speculation = Speculation(PrefixIndex(100))
    speculation.expect("p", b"".join(KEYS[:2]), 0, until=10.0)
    speculation.expect("p", b"".join(KEYS[:5]), 2, until=10.0)
    assert extended(speculation) == {"p": 5}


def test_forgotten_after_its_time_unless_expected_anew() -> None:
    speculation = Speculation(PrefixIndex(100))
    speculation.expect("p", b"".join(KEYS[:2]), 0, until=1.0)
    speculation.expect("p", b"".join(KEYS[:1]), 0, until=5.0)
    speculation.expect("p", b"".join(KEYS[:1]), 0, until=2.0)
    speculation.expire(1.0)
    assert extended(speculation) == {"p": 1}
    speculation.expire(5.0)
    assert extended(speculation) == {}
    assert len(speculation) == 0


def test_bounded_and_forgotten_with_the_worker() -> None:
    speculation = Speculation(PrefixIndex(100), max_keys=3)
    speculation.expect("p", b"".join(KEYS[:2]), 0, until=1.0)
    speculation.expect("q", b"".join(KEYS[:2]), 0, until=1.0)
    assert speculation.refused == 1
    assert extended(speculation) == {"p": 2}
    speculation.forget("p")
    assert extended(speculation) == {}
    speculation.expire(1.0)
    speculation.expect("q", b"".join(KEYS[:2]), 0, until=2.0)
    assert extended(speculation) == {"q": 2}


@given(st.lists(st.tuples(st.sampled_from("pqr"), st.integers(0, 5), st.integers(0, 5), st.booleans()), max_size=20))
def test_it_is_the_same_whether_looked_for_by_worker_or_by_key(
    plans: list[tuple[str, int, int, bool]],
) -> None:
    """Few holders are gone through by worker, many by key: the others, who hold a key each, change nothing."""
    speculation = Speculation(PrefixIndex(100))
    for worker, start, common, longer in plans:
        chain = KEYS[:common] + [bytes([100 + n]) * 16 for n in range(common, 6)]
        speculation.expect(worker, b"".join(chain[: 6 if longer else start + 1]), start, until=10.0)
    crowd = {f"idle{n}": 1 for n in range(len(KEYS) + 1)}
    for found in ({}, {"p": 2}, {"p": 6, "q": 1}):
        alone, among = extended(speculation, found), extended(speculation, found | crowd)
        assert alone == {worker: depth for worker, depth in among.items() if worker not in crowd}
