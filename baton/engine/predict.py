"""What a step costs: learnt, so that a long step is told from a stuck one."""

from __future__ import annotations

RATE = 0.1
"""Weight of the newest step in the averages."""


class StepCost:
    """Seconds of a step, modelled as `decode_step + prefill_tokens / prefill_tok_s`; both are exponential averages."""

    def __init__(self) -> None:
        self.prefill_tok_s = 0.0
        self.decode_step_s = 0.0

    def learn(self, prefill_tokens: int, decoding: int, seconds: float) -> None:
        """Take a finished step in."""
        if not prefill_tokens:
            self.decode_step_s = _blend(self.decode_step_s, seconds)
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
