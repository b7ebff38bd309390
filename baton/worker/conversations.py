"""Which blocks of a live attempt are worth a store: the prompt's, and its output's as they fill.

The next turn of a conversation begins with this prompt and this output, and so does a resume. So both are offered
when a stream ends, and the prompt once its first token is there. Blocks of a running stream are offered each `EACH_S`
when the worker is not busy: a resume then recomputes little, and nobody else waits for it.
"""

from __future__ import annotations

import asyncio
from weakref import WeakKeyDictionary

from baton.kv.keys import chain
from baton.v1 import worker_pb2 as pb
from baton.worker.attempts import Attempt, Attempts
from baton.worker.context import WorkerContext
from baton.worker.offers import Offers

EACH_S = 0.5
BUSY_SHARE = 0.25
"""Of `max_streams`: with more running, live streams are not offered before they end."""


class _Chain:
    """The keys of one choice's full blocks, made as they fill."""

    def __init__(self, root: bytes) -> None:
        self.keys: list[bytes] = []
        self.told = 0
        """How many were offered."""
        self._root = root

    def extend(self, tokens: list[int], size: int) -> None:
        """`tokens` are all that have KV: the same as before and more."""
        while (len(self.keys) + 1) * size <= len(tokens):
            parent = self.keys[-1] if self.keys else self._root
            start = len(self.keys) * size
            self.keys.append(chain(parent, tokens[start : start + size]))


class Conversations:
    """Looks at the attempts of this worker. `watch` is one task of the process, `ended` is called once for each."""

    def __init__(self, context: WorkerContext, attempts: Attempts, offers: Offers) -> None:
        self._context = context
        self._attempts = attempts
        self._offers = offers
        self._chains: WeakKeyDictionary[Attempt, dict[int, _Chain]] = WeakKeyDictionary()

    async def watch(self) -> None:
        """Offer what has filled, each `EACH_S`, for ever."""
        while True:
            await self._attempts.some()
            await asyncio.sleep(EACH_S)
            busy = self._busy()
            for attempt in self._attempts:
                # A prefill worker offers the prompts that it computes; until the end they are not offered here as well.
                theirs = attempt.route.mode == pb.MODE_DISAGGREGATED
                if attempt.emitted and not (busy and theirs):
                    self._offer(attempt, attempt.tokens if busy else None, skip=attempt.tokens if theirs else 0)

    def ended(self, attempt: Attempt) -> None:
        """The stream is over: all of it, prompt included."""
        if attempt.emitted and self._context.fingerprint:
            self._offer(attempt, None, again=True)
        self._chains.pop(attempt, None)

    def _busy(self) -> bool:
        stats, most = self._context.engine.stats(), self._context.spec.max_streams
        return stats.queued_prefill_tokens > 0 or stats.running > max(1.0, BUSY_SHARE * most)

    def _offer(self, attempt: Attempt, most: int | None, *, skip: int = 0, again: bool = False) -> None:
        """Full blocks of each choice among its first `most` tokens that were not offered yet (with `again`, all)."""
        request, size = attempt.request, self._context.spec.block_size
        if request.batch:  # nobody comes back to it
            return
        chains = self._chains.setdefault(attempt, {})
        for choice, output in attempt.output.items():
            one = chains.setdefault(choice, _Chain(request.key_root))
            filled = attempt.tokens + len(output) - 1  # the last token drawn has no KV yet
            filled = filled if most is None else min(filled, most)
            if filled // size > len(one.keys):
                one.extend([*request.prompt_ids, *request.emitted_ids, *output][:filled], size)
            first = 0 if again else max(one.told, skip // size)
            if first < len(one.keys):
                self._offers.offer(one.keys[first:], attempt.tenant)
            one.told = len(one.keys)
