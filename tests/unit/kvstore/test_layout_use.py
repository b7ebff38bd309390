"""When a layout gives way: nobody has used it for long enough, and somebody has another one."""

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
    made = LayoutUse(10.0, clock)
    assert made.successor("a", ["b"]) == ""
    return made


def test_an_unused_layout_gives_way_to_a_registered_one_after_its_rest(use: LayoutUse, clock: Clock) -> None:
    clock.now += 9.9
    assert use.successor("a", ["b"]) == ""
    clock.now += 0.1
    assert use.successor("a", ["b"]) == "b"


def test_without_anybody_else_it_stays(use: LayoutUse, clock: Clock) -> None:
    clock.now += 1000
    assert use.successor("a", []) == ""
    assert use.successor("a", [""]) == "", "a worker without KV of its own"
    assert use.successor("", ["b"]) == "", "nothing is held"


def test_a_registered_worker_keeps_it_however_long_it_is_silent(use: LayoutUse, clock: Clock) -> None:
    for _ in range(5):
        clock.now += 100
        assert use.successor("a", ["b", "a"]) == ""
    clock.now += 9
    assert use.successor("a", ["b"]) == "", "its rest begins when the worker has gone"


def test_a_call_keeps_it_too(use: LayoutUse, clock: Clock) -> None:
    clock.now += 9
    use.asked("a", "a")
    clock.now += 9
    assert use.successor("a", ["b"]) == ""


def test_a_call_of_another_layout_is_somebody_until_ours_is_used_again(use: LayoutUse, clock: Clock) -> None:
    use.asked("c", "a")
    clock.now += 10
    assert use.successor("a", []) == "c"
    use.asked("a", "a")
    clock.now += 10
    assert use.successor("a", []) == ""


def test_what_comes_after_it_has_its_own_rest(use: LayoutUse, clock: Clock) -> None:
    clock.now += 10
    assert use.successor("b", ["a"]) == ""
