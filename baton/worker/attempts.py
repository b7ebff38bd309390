"""The attempts that live here: who owns each, what it has sent, and the one place where they are found and ended."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from enum import StrEnum

import structlog

from baton.engine.port import FinishReason, FirstToken, Request, Reservation, TokenEvent, TokenLogprob
from baton.errors import BatonError, Reason
from baton.route import RouteReason
from baton.rpc.codec import logprob_to_pb
from baton.rpc.errors import failure
from baton.v1 import worker_pb2 as pb
from baton.worker.metrics import WorkerMetrics
from baton.worker.sessions import Session

_log = structlog.get_logger()

Key = tuple[str, int]
"""(uid, attempt)."""


class Stage(StrEnum):
    """How far an attempt is."""

    QUEUED = "queued"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    ENDED = "ended"


class Attempt:
    """One attempt that streams from here: what is known of it, and the only way to its client.

    Failure and Handback end the attempt and every choice that has not finished yet. Nothing is sent after the end.
    """

    def __init__(
        self,
        request: Request,
        session: Session,
        plan: pb.Plan,
        strict: bool,
        worker: str,
        metrics: WorkerMetrics,
        tenant: str = "",
    ) -> None:
        self.request = request
        self.session = session
        self.plan = plan
        self.strict = strict
        self.tenant = tenant
        self.stage = Stage.QUEUED
        self.started = time.monotonic()
        self.route = pb.RouteTaken(mode=plan.mode, reasons=plan.reasons, worker=worker)
        """What has happened so far; complete when the last event is sent."""
        self.reservation: Reservation | None = None
        self.task: asyncio.Task[None] | None = None
        self.open = set(request.choices)
        self.output: dict[int, list[int]] = {choice: [] for choice in request.choices}
        """Tokens sent, by choice; those emitted before this attempt are not among them."""
        self.emitted = False
        """Whether the client has a token of this attempt."""
        self._ended = asyncio.Event()
        self._error: BatonError | None = None
        self._aborted = False
        self._metrics = metrics
        self._route_told = False
        self._last_token: dict[int, float] = {}
        self._text_tokens: dict[int, int] = {}
        """Of engines that answer text: tokens of each choice so far."""

    @property
    def key(self) -> Key:
        """(uid, attempt)."""
        return self.request.uid, self.request.attempt

    @property
    def tokens(self) -> int:
        """Prompt and emitted tokens: what must have KV before the next token can be drawn."""
        return len(self.request.prompt_ids) + len(self.request.emitted_ids)

    def note_store(self, stored: pb.StoreLoad) -> None:
        """What a store brought of the prompt, wherever it was computed."""
        self.route.store, self.route.store_tier = stored.store, stored.tier
        self.route.stored_tokens, self.route.store_bytes = stored.tokens, stored.bytes
        self.route.store_seconds = stored.seconds
        if stored.reason:
            self.route.reasons.append(RouteReason.STORE_LOAD_FAILED)
            self._metrics.fallbacks.labels(RouteReason.STORE_LOAD_FAILED).inc()

    async def finished(self) -> None:
        """Wait until every choice has finished. Raises the BatonError with which the engine gave the request up."""
        await self._ended.wait()
        if self._error is not None:
            raise self._error

    def abort(self) -> None:
        """Cancel its task, once: what the task then frees must not be interrupted by a second cancel."""
        if self.task is not None and not self._aborted:
            self._aborted = True
            self.task.cancel()

    def on_engine_event(self, event: TokenEvent) -> None:
        """Pass a step's tokens of one choice on."""
        if event.error is not None:
            self._error = BatonError(event.error, event.message)
            self._ended.set()
            return
        if event.text is not None:
            self._send_text(event, event.text)
        else:
            self._send_tokens(event.choice, event.offset, event.token_ids, event.logprobs, event.finish)

    def send_first(self, first: Sequence[FirstToken], prompt_logprobs: Sequence[TokenLogprob | None] = ()) -> None:
        """Pass on the first token of every choice, drawn where the prompt was computed."""
        for i, token in enumerate(first):
            # A token that stops its choice is no output, here as in an engine's own events.
            ids = () if token.finish is FinishReason.STOP else (token.token_id,)
            logprobs = (token.logprob,) if ids and token.logprob is not None else ()
            self._send_tokens(
                token.choice,
                len(self.request.emitted_ids),
                ids,
                logprobs,
                token.finish,
                prompt_logprobs if i == 0 else (),
            )

    def send_failure(self, error: BatonError) -> None:
        """End with an error. After the end, nothing."""
        self._metrics.attempts_failed.labels(error.reason.name).inc()
        self._send_end(pb.Event(failure=failure(error)))

    def send_handback(self, reason: Reason, verified_tokens: int) -> None:
        """End by giving the request back to be routed again. After the end, nothing."""
        self._send_end(pb.Event(handback=pb.Handback(reason=reason.name, verified_tokens=verified_tokens)))

    def _send_tokens(
        self,
        choice: int,
        offset: int,
        token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprob],
        finish: FinishReason | None,
        prompt_logprobs: Sequence[TokenLogprob | None] = (),
    ) -> None:
        if self._late(choice):
            return
        self._measure(choice, len(token_ids))
        event = pb.Event(choice=choice, offset=offset)
        event.tokens.ids.extend(token_ids)
        if logprobs:
            event.tokens.logprobs.extend(logprob_to_pb(lp) for lp in logprobs)
        if prompt_logprobs:
            # The first prompt token has none: its place is kept by an empty message.
            event.prompt_logprobs.extend(logprob_to_pb(lp) if lp else pb.Logprob() for lp in prompt_logprobs)
        self.emitted = self.emitted or bool(token_ids)
        self.output[choice].extend(token_ids)
        self._send_choice(event, finish)

    def _send_text(self, told: TokenEvent, text: str) -> None:
        if self._late(told.choice):
            return
        new = max(0, told.text_tokens - self._text_tokens.get(told.choice, 0))
        self._text_tokens[told.choice] = told.text_tokens
        self._measure(told.choice, new)
        self.emitted = self.emitted or bool(text)
        if told.finish is not None:
            self.route.cached_tokens = max(self.route.cached_tokens, min(told.cached_tokens, self.tokens))
            self.route.computed_tokens = self.tokens - self.route.cached_tokens
        event = pb.Event(choice=told.choice, offset=told.offset, text=text, text_tokens=told.text_tokens)
        self._send_choice(event, told.finish)

    def _late(self, choice: int) -> bool:
        """Whether the choice has ended already: then what comes is only counted."""
        if choice in self.open:
            return False
        self._metrics.late_events.inc()
        return True

    def _send_choice(self, event: pb.Event, finish: FinishReason | None) -> None:
        if finish is not None:
            event.finish = finish.value
            self.open.discard(event.choice)
        self._send(event, last=not self.open)
        if not self.open:
            self._ended.set()

    def _send_end(self, event: pb.Event) -> None:
        if not self.open:
            return
        event.choice = min(self.open)
        event.offset = len(self.request.emitted_ids)
        self.open.clear()
        self._send(event, last=True)

    def _send(self, event: pb.Event, *, last: bool) -> None:
        event.uid, event.attempt = self.key
        if last or not self._route_told:
            event.route.CopyFrom(self.route)
            self._route_told = True
        self.session.push(event)

    def _measure(self, choice: int, tokens: int) -> None:
        now = time.monotonic()
        before = self._last_token.get(choice)
        if not tokens:
            return
        self._last_token[choice] = now
        self._metrics.output_tokens.inc(tokens)
        if before is not None:
            self._metrics.itl_seconds.observe((now - before) / tokens)
        elif not self.emitted:
            self._metrics.ttft_seconds.observe(now - self.started)


