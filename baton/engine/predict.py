"""What a step costs: learnt, so that a long step is told from a stuck one."""

from __future__ import annotations

RATE = 0.1
"""Weight of the newest step in the averages."""
FORGET = 1.002
ENOUGH = 16
"""Steps of a number of streams before the fastest of them counts."""
LEAST_SLOPE = 0.002
"""Of a step: a stream is never taken to cost less."""


class StepCost:
    """Seconds of a step, modelled as `decode_step + prefill_tokens / prefill_tok_s`; both are exponential averages."""

    def __init__(self) -> None:
        self.prefill_tok_s = 0.0
        self.decode_step_s = 0.0
        self._streams = StreamCost()

    @property
    def stream_s(self) -> float:
        """What one more stream adds to a step; 0 before steps of different numbers of them were seen."""
        return self._streams.stream_s

    def learn(self, prefill_tokens: int, decoding: int, seconds: float) -> None:
        """Take a finished step in."""
        if not prefill_tokens:
            self.decode_step_s = _blend(self.decode_step_s, seconds)
            self._streams.learn(decoding, seconds)
            return
        # Small chunks cost a step's fixed part whatever they hold: they say nothing of the rate.
        alone = seconds - (self.decode_step_s if decoding else 0.0)
        if prefill_tokens >= 16 and alone > 0:
            self.prefill_tok_s = _blend(self.prefill_tok_s, prefill_tokens / alone)

    def predict(self, prefill_tokens: int, decoding: int) -> float:
        """Seconds such a step should take; 0 before anything is known."""
        prefill = prefill_tokens / self.prefill_tok_s if self.prefill_tok_s else 0.0
        return prefill + (self.decode_step_s if decoding or not prefill_tokens else 0.0)


def _blend(old: float, new: float) -> float:
    return new if not old else old + RATE * (new - old)


class StreamCost:
    """What one more stream adds to a decode step, from the fastest step of each number of streams.

    Whatever else goes on on the machine only makes steps longer: the fastest ones say what streams cost. They are
    forgotten slowly, for contexts grow.
    """

    def __init__(self) -> None:
        self._fastest: dict[int, tuple[float, int]] = {}
        """Seconds, and of how many steps that is the fastest, by streams."""

    def learn(self, streams: int, seconds: float) -> None:
        """Take a step in."""
        fastest, steps = self._fastest.get(streams, (seconds, 0))
        self._fastest[streams] = min(seconds, fastest * FORGET), steps + 1

    @property
    def stream_s(self) -> float:
        """Seconds: the slope of the line through them, by least squares; 0 before two numbers of streams are known."""
        known = [(streams, s) for streams, (s, steps) in self._fastest.items() if steps >= ENOUGH]
        if len(known) < 2:
            return 0.0
        x = sum(streams for streams, _ in known) / len(known)
        y = sum(s for _, s in known) / len(known)
        slope = sum((n - x) * (s - y) for n, s in known) / sum((n - x) ** 2 for n, _ in known)
        return max(slope, LEAST_SLOPE * y)
