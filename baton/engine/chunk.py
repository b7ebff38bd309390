"""How a step's prompt tokens are shared out over the prompts in line: oldest first, with room kept for short ones.

A prompt is short when a quarter of a whole chunk is all that it needs. Of a step's budget up to a quarter is kept for
the short ones that are in line, so that none of them waits for a long one.
"""

from __future__ import annotations

SHORT_SHARE = 4
"""Of a step's prompt tokens, one in so many is for prompts that need no more than that, when there are any."""


class ChunkBudget:
    """One step's: `left` tokens, prompts of at most `short` tokens to go are short, `behind` are the tokens of all of
    these in line. Ask and take in the order of the line."""

    def __init__(self, left: int, short: int, behind: int) -> None:
        self.left = left
        self._short = short
        self._kept = min(left // SHORT_SHARE, behind)

    def most(self, remaining: int) -> int:
        """What a prompt with `remaining` tokens to go may have; not above 0: nothing."""
        return self.left if remaining <= self._short else self.left - self._kept

    def take(self, remaining: int, count: int) -> None:
        """It gets `count`."""
        self.left -= count
        if remaining <= self._short:
            self._kept -= min(self._kept, count)
