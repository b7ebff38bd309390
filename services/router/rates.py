"""What things cost, learnt: prefill and step rates from load reports, transfer rates and answer lengths from outcomes.

Each starts with what the worker's registration says, or a default when that says nothing. Averages are exponential, so
a change of a worker's speed is followed and one odd report is not believed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from services.router.steps import StepLine

DEFAULT_PREFILL_TOK_S = 1000.0
DEFAULT_STEP_S = 0.03
DEFAULT_TRANSFER_BYTES_S = 1e9
DEFAULT_OUTPUT_TOKENS = 128.0


@dataclass
class Speed:
    """How fast one worker computes prompts, and what its decode steps take."""

    prefill_tok_s: float
    steps: StepLine


@dataclass
class _Moved:
    bytes: float
    seconds: float
    transport: str


class Rates:
    """Rates of every known worker and pair of workers. `forget` a worker when it is gone: nothing else bounds this."""

    def __init__(self, gain: float = 0.2) -> None:
        self._gain = gain
        self._speed: dict[str, Speed] = {}
        self._registered_transfer: dict[str, float] = {}
        self._moved: dict[tuple[str, str], _Moved] = {}
        self.output_tokens = DEFAULT_OUTPUT_TOKENS
        """Average length of an answer."""

    def register(
        self, worker: str, prefill_tok_s: float, step_s: float, transfer_bytes_s: float, max_streams: int = 1
    ) -> None:
        """Start values, from a registration; zeros mean unknown. `step_s` is of one stream. What was learnt already
        stays."""
        speed = self._speed.setdefault(worker, _speed(prefill_tok_s, step_s, max_streams))
        speed.steps.max_streams = max(1, max_streams)
        self._registered_transfer[worker] = transfer_bytes_s or DEFAULT_TRANSFER_BYTES_S

    def reported(self, worker: str, prefill_tok_s: float, step_s: float, running: int, now: float) -> None:
        """The worker's own averages and its streams of the moment, from its load report; zeros mean not yet."""
        speed = self._speed.setdefault(worker, _speed())
        speed.prefill_tok_s = prefill_tok_s if prefill_tok_s > 0 else speed.prefill_tok_s
        speed.steps.reported(running, step_s, now)

    def moved(self, prefill: str, decode: str, moved_bytes: int, seconds: float, transport: str) -> None:
        """A hand-over moved `moved_bytes` in `seconds`. Large ones count for more: the rate is a ratio of averages."""
        if moved_bytes <= 0 or seconds <= 0 or prefill not in self._speed or decode not in self._speed:
            return
        pair = self._moved.get((prefill, decode))
        if pair is None:
            self._moved[prefill, decode] = _Moved(moved_bytes, seconds, transport)
            return
        pair.transport = transport
        pair.bytes += self._gain * (moved_bytes - pair.bytes)
        pair.seconds += self._gain * (seconds - pair.seconds)

    def answered(self, output_tokens: int) -> None:
        """A request ended with so many tokens."""
        if output_tokens > 0:
            self.output_tokens += 0.05 * (output_tokens - self.output_tokens)

    def speed(self, worker: str) -> Speed:
        """How fast `worker` computes, as far as known."""
        return self._speed.get(worker) or _speed()

    def transfer(self, prefill: str, decode: str) -> float:
        """Bytes per second from `prefill` to `decode`: measured, else the slower of what the two registered."""
        pair = self._moved.get((prefill, decode))
        if pair is not None:
            return pair.bytes / pair.seconds
        gives = self._registered_transfer.get(prefill, DEFAULT_TRANSFER_BYTES_S)
        takes = self._registered_transfer.get(decode, DEFAULT_TRANSFER_BYTES_S)
        return gives if gives < takes else takes

    def transport(self, prefill: str, decode: str) -> str:
        """The transport by which the last hand-over of the pair went; empty before the first."""
        pair = self._moved.get((prefill, decode))
        return pair.transport if pair is not None else ""

    def forget(self, worker: str) -> None:
        """Drop everything learnt about `worker`."""
        self._speed.pop(worker, None)
        self._registered_transfer.pop(worker, None)
        for pair in [pair for pair in self._moved if worker in pair]:
            del self._moved[pair]


def _speed(prefill_tok_s: float = 0.0, step_s: float = 0.0, max_streams: int = 1) -> Speed:
    steps = StepLine(step_s or DEFAULT_STEP_S, max(1, max_streams))
    return Speed(prefill_tok_s or DEFAULT_PREFILL_TOK_S, steps)


class PrefillShare:
    """The share of recent time that a worker was given prompts to compute, 0 to 1: a sum decaying over `window_s`."""

    def __init__(self, window_s: float = 30.0) -> None:
        self._window_s = window_s
        self._sums: dict[str, tuple[float, float]] = {}

    def add(self, worker: str, seconds: float, now: float) -> None:
        """A plan gave `worker` a prompt that takes `seconds`."""
        self._sums[worker] = (self.of(worker, now) + seconds / self._window_s, now)

    def of(self, worker: str, now: float) -> float:
        """The share now."""
        known = self._sums.get(worker)
        if known is None:
            return 0.0
        value, then = known
        share = value * math.exp((then - now) / self._window_s)
        return share if share < 1.0 else 1.0

    def forget(self, worker: str) -> None:
        """Drop what is known of `worker`."""
        self._sums.pop(worker, None)
