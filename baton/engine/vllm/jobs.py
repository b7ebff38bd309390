"""What runs in vLLM for our reservations: one job for each choice, and what its output becomes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from baton.engine.feeds import StepFeed
from baton.engine.port import (
    EngineSpec,
    FinishReason,
    FirstToken,
    PrefillDone,
    PrefillEvent,
    SealedBlocks,
    TokenEvent,
)
from baton.engine.vllm import messages as m
from baton.engine.vllm.requests import sampling
from baton.engine.vllm.reservation import VllmReservation
from baton.engine.vllm.staging import Staging
from baton.engine.vllm.stream import Delta, Stream
from baton.errors import BatonError, Reason

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm.v1.engine.async_llm import AsyncLLM

SAVED_S = 30.0
"""How long a computed prompt's last block may take to reach staging: a memcpy."""


@dataclass(eq=False)
class _Job:
    reservation: VllmReservation
    computes: int
    """Prompt tokens that staging does not bring."""
    since: float
    stream: Stream = field(init=False)
    failed: Callable[[BatonError], None] = field(init=False)
    started: bool = False
    """Whether its first token is there."""
    saved: dict[int, int] = field(default_factory=dict)
    """By rank: how many of the prompt's blocks are in staging."""
    length: int = 0
    """Tokens of prompt and output so far."""
    fills: int = 0
    """Whole blocks of prompt and output that may come to be, if the output is wanted in staging."""
    filled: int = 0
    """How many of them are in staging, or have had their place there since the start."""
    output: set[int] = field(default_factory=set)
    """Ranks that have filled the spare slot."""
    ended: set[int] = field(default_factory=set)
    """Ranks that touch nothing for it any more."""
    over: bool = False
    """Its output has ended, or nobody wants it."""
    broken: bool = False
    """No token could be drawn: its KV is not trusted either."""


