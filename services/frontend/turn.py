"""What a request of the batch lane asks before each attempt: may it run now, and where; and when it comes again."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from baton.errors import BatonError, Reason

NO_PLACE = frozenset(
    {
        Reason.NO_CAPACITY,
        Reason.DRAINING,
        Reason.DECODE_UNAVAILABLE,
        Reason.PREFILL_UNAVAILABLE,
        Reason.ROUTER_UNAVAILABLE,
        Reason.VERSION_MISMATCH,
        Reason.KV_LAYOUT_MISMATCH,
    }
)
"""Refusals for want of room, or of somebody who can: no fault of what is refused, of which nothing was begun."""
MERGED = "merged"
"""A need: the prompt is computed where the output is."""


@dataclass(frozen=True)
class Asking:
    """What a place has to know of its request."""

    give_way: Callable[[], None]
    """Called when the place is taken away: the request's attempts end, and it asks again."""
    begun: Callable[[], bool]
    """Whether its prompt is computed, and it only generates."""
    needs: Sequence[str]
    """What not every worker can do."""
    tokens: Callable[[], int]
    """Of its prompt and output, or of the longest of its outputs: not every worker has room for them."""


class Turn(Protocol):
    """The place of one prompt's request. `leave` on every path."""

    @property
    def placed(self) -> bool:
        """Whether it has its place."""

    def bind(self, asking: Asking) -> None:
        """Who asks, before it waits."""

    async def wait(self) -> Collection[str]:
        """Wait for a place; ids of the workers that are none. At once for one that has its place still."""

    async def refused(self, reason: Reason) -> None:
        """The place was none: give it up. Returns when it is time to ask again."""

    def leave(self) -> None:
        """The request has ended. Idempotent."""


async def turned_away(turn: Turn | None, error: BatonError, deadline: float) -> bool:
    """Whether that is a refusal of the batch lane's: then it comes again, however often, as long as it has time (until
    `deadline`, Unix seconds). Returns when it is time to ask again."""
    if turn is None or error.reason not in NO_PLACE or time.time() >= deadline:
        return False
    await turn.refused(error.reason)
    return True