class Attempts:
    """The live attempts of this process by (uid, attempt). `on_change` is called when one comes or goes."""

    def __init__(self, metrics: WorkerMetrics, on_change: Callable[[], None] = lambda: None) -> None:
        self._live: dict[Key, Attempt] = {}
        self._metrics = metrics
        self._on_change = on_change
        self._idle = asyncio.Event()
        self._idle.set()
        self._some = asyncio.Event()

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[Attempt]:
        return iter(list(self._live.values()))

    @property
    def batch(self) -> int:
        """Outputs of the batch lane that have not ended."""
        return sum(len(attempt.open) for attempt in self._live.values() if attempt.request.batch)

    def add(self, attempt: Attempt) -> None:
        """Take it in. Raises BatonError DUPLICATE_REQUEST while one of the same (uid, attempt) lives."""
        if attempt.key in self._live:
            raise BatonError(Reason.DUPLICATE_REQUEST, f"attempt {attempt.key[1]} of {attempt.key[0]} is running here")
        self._live[attempt.key] = attempt
        self._idle.clear()
        self._some.set()
        self._on_change()

    def remove(self, attempt: Attempt) -> None:
        """Let it go. Idempotent."""
        if self._live.get(attempt.key) is attempt:
            del self._live[attempt.key]
            attempt.stage = Stage.ENDED
            self._on_change()
        if not self._live:
            self._idle.set()
            self._some.clear()

    def get(self, uid: str, attempt: int) -> Attempt | None:
        """The live attempt of that name."""
        return self._live.get((uid, attempt))

    def of(self, session: Session) -> list[Attempt]:
        """The session's live attempts."""
        return [a for a in self._live.values() if a.session is session]

    async def some(self) -> None:
        """Wait until one lives."""
        await self._some.wait()

    async def idle(self) -> None:
        """Wait until none lives."""
        await self._idle.wait()

    def dispatch(self, events: Sequence[TokenEvent]) -> None:
        """Pass one step's events on: all that one session gets from here become one frame."""
        for event in events:
            attempt = self._live.get((event.uid, event.attempt))
            if attempt is None:
                self._metrics.late_events.inc()
                continue
            try:
                attempt.on_engine_event(event)
            except Exception as error:  # an event that cannot be: its own attempt ends, and nobody else's
                _log.exception("an engine's event could not be passed on", uid=event.uid)
                attempt.send_failure(BatonError(Reason.ENGINE_FAILED, f"{type(error).__name__} in an engine's event"))
                attempt.abort()
