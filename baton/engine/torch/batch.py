"""What one forward pass is asked to compute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Logits = Literal["none", "last", "all"]


@dataclass(frozen=True)
class SequenceSlice:
    """The next tokens of one sequence: one when decoding, a chunk of a prompt when prefilling.

    Position `start + i` is that of `token_ids[i]`; KV of the positions before is in place. `block_table` lists slots in
    order and covers `start + len(token_ids)` positions; the new positions' slots belong to this sequence alone.
    `logits` says which of the new positions' next-token distributions are wanted, `summed` whether the sum of their
    last hidden states is.
    """

    token_ids: Sequence[int]
    start: int
    block_table: Sequence[int]
    logits: Logits = "last"
    summed: bool = False

    @property
    def end(self) -> int:
        """Positions with KV after the pass."""
        return self.start + len(self.token_ids)


@dataclass(frozen=True)
class Batch:
    """Sequences computed together, decoding and prefilling mixed as they come. None may be empty."""

    sequences: Sequence[SequenceSlice]

    @property
    def rows(self) -> int:
        """Tokens to compute."""
        return sum(len(s.token_ids) for s in self.sequences)
