"""What a decode step takes, learnt for each worker: a line over the number of its streams.

    step(streams) = lone_s + stream_s * (streams - 1)

A load report tells the streams of the moment and the average of the last steps. An average lags, so the same is made of
the streams before the two are put together: averages of both lie on the line wherever the line is straight. The slope
is that of least squares, drawn towards a full batch that takes twice as long as a lone stream (what is assumed before
anything is known) as by `PRIOR` points one stream away. What was learnt fades, the slope back to what is assumed; the
height stays as it was last seen.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

SETTLED_STEPS = 10.0
"""A worker's own average is over about so many steps."""
HALF_LIFE_S = 60.0
"""In which the weight of a report halves."""
PRIOR = 16.0
"""The assumed slope weighs as much as so many reports of one stream more or fewer than the average."""


@dataclass(slots=True)
class StepLine:
    """One worker's. `lone_s` and `stream_s` are seconds; `max_streams` is how many a full batch has.

    Beside them: the streams and the step of the last report, at `time`, the average of the streams, and weighted means
    and sums of products over what was reported.
    """

    lone_s: float
    max_streams: int
    stream_s: float = 0.0
    running: int = 0
    told: float = 0.0
    average: float = 0.0
    time: float = 0.0
    weight: float = 0.0
    streams_mean: float = 0.0
    step_mean: float = 0.0
    spread: float = 0.0
    together: float = 0.0

    def __post_init__(self) -> None:
        self.stream_s = self.lone_s / self.max_streams

    def reported(self, running: int, step_s: float, now: float) -> None:
        """The worker runs `running` streams, and its steps took `step_s` on average; 0 means not yet."""
        before, elapsed, known = max(1, self.running), max(0.0, now - self.time), self.told
        self.running, self.time, self.told = running, now, step_s
        self._fade(0.5 ** (elapsed / HALF_LIFE_S))
        if step_s <= 0.0 or step_s == known:  # an average that stands still is of no new step
            return
        if known <= 0.0:
            self.average, fresh = float(max(1, running)), 1.0
        else:
            fresh = 1.0 - math.exp(-elapsed / (SETTLED_STEPS * step_s))
            self.average += fresh * (before - self.average)
        self._add(self.average, step_s, fresh)
        self._fit()

    def _fade(self, kept: float) -> None:
        self.weight *= kept
        self.spread *= kept
        self.together *= kept

    def _add(self, streams: float, step_s: float, weight: float) -> None:
        """One more point: means and sums of products, kept as they change (West 1979)."""
        self.weight += weight
        if self.weight <= 0.0:
            return
        part, off = weight / self.weight, streams - self.streams_mean
        self.streams_mean += part * off
        self.spread += weight * off * (streams - self.streams_mean)
        self.step_mean += part * (step_s - self.step_mean)
        self.together += weight * off * (step_s - self.step_mean)

    def _fit(self) -> None:
        if self.weight <= 0.0:
            return
        streams, step_s = max(1.0, self.streams_mean), self.step_mean
        assumed = step_s / (self.max_streams + streams - 1.0)
        slope = (self.together + PRIOR * assumed) / (self.spread + PRIOR)
        # A stream more is never a gain, and never costs more than its share of all.
        self.stream_s = min(max(0.0, slope), step_s / streams)
        self.lone_s = step_s - self.stream_s * (streams - 1.0)
