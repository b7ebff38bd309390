"""What a step takes: learnt from averages that lag, assumed where nothing is known, forgotten in time."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.router.steps import HALF_LIFE_S, SETTLED_STEPS, StepLine


class Worker:
    """A worker whose steps take `lone_s + stream_s * (streams - 1)`, and that tells the average of the last ones."""

    def __init__(self, lone_s: float, stream_s: float, noise: float = 0.0, seed: int = 1) -> None:
        self.lone_s, self.stream_s, self.noise = lone_s, stream_s, noise
        self.random = random.Random(seed)
        self.now, self.average = 100.0, 0.0

    def run(self, line: StepLine, streams: int, seconds: float, report_s: float = 0.25) -> None:
        """Step with so many streams for so long, reporting as it goes."""
        end, due = self.now + seconds, self.now
        while self.now < end:
            if self.now >= due:
                line.reported(streams, self.average, self.now)
                due += report_s
            if not streams:
                self.now += 0.01
                continue
            step_s = self.lone_s + self.stream_s * (streams - 1)
            step_s *= 1.0 + self.noise * self.random.uniform(-1.0, 1.0)
            self.now += step_s
            self.average = step_s if not self.average else self.average + (step_s - self.average) / SETTLED_STEPS


def test_before_anything_is_known_a_full_batch_takes_twice_as_long_as_one_stream() -> None:
    line = StepLine(0.03, 8)
    assert (line.lone_s, line.stream_s) == (0.03, 0.03 / 8)


def test_the_slope_is_found_although_the_average_lags() -> None:
    """8 % a stream (what an engine on one core shows), where 64 streams would have been taken to double the step."""
    line, worker = StepLine(0.035, 64), Worker(0.035, 0.08 * 0.035, noise=0.1)
    for streams in (1, 4, 8, 2, 6, 3, 8, 1):
        worker.run(line, streams, 4.0)
    assert line.stream_s == pytest.approx(0.08 * 0.035, rel=0.1)
    assert line.lone_s == pytest.approx(0.035, rel=0.05)


def test_a_flat_step_is_found_where_a_steep_one_was_assumed() -> None:
    line, worker = StepLine(0.02, 8), Worker(0.02, 0.0001, noise=0.05)
    for streams in (1, 4, 8, 2, 6, 3, 8, 1):
        worker.run(line, streams, 3.0)
    assert line.stream_s < 0.15 * 0.02 / 8


def test_one_number_of_streams_tells_the_height_and_leaves_the_assumed_slope() -> None:
    """A machine half as fast as it was at its registration: all of the line is twice as high."""
    line, worker = StepLine(0.02, 16), Worker(0.04, 0.04 / 16)
    worker.run(line, 5, 10.0)
    assert line.lone_s == pytest.approx(0.04)
    assert line.stream_s == pytest.approx(0.04 / 16)


def test_a_few_odd_reports_do_not_turn_it() -> None:
    line = StepLine(0.03, 16)
    for number, (running, step_s) in enumerate([(1, 0.03), (1, 0.031), (2, 0.06), (2, 0.02)]):
        line.reported(running, step_s, 0.5 * number)
    assert 0.5 * 0.03 / 16 < line.stream_s < 3 * 0.03 / 16


def test_an_idle_worker_forgets_its_slope_and_keeps_its_height() -> None:
    line, worker = StepLine(0.035, 64), Worker(0.035, 0.08 * 0.035)
    for streams in (1, 8, 1, 8, 1):
        worker.run(line, streams, 4.0)
    assert line.stream_s > 0.06 * 0.035
    worker.run(line, 0, 12 * HALF_LIFE_S)
    worker.run(line, 1, 1.0)
    assert line.stream_s < 0.02 * 0.035
    assert line.lone_s == pytest.approx(0.035, rel=0.05)


def test_an_average_that_stands_still_is_no_news() -> None:
    line = StepLine(0.03, 8)
    for second in range(10):
        line.reported(1, 0.04, float(second))
    assert line.weight < 1.0


@given(
    st.lists(st.tuples(st.integers(0, 100), st.floats(0, 10), st.floats(0, 100)), max_size=30),
    st.floats(1e-4, 1.0),
    st.integers(1, 128),
)
def test_whatever_is_told_a_step_takes_time_and_more_streams_never_less(
    reports: list[tuple[int, float, float]], lone_s: float, max_streams: int
) -> None:
    line, now = StepLine(lone_s, max_streams), 0.0
    for running, step_s, later in reports:
        now += later
        line.reported(running, step_s, now)
        assert math.isfinite(line.lone_s)
        assert line.lone_s > 0.0
        assert line.stream_s >= 0.0
