"""Merged workers as people run them: each stands alone, and a balancer sends a request to the one with less to do."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from contextlib import ExitStack

import httpx

from bench.load import Answer, stream
from bench.run import Run, running

IDS = range(1000, 20000)
"""Ordinary words of the vocabulary."""


class Balancer:
    """Sends each request to the run with the fewest outstanding; of equal ones, to the one not asked for longest."""

    def __init__(self, runs: Sequence[Run], clients: Sequence[httpx.AsyncClient]) -> None:
        self._model = runs[0].model
        self._clients = clients
        self._outstanding = [0] * len(clients)
        self._turns = list(range(len(clients)))

    async def send(self, prompt: Sequence[int], max_tokens: int, answer: Answer) -> None:
        """Run one request to its end, or to the caller's cancellation."""
        chosen = min(self._turns, key=lambda i: self._outstanding[i])
        self._turns.remove(chosen)
        self._turns.append(chosen)
        self._outstanding[chosen] += 1
        try:
            await stream(self._clients[chosen], self._model, prompt, max_tokens, answer)
        finally:
            self._outstanding[chosen] -= 1


def merged_pair(
    stack: ExitStack, chunk: int, model: str, settings: Mapping[str, object] | None = None, flags: Sequence[str] = ()
) -> list[Run]:
    """Two merged workers on cores 0 and 1, each a run of its own: what balances between them is ours alone."""
    common = ["--prefill", "0", "--decode", "0", "--merged", "1", "--chunk-tokens", str(chunk), *flags]
    return [
        stack.enter_context(running(*common, "--cores", core, model=model, settings=settings)) for core in ("0", "1")
    ]


def words(count: int) -> list[int]:
    """A prompt that nobody has the KV of."""
    return random.SystemRandom().choices(IDS, k=count)
