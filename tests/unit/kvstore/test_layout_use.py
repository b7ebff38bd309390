"""When a layout gives way: nobody has used it for long enough, and somebody has come with another one."""

from __future__ import annotations

import pytest

from services.kvstore.layout_use import LayoutUse


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def use(clock: Clock) -> LayoutUse:
    """Of a store of layout a; somebody has called with b."""
    made = LayoutUse(10.0, clock)
    assert made.successor("a", ["b"]) == ""
    made.asked("b", "a")
    return made


def test_an_unused_layout_gives_way_after_its_rest_to_one_that_somebody_called_with(
    use: LayoutUse, clock: Clock
) -> None:
    clock.now += 9.9
    assert use.successor("a", ["b"]) == ""
    clock.now += 0.1
    assert use.successor("a", ["b"]) == "b"


def test_a_worker_that_never_called_here_is_nobody(clock: Clock) -> None:
    use = LayoutUse(10.0, clock)
    assert use.successor("a", ["b"]) == ""
    clock.now += 1000
    assert use.successor("a", ["b", ""]) == "", "they may be another model's, and want nothing of this store"
    assert use.successor("", ["b"]) == "", "nothing is held"


def test_a_registered_worker_keeps_it_however_long_it_is_silent(use: LayoutUse, clock: Clock) -> None:
    for _ in range(5):
        clock.now += 100
        assert use.successor("a", ["b", "a"]) == ""
    clock.now += 9
    assert use.successor("a", ["b"]) == "", "its rest begins when the worker has gone"
    clock.now += 1
    assert use.successor("a", ["b"]) == "b", "it paired long ago, calls no more, and is still there"


def test_a_call_keeps_it_too(use: LayoutUse, clock: Clock) -> None:
    clock.now += 9
    use.asked("a", "a")
    clock.now += 9
    assert use.successor("a", ["b"]) == ""


def test_without_a_worker_a_call_counts_for_a_rest(clock: Clock) -> None:
    use = LayoutUse(10.0, clock)
    use.asked("c", "a")
    clock.now += 10
    use.asked("a", "a")
    clock.now += 10
    assert use.successor("a", []) == "c"
    use.asked("a", "a")
    clock.now += 10
    assert use.successor("a", []) == "", "c has not been heard of for longer"


def test_it_gives_way_once_until_it_is_used_again(use: LayoutUse, clock: Clock) -> None:
    clock.now += 10
    assert use.successor("a", ["b"]) == "b"
    clock.now += 10
    use.asked("b", "a")
    assert use.successor("a", ["b"]) == "", "a pin may keep its shape"
    use.asked("a", "a")
    clock.now += 10
    assert use.successor("a", ["b"]) == "b"


def test_what_comes_after_it_has_its_own_rest(use: LayoutUse, clock: Clock) -> None:
    use.asked("a", "b")
    clock.now += 9.9
    assert use.successor("b", ["a"]) == ""
    clock.now += 0.1
    assert use.successor("b", ["a"]) == "a"
    assert use.successor("a", ["b"]) == ""
