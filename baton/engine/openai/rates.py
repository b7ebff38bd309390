"""How fast the upstream is, learnt from what it does for us. Exponential averages.

prefill_tok_s   prompt tokens not found in its cache over the time to the first token, of requests that did not wait
                here: its own queue is in it, so a busy server shows as a slow one
decode_step_s   seconds between tokens of one stream
"""

from __future__ import annotations

from dataclasses import dataclass

KEPT = 0.8
LEAST_TOKENS = 32
"""A shorter prompt says more of the way than of the computing."""


@dataclass
class Rates:
    """0 until something was learnt."""

    prefill_tok_s: float = 0.0
    decode_step_s: float = 0.0

    def first_token(self, computed_tokens: int, seconds: float) -> None:
        """A stream's first token came."""
        if computed_tokens >= LEAST_TOKENS and seconds > 0:
            self.prefill_tok_s = _mean(self.prefill_tok_s, computed_tokens / seconds)

    def ended(self, tokens: int, seconds: float) -> None:
        """A stream ended `seconds` after its first token, with `tokens` in all."""
        if tokens > 1 and seconds > 0:
            self.decode_step_s = _mean(self.decode_step_s, seconds / (tokens - 1))


def _mean(before: float, now: float) -> float:
    return now if before == 0.0 else KEPT * before + (1 - KEPT) * now
