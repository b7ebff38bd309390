"""What a step costs: learnt, so that a long step is told from a stuck one."""

from __future__ import annotations

RATE = 0.1
"""Weight of the newest step in the averages."""
LINE_RATE = 0.02
LEAST_SLOPE = 0.001
"""Of a step: a stream is never taken to cost less."""


class StepCost:
    """Seconds of a step, modelled as `decode_step + prefill_tokens / prefill_tok_s`; both are exponential averages."""

    def __init__(self) -> None:
        self.prefill_tok_s = 0.0
        self.decode_step_s = 0.0
        self._streams = _Line()

    @property
    def stream_s(self) -> float:
        """What one more stream adds to a step; 0 before steps of different numbers of them were seen."""
        return self._streams.slope(LEAST_SLOPE)

    def learn(self, prefill_tokens: int, decoding: int, seconds: float) -> None:
        """Take a finished step in."""
        if not prefill_tokens:
            self.decode_step_s = _blend(self.decode_step_s, seconds)
            self._streams.add(decoding, seconds)
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


class _Line:
    """The line through (streams, seconds), by least squares over an exponential window."""

    def __init__(self) -> None:
        self._x = self._y = self._xx = self._xy = 0.0
        self._seen = False

    def add(self, x: float, y: float) -> None:
        """Take a point in."""
        rate = LINE_RATE if self._seen else 1.0
        self._seen = True
        self._x += rate * (x - self._x)
        self._y += rate * (y - self._y)
        self._xx += rate * (x * x - self._xx)
        self._xy += rate * (x * y - self._xy)

    def slope(self, least: float) -> float:
        """Seconds for one more, at least `least` of the mean; 0 while all points have (nearly) the same x."""
        spread = self._xx - self._x**2
        if spread < 0.05:
            return 0.0
        return max((self._xy - self._x * self._y) / spread, least * self._y)
