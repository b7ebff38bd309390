"""One HTTP request: a generation for each prompt, all their outputs in one stream of pieces."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from baton.engine import needs
from baton.errors import BatonError, Reason
from baton.model.tokenizer import Tokenizer
from baton.v1 import worker_pb2
from baton.v1.worker_pb2 import Logprob
from services.frontend.chunks import Usage
from services.frontend.detokenise import ChoiceText, Piece, Show
from services.frontend.inbox import Inbox
from services.frontend.prompt import Prompt
from services.frontend.request import Backend, Broken, Generation, Item, Output, Unmended, Work
from services.frontend.turn import Turn

STARTS = 8
"""Prompts of one request that are placed at the same time; and outputs of one whose worker was lost."""
_MODES = {
    worker_pb2.MODE_DISAGGREGATED: "disaggregated",
    worker_pb2.MODE_MERGED: "merged",
    worker_pb2.MODE_LOCAL: "local",
}


@dataclass(frozen=True)
class Ask:
    """One prompt with how to draw from it. `max_tokens` is what may be shown: 0 draws one token and hides it."""

    prompt: Prompt
    sampling: worker_pb2.Sampling
    max_tokens: int
    stops: Sequence[str]
    show: Show = Show()  # noqa: RUF009 - frozen
    merged_only: bool = False
    shown: Mapping[int, str] = field(default_factory=dict)
    """Control tokens that are shown as text."""

    def work(self, uid: str, n: int, deadline: float, turn: Turn | None = None) -> Work:
        """It, `n` times, as a generation does it until `deadline` (`time.time()` seconds); in the batch lane, with its
        turn."""
        shows = {needs.TOKEN_IDS: self.show.ids, needs.SPECIAL_TOKENS: self.show.special}
        named = frozenset(name for name, wanted in shows.items() if wanted)
        return Work(uid, self.prompt, self.sampling, n, deadline, self.merged_only, named, turn)


class IndexedPiece(NamedTuple):
    """A piece of one output; outputs count prompt by prompt, choice by choice. Its first has `prompt_logprobs`."""

    output: int
    piece: Piece
    prompt_logprobs: Sequence[Logprob]


class Call:
    """Every output of one HTTP request. `close` on every path."""

    def __init__(
        self,
        uid: str,
        asks: Sequence[Ask],
        n: int,
        deadline: float,
        tokenizer: Tokenizer,
        backend: Backend,
        turns: Callable[[int], Turn] | None = None,
        *,
        promised: bool = False,
    ) -> None:
        """`turns` makes the turn of a prompt with so many outputs: then the call is of the batch lane. `promised`: its
        client has been told that it will be answered, and does not come again."""
        self._inbox: Inbox[Item] = Inbox()
        self._deadline = deadline
        self._n = n
        self._asks = asks
        self._background = backend.background
        self._few = asyncio.Semaphore(STARTS)
        self._mending: set[asyncio.Task[None]] = set()
        self._generations = [
            Generation(
                ask.work(f"{uid}-{i}" if len(asks) > 1 else uid, n, deadline, turns(n) if turns is not None else None),
                backend,
                self._inbox,
                self._told,
                self._placed,
            )
            for i, ask in enumerate(asks)
        ]
        self._first_index = {id(generation): i * n for i, generation in enumerate(self._generations)}
        self._texts = [
            ChoiceText(
                tokenizer,
                stops=ask.stops,
                ends=ends(ask.sampling, backend.eos_ids),
                min_tokens=ask.sampling.min_tokens,
                max_tokens=ask.max_tokens,
                shown=ask.shown,
                show=ask.show,
            )
            for ask in asks
            for _ in range(n)
        ]
        self._metrics = backend.metrics
        self._last = [0.0] * len(self._texts)
        self._scores: dict[int, Sequence[Logprob]] = {}  # of each prompt: workers tell them with one choice alone
        self._begun: set[int] = set()
        self._batch = turns is not None
        self._limited = backend.ttft_slo_s > 0
        self._promised = promised

    @property
    def tenant(self) -> str:
        """Whose it is; "": nobody's in particular."""
        return self._asks[0].prompt.tenant

    @property
    def outputs(self) -> int:
        """How many outputs there are: prompts times choices."""
        return len(self._texts)

    @property
    def finished(self) -> bool:
        """Whether every output has ended."""
        return all(text.finish for text in self._texts)

    async def start(self) -> None:
        """Submit everything, a few prompts at a time. Raises BatonError when one finds no worker.

        Where a first token may be refused for coming late, the first prompt is placed alone: the others would be late
        behind each other on any fleet.
        """

        async def start(generation: Generation) -> None:
            async with self._few:
                await generation.start()

        left = self._generations
        if self._limited or len(left) == 1:
            await left[0].start()
            left = left[1:]
        tasks = [asyncio.create_task(start(generation)) for generation in left]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def pieces(self) -> list[IndexedPiece]:
        """The next pieces, at least one. Repairs what breaks meanwhile; raises BatonError when that cannot be."""
        out: list[IndexedPiece] = []
        while not out:
            for item in await self._inbox.take(self._deadline):
                match item:
                    case Output():
                        out += self._read(item)
                    case Broken():
                        self._mend(item)
                    case Unmended():
                        raise item.error
        return out

    def route_header(self) -> str:
        """`x-baton-route`: the plan of the first prompt."""
        plan = self._generations[0].plan
        mode = _MODES.get(plan.mode, "unknown")
        parts = [mode]
        if plan.mode == worker_pb2.MODE_DISAGGREGATED:
            parts += [f"prefill={plan.prefill.id}", f"decode={plan.worker.id}"]
        else:
            parts.append(f"{'worker' if plan.mode == worker_pb2.MODE_MERGED else 'decode'}={plan.worker.id}")
        if plan.reasons:
            parts.append(f"reasons={','.join(plan.reasons)}")
        return "; ".join(parts)

    def usage(self) -> Usage:
        """Tokens so far: each prompt once, every output."""
        prompt = sum(len(ask.prompt.ids) for ask in self._asks)
        output = sum(text.tokens for text in self._texts)
        return Usage(prompt, output, prompt + output, {"cached_tokens": self._cached()})

    def story(self) -> dict[str, Any]:
        """What really happened: the `baton` field of the last chunk or the body."""
        first = self._generations[0]
        mode = first.route.mode if first.route is not None else first.plan.mode
        worker = first.route.worker if first.route is not None else ""
        prefill = first.route.prefill if first.route is not None else first.plan.prefill.id
        return {
            "mode": _MODES.get(mode, "unknown"),
            "reasons": self.reasons(),
            "attempts": sum(generation.attempts for generation in self._generations),
            "kv_bytes": sum(generation.kv_bytes for generation in self._generations),
            "cached_tokens": self._cached(),
            "store": first.route.store if first.route is not None else "",
            "stored_tokens": first.route.stored_tokens if first.route is not None else 0,
            "worker": worker or first.plan.worker.id,
            "prefill": prefill,
        }

    def reasons(self) -> list[str]:
        """Every RouteReason of the request, in order, once."""
        return list(dict.fromkeys(reason for generation in self._generations for reason in generation.reasons))

    def cached(self, output: int) -> int:
        """Prompt tokens of an output that were found in a cache; 0 while that is not known."""
        return self._generations[output // self._n].cached_tokens or 0

    def close(self, reason: Reason | None = None) -> None:
        """End what still runs."""
        for task in self._mending:
            task.cancel()
        for generation in self._generations:
            generation.close(reason)

    def _mend(self, broken: Broken) -> None:
        """Beside the reading: other outputs go on while a place for this one is looked for."""
        task = self._background.spawn(self._mended(broken), f"mend {broken.leg.key}")
        self._mending.add(task)
        task.add_done_callback(self._mending.discard)

    async def _mended(self, broken: Broken) -> None:
        try:
            async with self._few:
                await broken.leg.generation.mend(broken)
        except BatonError as error:
            self._inbox.put(Unmended(error))
        except Exception as error:
            self._inbox.put(Unmended(error))
            raise

    def _read(self, item: Output) -> list[IndexedPiece]:
        index = self._first_index[id(item.generation)] + item.choice
        text = self._texts[index]
        if text.finish:
            return []
        if item.text is not None:
            piece = text.push_text(item.text, item.text_tokens, item.finish)
        else:
            piece = text.push(item.ids, item.logprobs, item.finish)
        if piece.finish and not item.finish:
            item.generation.end_choice(item.choice)
        if (item.ids or item.text) and not self._batch:  # one that gives way has gaps that nobody feels
            now = time.monotonic()
            if self._last[index]:
                self._metrics.itl.observe(now - self._last[index])
            self._last[index] = now
        return [IndexedPiece(index, piece, self._scored(item, index))]

    def _scored(self, item: Output, index: int) -> Sequence[Logprob]:
        """The prompt's log probabilities, once for each of its choices."""
        prompt = id(item.generation)
        if item.prompt_logprobs:
            self._scores[prompt] = item.prompt_logprobs
        if index in self._begun:
            return ()
        self._begun.add(index)
        return self._scores.get(prompt, ())

    def _told(self) -> bool:
        """Whether the client has something of any output, or a promise of it."""
        return self._promised or any(generation.begun for generation in self._generations)

    def _placed(self) -> bool:
        """Whether a worker has been asked for any of it."""
        return any(generation.attempts for generation in self._generations)

    def _cached(self) -> int:
        return sum(generation.cached_tokens or 0 for generation in self._generations)


def ends(sampling: worker_pb2.Sampling, eos_ids: Sequence[int]) -> frozenset[int]:
    """Token ids that end an output under these parameters."""
    return frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else frozenset(eos_ids))