class Jobs:
    """`finished` is called when a reservation has nothing more to generate, `spare` tells vLLM of (job, slot) for the
    job's next block of output."""

    def __init__(
        self,
        llm: AsyncLLM,
        spec: EngineSpec,
        staging: Staging,
        steps: StepFeed,
        ranks: int,
        finished: Callable[[VllmReservation], None],
        spare: Callable[[int, int], None],
    ) -> None:
        self.computed_tokens = 0
        self.output_tokens = 0
        self.unstaged_blocks = 0
        """Output blocks that were full and are not in staging: the pool was short, or the output ended too soon."""
        self._llm = llm
        self._spec = spec
        self._staging = staging
        self._steps = steps
        self._ranks = ranks
        self._finished = finished
        self._spare = spare
        self._jobs: dict[int, _Job] = {}
        self._last = 0
        self._open: dict[VllmReservation, set[int]] = {}
        """Choices that still generate."""
        self._inboxes: dict[VllmReservation, asyncio.Queue[tuple[int, Delta] | BatonError | None]] = {}
        self._batch: list[TokenEvent] = []

    # ---- what runs

    @property
    def _running(self) -> list[_Job]:
        return [job for job in self._jobs.values() if not job.over]

    @property
    def running(self) -> int:
        """Jobs that have drawn a token."""
        return sum(job.started for job in self._running)

    @property
    def waiting(self) -> int:
        """Jobs that have not."""
        return sum(not job.started for job in self._running)

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens of those."""
        return sum(job.computes for job in self._running if not job.started)

    @property
    def oldest(self) -> float:
        """`time.time()` of the oldest running job's start; 0 when idle."""
        return min((job.since for job in self._running), default=0.0)

    def _start(
        self,
        reservation: VllmReservation,
        choice: int,
        drawn: Sequence[int],
        *,
        tokens: int | None,
        saves: bool,
        take: Callable[[_Job, Delta], None],
        failed: Callable[[BatonError], None],
    ) -> None:
        """`drawn`: output tokens of the choice beyond the reservation's prompt. `tokens`: as `sampling` takes it."""
        request, room, size = reservation.request, reservation.room, self._spec.block_size
        self._last += 1
        number = self._last
        prompt = [*reservation.prompt, *drawn]
        logprobs = tokens == 1 and request.sampling.prompt_logprobs is not None
        ready = 0 if logprobs else min(room.ready, (len(prompt) - 1) // size)
        slots = list(room.slots)
        params = sampling(
            request,
            choice,
            job=number,
            drawn=len(request.emitted_ids) + len(drawn),
            tokens=tokens,
            most=max(1, self._spec.max_context - len(prompt)),
            slots=slots,
            ready=ready,
            saves=saves and not room.running and room.ready < len(room.slots),
            parent=room.keys[len(slots) - 1] if slots else request.key_root,
            eos_token_ids=self._spec.eos_token_ids,
        )
        room.running.add(number)

        # Its end on the ranks and its last output come on two ways: whichever is first, this is the job they mean.
        job = _Job(reservation, len(prompt) - ready * size, time.time())
        self._jobs[number] = job
        job.length, job.filled = len(prompt), len(slots)
        if tokens is None and not request.batch:  # nobody comes back to the batch lane's
            # The last token has no KV.
            job.fills = (len(prompt) + (params.max_tokens or 1) - 1) // size

        def got(delta: Delta) -> None:
            if not job.started:
                job.started = True
                self.computed_tokens += max(0, len(prompt) - delta.cached_tokens)
            job.over = job.over or delta.finish is not None
            job.length += len(delta.token_ids)
            take(job, delta)
            self._make_room(number, job)

        def fell(error: BatonError) -> None:
            job.over = True
            if job.stream.refused:
                self._end(number)
            failed(error)

        job.failed = fell
        job.stream = Stream(self._llm, prompt, params, request.key_root.hex(), number, got, fell)

    def _make_room(self, number: int, job: _Job) -> None:
        """A slot for its next block of output, if it has none and will want one."""
        room = job.reservation.room
        if job.over or number in room.spares or job.filled >= job.fills:
            return
        slot = self._staging.spare(room, number)
        if slot is not None:
            self._spare(number, slot)

    def stop(self, reservation: VllmReservation) -> None:
        """Nobody wants what runs for it any more."""
        self._open.pop(reservation, None)
        for job in self._jobs.values():
            if job.reservation is reservation:
                job.over = True
                job.stream.stop()

    def stop_all(self) -> None:
        """Nobody wants anything any more."""
        for job in self._jobs.values():
            job.over = True
            job.stream.stop()

    def fail(self, error: BatonError) -> None:
        """vLLM is gone."""
        for inbox in self._inboxes.values():
            inbox.put_nowait(error)
        self.stop_all()

    # ---- what vLLM's processes say

    def take(self, message: m.Sealed | m.Output | m.Ended | m.Broken) -> None:
        """A rank's word on a job."""
        job = self._jobs.get(message.job)
        if job is None:
            return
        if isinstance(message, m.Broken):
            job.broken = True
            job.stream.stop()
            if not job.over:
                job.failed(BatonError(Reason.ENGINE_FAILED, message.message))
        elif isinstance(message, m.Sealed):
            job.saved[message.rank] = message.first + message.count
            if len(job.saved) == self._ranks:
                self._staging.seal(job.reservation.room, min(job.saved.values()))
                inbox = self._inboxes.get(job.reservation)
                if inbox is not None:
                    inbox.put_nowait(None)
        elif isinstance(message, m.Output):
            job.output.add(message.rank)
            if len(job.output) == self._ranks and not job.broken:
                job.output.clear()
                job.filled += 1
                self._staging.seal_output(job.reservation.room, message.job, message.key)
                self._make_room(message.job, job)
        else:
            job.ended.add(message.rank)
            if len(job.ended) == self._ranks:
                self._end(message.job)

    def _end(self, number: int) -> None:
        job = self._jobs.pop(number, None)
        if job is not None:
            if job.fills:
                self.unstaged_blocks += max(0, (job.length - 1) // self._spec.block_size - job.filled)
            self._staging.ended(job.reservation.room, number)

    # ---- prefill

    async def prefill(self, reservation: VllmReservation) -> AsyncIterator[PrefillEvent]:
        """See `Engine.prefill`."""
        request, room = reservation.request, reservation.room
        inbox: asyncio.Queue[tuple[int, Delta] | BatonError | None] = asyncio.Queue()  # bounded by the prompt's blocks
        self._inboxes[reservation] = inbox
        hits = room.ready
        announced = 0
        got: dict[int, Delta] = {}
        try:
            if hits:
                yield self._announce(reservation, 0)
                announced = hits
            for i, choice in enumerate(request.choices):

                def take(job: _Job, delta: Delta, choice: int = choice) -> None:
                    inbox.put_nowait((choice, delta))

                self._start(reservation, choice, (), tokens=1, saves=i == 0, take=take, failed=inbox.put_nowait)
            while len(got) < len(request.choices) or room.ready < len(room.slots):
                limit = SAVED_S if len(got) == len(request.choices) else None
                message = await asyncio.wait_for(inbox.get(), limit)
                if isinstance(message, BatonError):
                    raise message
                if message is not None:
                    got[message[0]] = message[1]
                if (ready := room.ready) > announced:
                    yield self._announce(reservation, announced)
                    announced = ready  # more may have been saved while that was on its way
            yield self._done(reservation, got, hits * self._spec.block_size)
        except TimeoutError:
            raise BatonError(Reason.ENGINE_FAILED, "vLLM computed a prompt and did not save it") from None
        finally:
            del self._inboxes[reservation]
            if len(got) < len(request.choices):
                self.stop(reservation)

    def _announce(self, reservation: VllmReservation, first: int) -> SealedBlocks:
        room = reservation.room
        return SealedBlocks(first, tuple(self._staging.handle(slot) for slot in room.slots[first : room.ready]))

    def _done(self, reservation: VllmReservation, got: dict[int, Delta], staged: int) -> PrefillDone:
        """`staged` prompt tokens were in staging; vLLM's own cache may have had more."""
        reservation.cached_tokens = len(reservation.prompt)
        first = []
        for choice in reservation.request.choices:
            delta = got[choice]
            if delta.stopped_by is not None:
                first.append(FirstToken(choice, delta.stopped_by, delta.stop_logprob, FinishReason.STOP))
                continue
            logprob = delta.logprobs[0] if delta.logprobs else None
            first.append(FirstToken(choice, delta.token_ids[0], logprob, self._budget(reservation)))
        delta = got[reservation.request.choices[0]]
        beyond = max(0, delta.cached_tokens - staged)
        return PrefillDone(tuple(first), reservation.hit_tokens + beyond, delta.prompt_logprobs)

    def _budget(self, reservation: VllmReservation) -> FinishReason | None:
        """Whether one more token ends a choice, whichever it is. The context that counts is that of who goes on."""
        output = len(reservation.request.emitted_ids) + 1
        return FinishReason.LENGTH if output >= reservation.request.sampling.max_tokens else None

    # ---- generate

    def generate(self, reservation: VllmReservation, first: Sequence[FirstToken]) -> None:
        """See `Engine.generate`."""
        known = {token.choice: token for token in first}
        choices = [c for c in reservation.request.choices if c not in known or known[c].finish is None]
        if not choices:
            self._finished(reservation)
            return
        self._open[reservation] = set(choices)
        for i, choice in enumerate(choices):
            drawn = [known[choice].token_id] if choice in known else []
            offset = len(reservation.request.emitted_ids) + len(drawn)
            take = partial(self._generated, choice, [offset])
            failed = partial(self._broke, reservation, choice)
            self._start(reservation, choice, drawn, tokens=None, saves=i == 0, take=take, failed=failed)

    def _generated(self, choice: int, offset: list[int], job: _Job, delta: Delta) -> None:
        request = job.reservation.request
        self._post(
            TokenEvent(request.uid, request.attempt, choice, offset[0], delta.token_ids, delta.logprobs, delta.finish)
        )
        offset[0] += len(delta.token_ids)
        self.output_tokens += len(delta.token_ids)
        left = self._open.get(job.reservation)
        if delta.finish is not None and left is not None:
            left.discard(choice)
            if not left:
                self._finished(job.reservation)

    def _broke(self, reservation: VllmReservation, choice: int, error: BatonError) -> None:
        request = reservation.request
        self._post(TokenEvent(request.uid, request.attempt, choice, 0, error=error.reason, message=error.message))
        self._finished(reservation)

    def _post(self, event: TokenEvent) -> None:
        """Events of one turn of the loop are one step's: vLLM's output of a step arrives at once."""
        if not self._batch:
            asyncio.get_running_loop().call_soon(self._flush)
        self._batch.append(event)

    def _flush(self) -> None:
        batch, self._batch = self._batch, []
        with suppress(asyncio.QueueFull):
            self._steps.put_nowait(batch)
            return
        self._steps.fail(BatonError(Reason.ENGINE_FAILED, "nobody takes the engine's events"))
