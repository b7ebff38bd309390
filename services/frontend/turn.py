"""What a request of the batch lane asks before each attempt: may it run now, and where."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from baton.errors import Reason

MERGED = "merged"
"""A need: the prompt is computed where the output is."""


class Turn(Protocol):
    """The place of one prompt's request. `leave` on every path."""

    @property
    def placed(self) -> bool:
        """Whether it has its place."""

    def bind(
        self,
        give_way: Callable[[], None],
        begun: Callable[[], bool],
        needs: Sequence[str],
        tokens: Callable[[], int],
    ) -> None:
        """What is called when the place is taken away: the request's attempts end, and it asks again. `begun`: whether
        its prompt is computed, and it only generates. `needs`: what not every worker can do. `tokens`: of its prompt
        and output, or of the longest of its outputs, which not every worker has room for."""

    async def wait(self) -> Collection[str]:
        """Wait for a place; ids of the workers that are none. At once for one that has its place still."""

    async def refused(self, reason: Reason) -> None:
        """The place was none: give it up. Returns when it is time to ask again."""

    def leave(self) -> None:
        """The request has ended. Idempotent."""
