"""The life of one prompt's request: Route, Submit, events; a failure means Route again, from what the client has.

A *leg* is one attempt on one worker, for one or more choices. An event is taken only from the leg that a choice is on
now and only at the offset that the choice expects, so nothing is doubled and nothing skipped. When a leg breaks, its
choices without a token start again together, each other one is resumed alone with the tokens it has. Budgets stay
absolute: `Sampling` never changes between attempts.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import structlog

from baton.engine.needs import needs
from baton.errors import BatonError, Reason
from baton.route import RouteReason
from baton.rpc.codec import sampling_from_pb
from baton.rpc.tasks import Background
from baton.v1 import registry_pb2, router_pb2, worker_pb2
from services.frontend.inbox import Inbox
from services.frontend.lately import AWAY_S, LONG_AWAY_S
from services.frontend.metrics import FrontendMetrics
from services.frontend.placed import Placed
from services.frontend.prompt import Prompt, Prompts
from services.frontend.route import RouterClient
from services.frontend.session import Session
from services.frontend.sessions import Sessions
from services.frontend.turn import MERGED, NO_PLACE, Asking, Turn, turned_away

MAX_FAILURES = 6
"""Attempts in a row of one output that may fail without one new token."""
START_PATIENCE_S = 3.0
"""How long a request without a token waits when nobody is there to take it (not when they are full)."""
NO_ATTEMPT = -1
_RETRY_S = (0.1, 1.0)

_log = structlog.get_logger()

_UNREACHABLE = frozenset({Reason.DECODE_UNAVAILABLE, Reason.SESSION_LOST})
_NOBODY = _UNREACHABLE | {Reason.ROUTER_UNAVAILABLE}
_AWAY = frozenset({Reason.DECODE_UNAVAILABLE})
_TOO_MUCH = frozenset({Reason.INVALID_REQUEST, Reason.CONTEXT_LENGTH_EXCEEDED})
"""What a router says when those that are left cannot do what is asked, or not at this length."""


@dataclass(frozen=True)
class Backend:
    """What a request needs of the process."""

    card: registry_pb2.ModelCard
    eos_ids: tuple[int, ...]
    prompts: Prompts
    router: RouterClient
    sessions: Sessions
    background: Background
    metrics: FrontendMetrics
    fallback: worker_pb2.Fallback.ValueType
    resume_patience_s: float = 30.0
    """How long an output that has begun waits for a worker that can go on with it."""
    ttft_slo_s: float = 0.0
    """Of a request that nobody has anything of yet: refuse it when its first token would come later; 0: do not."""
    placed: Placed = field(default_factory=Placed)


@dataclass(frozen=True)
class Work:
    """What is asked: one prompt, how to draw, and how often."""

    uid: str
    prompt: Prompt
    sampling: worker_pb2.Sampling
    choices: int
    deadline: float
    merged_only: bool = False
    shows: frozenset[str] = frozenset()
    """What is shown of the tokens, by the names of `baton.engine.needs`."""
    turn: Turn | None = None
    """Of the batch lane: when and where it may run."""

    @property
    def needs(self) -> list[str]:
        """What of it not every engine can do."""
        return sorted(needs(sampling_from_pb(self.sampling)) | self.shows)


@dataclass(slots=True)
class Choice:
    """One output: the tokens received so far, and the attempt that may add to them."""

    index: int
    received: list[int] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    """What an attempt that answers text has given, until it breaks and `received` takes it in."""
    characters: int = 0
    text_tokens: int = 0
    """Of `text`."""
    attempt: int = NO_ATTEMPT
    finished: bool = False
    ended_here: bool = False
    """The frontend ended it: the worker does not know."""

    @property
    def begun(self) -> bool:
        """Whether the client has something of it."""
        return bool(self.received or self.text)


@dataclass(frozen=True, slots=True)
class Output:
    """New tokens of one choice, for the client; or `text` that stands for `text_tokens` of them."""

    generation: Generation
    choice: int
    ids: Sequence[int]
    logprobs: Sequence[worker_pb2.Logprob]
    finish: str
    prompt_logprobs: Sequence[worker_pb2.Logprob] = ()
    text: str | None = None
    text_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Broken:
    """A leg has ended without finishing its choices."""

    leg: Leg
    error: BatonError
    handback: bool
    at: float
    """`time.monotonic()` of its end."""
    silent_s: float
    """How long its worker had given no sign of progress by then."""

    @property
    def outgrown(self) -> bool:
        """Whether its output has come to the end of its worker's context."""
        return self.error.reason is Reason.CONTEXT_LENGTH_EXCEEDED and self.leg.first_token > 0


@dataclass(frozen=True, slots=True)
class Unmended:
    """Nobody could go on with what a leg left: the request ends with `error`."""

    error: Exception


Item = Output | Broken | Unmended


@dataclass(frozen=True, slots=True)
class Row:
    """Attempts in a row that the same outputs lost without a new token. `since`: `time.monotonic()` of the first loss.

    Of each leg its own: eight outputs whose worker dies under them have failed once each, and not eight times.
    """

    failures: int = 0
    since: float = 0.0

    def longer(self, at: float) -> Row:
        """With one more, lost at `at`."""
        return Row(self.failures + 1, self.since or at)


NOTHING_LOST = Row()


class Leg:
    """One attempt on one worker, as the session sees it."""

    def __init__(
        self,
        generation: Generation,
        attempt: int,
        choices: tuple[int, ...],
        plan: worker_pb2.Plan,
        session: Session,
        row: Row,
    ) -> None:
        """`row`: what its choices have lost before it."""
        self.generation = generation
        self.attempt = attempt
        self.choices = choices
        self.plan = plan
        self.session = session
        self.route: worker_pb2.RouteTaken | None = None
        self.started = time.monotonic()
        self.first_token = 0.0
        self.tokens = 0
        self.resumes: Broken | None = None
        """What it goes on from; None when the client has nothing yet."""
        self._row = row

    @property
    def row(self) -> Row:
        """What its choices have lost in a row; nothing once it has given a token."""
        return NOTHING_LOST if self.first_token else self._row

    @property
    def key(self) -> tuple[str, int]:
        """What the worker knows it by."""
        return self.generation.work.uid, self.attempt

    def on_event(self, event: worker_pb2.Event) -> None:
        """From the session: pass it on with the leg it belongs to."""
        self.generation.on_event(self, event)

    def on_lost(self, error: BatonError) -> None:
        """From the session: this attempt is gone."""
        self.generation.on_broken(self, error, handback=False)


class Generation:
    """One prompt's request over all its attempts. `close` on every path."""

    def __init__(
        self,
        work: Work,
        backend: Backend,
        inbox: Inbox[Item],
        told: Callable[[], bool] = lambda: False,
        placed: Callable[[], bool] = lambda: False,
    ) -> None:
        """`told`: whether the client has something of this or another prompt of the same answer, if only a promise;
        `placed`: whether a prompt of it has had an attempt."""
        self.work = work
        self.plan = worker_pb2.Plan()
        """The latest plan that a worker accepted."""
        self.attempts = 0
        """Attempts submitted so far; they are numbered from 0."""
        self.reasons: list[str] = []
        self.kv_bytes = 0
        self.route: worker_pb2.RouteTaken | None = None
        self.cached_tokens: int | None = None
        """Prompt tokens found in a cache by the attempt that began the output; None before it has ended."""
        self._backend = backend
        self._inbox = inbox
        self._choices = [Choice(i) for i in range(work.choices)]
        self._legs: dict[int, Leg] = {}
        self._exclude: set[str] = set()
        self._told = told
        self._placed = placed
        self._away_s = AWAY_S if work.turn is None else LONG_AWAY_S
        self._mending = asyncio.Lock()
        if work.turn is not None:
            needs = [*work.needs, *([MERGED] if work.merged_only else [])]
            work.turn.bind(Asking(self._give_way, self._generating, needs, self._tokens))

    @property
    def finished(self) -> bool:
        """Whether every choice has ended."""
        return all(choice.finished for choice in self._choices)

    @property
    def begun(self) -> bool:
        """Whether the client has something of a choice."""
        return any(choice.begun for choice in self._choices)

    async def start(self) -> None:
        """Place and submit every choice. Raises BatonError when no worker takes it."""
        await self._launch(tuple(range(self.work.choices)), ())

    async def mend(self, broken: Broken) -> None:
        """Go on elsewhere with what a broken leg left, one leg after another: attempts are numbered as they are placed.

        Raises BatonError when that cannot be, with the reason.
        """
        async with self._mending:
            await self._mend(broken)

    async def _mend(self, broken: Broken) -> None:
        theirs = [self._choices[i] for i in broken.leg.choices]
        left = [choice for choice in theirs if not choice.finished and choice.attempt == NO_ATTEMPT]
        for choice in left:
            self._finish_if_over(choice)
        left = [choice for choice in left if not choice.finished]
        if not left:
            return
        fresh = tuple(choice.index for choice in left if not choice.begun)
        begun = [choice for choice in left if choice.begun]
        refused = not broken.handback and await self._turned_away(broken.error)
        row = broken.leg.row if refused else self._judge(broken, resumed=bool(begun))
        if fresh:
            self._note(RouteReason.HANDBACK if broken.handback else RouteReason.REROUTED)
            await self._launch(fresh, (), broken, row)
        for choice in begun:
            await self._text_to_tokens(choice)
            self._finish_if_over(choice)  # its text may come to more tokens than were counted
            if choice.finished:
                continue
            self._note(RouteReason.RESUMED)
            lost, tokens = broken.leg.plan.worker.id, len(choice.received)
            _log.info("output moves", uid=self.work.uid, lost=lost, tokens=tokens, error=str(broken.error))
            self._backend.metrics.resumes.labels(broken.error.reason.name).inc()
            try:
                await self._launch((choice.index,), choice.received, broken, row)
            except BatonError as error:
                if not broken.outgrown or error.reason not in NO_PLACE | _TOO_MUCH:
                    raise
                # Nobody with a longer context has come: this is where it ends.
                choice.finished = True
                self._inbox.put(Output(self, choice.index, (), (), "length"))

    def end_choice(self, index: int) -> None:
        """The frontend has seen enough of a choice (a stop string): take nothing more of it."""
        choice = self._choices[index]
        if not choice.finished:
            choice.finished = choice.ended_here = True
            self._settle(choice.attempt)

    def close(self, reason: Reason | None = None) -> None:
        """End what still runs: tell the workers and the routers. Idempotent; `reason`: why, when not success."""
        for leg in list(self._legs.values()):
            self._end(leg, reason, abort=True)
        for choice in self._choices:
            choice.finished = True
        if self.work.turn is not None:
            self.work.turn.leave()

    def _give_way(self) -> None:
        """The batch lane's place is wanted: stop here and wait for another one, with what there is."""
        for leg in list(self._legs.values()):
            self.on_broken(leg, BatonError(Reason.PREEMPTED, "it gave way to others"), handback=False)

    def _tokens(self) -> int:
        return len(self.work.prompt.ids) + max(len(choice.received) for choice in self._choices)

    def _generating(self) -> bool:
        return bool(self._legs) and all(leg.first_token for leg in self._legs.values())

    def on_event(self, leg: Leg, event: worker_pb2.Event) -> None:
        """Take an event of a live leg, or count why not. Never raises."""
        if self._legs.get(leg.attempt) is not leg:
            self._drop("stale")
            return
        if event.HasField("route"):
            leg.route = event.route
        body = event.WhichOneof("body")
        if body == "failure":
            error = BatonError(Reason.from_name(event.failure.reason), event.failure.message)
            self.on_broken(leg, error, handback=False)
            return
        if body == "handback":
            reason = Reason.from_name(event.handback.reason)
            self.on_broken(leg, BatonError(reason, f"{leg.session.worker} gave the request back"), handback=True)
            return
        choice = self._choices[event.choice] if event.choice < len(self._choices) else None
        if choice is None or choice.finished or choice.attempt != leg.attempt:
            self._drop("finished" if choice is not None and choice.finished else "stale")
            return
        if body == "text":
            self._take_text(leg, choice, event)
        else:
            self._take(leg, choice, event)

    def on_broken(self, leg: Leg, error: BatonError, *, handback: bool) -> None:
        """A leg has ended early: its choices are on none, and the reader is told (after what came before)."""
        if self._legs.get(leg.attempt) is not leg:
            return
        self._backend.metrics.attempt_failures.labels(error.reason.name).inc()
        # With the session gone the worker has ended it already; a worker that failed one choice may run the others.
        self._end(leg, error.reason, abort=leg.session.connected and not handback)
        for choice in self._choices:
            if choice.attempt == leg.attempt:
                choice.attempt = NO_ATTEMPT
        if any(not self._choices[i].finished for i in leg.choices):
            now = time.monotonic()
            self._inbox.put(Broken(leg, error, handback, now, now - leg.session.alive_at))

    def _take(self, leg: Leg, choice: Choice, event: worker_pb2.Event) -> None:
        ids = event.tokens.ids
        if ids and not self._joins(leg, event.offset, len(choice.received), "tokens"):
            return
        if ids:
            self._progress(leg, len(ids))
            choice.received.extend(ids)
        full = event.finish == "length" and len(choice.received) < self.work.sampling.max_tokens
        finish = "" if full else event.finish
        if ids or finish or event.prompt_logprobs:
            output = Output(self, choice.index, ids, event.tokens.logprobs, finish, event.prompt_logprobs)
            self._inbox.put(output)
        self._end_if_over(leg, choice, finish, full)

    def _take_text(self, leg: Leg, choice: Choice, event: worker_pb2.Event) -> None:
        """As `_take`, of an engine that answers text: offsets count this attempt's characters."""
        if event.text and not self._joins(leg, event.offset, choice.characters, "characters"):
            return
        new = max(0, event.text_tokens - choice.text_tokens)
        choice.text_tokens = max(choice.text_tokens, event.text_tokens)
        if event.text or new:
            self._progress(leg, new)
        if event.text:
            choice.text.append(event.text)
            choice.characters += len(event.text)
        full, finish = event.finish == "context", event.finish
        if full:
            # How near it came to what was asked for is not known: without a longer context this is the end.
            full = self._backend.router.lately.longer(leg.plan.worker.id, self._away_s)
            finish = "" if full else "length"
        if event.text or new or finish:
            output = Output(self, choice.index, (), (), finish, text=event.text, text_tokens=new)
            self._inbox.put(output)
        self._end_if_over(leg, choice, finish, full)

    def _end_if_over(self, leg: Leg, choice: Choice, finish: str, full: bool) -> None:
        """The choice has ended; or its worker's context has, not what was asked for: another worker's may be longer."""
        if finish:
            choice.finished = True
            self._settle(leg.attempt)
        elif full:
            tokens = len(choice.received) + choice.text_tokens
            message = f"the context of {leg.session.worker} ended at {tokens} output tokens"
            self.on_broken(leg, BatonError(Reason.CONTEXT_LENGTH_EXCEEDED, message), handback=False)

    def _joins(self, leg: Leg, offset: int, expected: int, what: str) -> bool:
        """Whether an event is what comes next; counted when it is not, and something was lost when it is beyond."""
        if offset == expected:
            return True
        self._drop("doubled" if offset < expected else "gap")
        if offset > expected:
            error = BatonError(Reason.SESSION_LOST, f"{offset - expected} {what} of {leg.session.worker} are missing")
            self.on_broken(leg, error, handback=False)
        return False

    def _progress(self, leg: Leg, tokens: int) -> None:
        if not leg.first_token:
            leg.first_token = time.monotonic()
            self._measure(leg)
        leg.tokens += tokens

    async def _text_to_tokens(self, choice: Choice) -> None:
        """What came as text is tokens to whoever goes on with it."""
        text = "".join(choice.text)
        choice.text.clear()
        choice.characters = choice.text_tokens = 0
        if text:
            choice.received = await asyncio.to_thread(self._backend.prompts.joined, choice.received, text)

    def _measure(self, leg: Leg) -> None:
        """What a resume cost the client, by what was waited for."""
        broken = leg.resumes
        if broken is None or broken.error.reason is Reason.PREEMPTED:
            return
        waits = {"place": leg.started - broken.at, "token": leg.first_token - leg.started}
        if broken.error.reason is Reason.SESSION_LOST:
            waits["detect"] = broken.silent_s
        for part, seconds in waits.items():
            self._backend.metrics.resume.labels(part).observe(seconds)
        told = {part: round(seconds, 3) for part, seconds in waits.items()}
        _log.info("output resumed", uid=self.work.uid, worker=leg.plan.worker.id, mode=leg.plan.mode, **told)

    def _finish_if_over(self, choice: Choice) -> None:
        """All tokens had come and only the news of the end was lost."""
        sampling, received = self.work.sampling, choice.received
        finish = ""
        if choice.text:
            finish = "length" if len(received) + choice.text_tokens >= sampling.max_tokens else ""
        elif received:
            ends = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else set(self._backend.eos_ids))
            if received[-1] in ends and len(received) > sampling.min_tokens:
                finish = "stop"
            elif len(received) >= sampling.max_tokens:
                finish = "length"
        if finish:
            choice.finished = True
            self._inbox.put(Output(self, choice.index, (), (), finish))

    def _judge(self, broken: Broken, *, resumed: bool) -> Row:
        """Whether to go on after a failure, and whom to leave out. Raises the failure when not."""
        error, plan = broken.error, broken.leg.plan
        if error.reason is Reason.PREEMPTED:
            return broken.leg.row
        if broken.outgrown:
            self._exclude.add(plan.worker.id)
            return broken.leg.row
        row = broken.leg.row.longer(broken.at)
        # A worker takes what it must fail until it knows that its engine is away: no fault of the request's.
        waits = error.reason in _AWAY and (resumed or self._told())
        patience = self._backend.resume_patience_s if waits else 0.0
        over = row.failures > MAX_FAILURES and time.monotonic() - row.since >= patience
        # Strict forbids another way to run, not another pair that runs as planned.
        moved = error.reason is Reason.DRAINING
        unplanned = not moved and (broken.handback or error.reason not in _UNREACHABLE)
        strict = self._backend.fallback == worker_pb2.FALLBACK_STRICT and unplanned and not resumed
        if not error.reason.retryable or strict or over:
            raise error
        if broken.handback and error.reason is not Reason.DRAINING:
            # The streaming worker is well; what it was to get the KV from is not.
            self._exclude.update(t.id for t in (plan.prefill, plan.alternate) if t.id)
        else:
            self._exclude.add(plan.worker.id)
        return row

    async def _launch(
        self, indices: tuple[int, ...], emitted: Sequence[int], broken: Broken | None = None, row: Row = NOTHING_LOST
    ) -> None:
        """Route and Submit until a worker takes the choices. Raises the last BatonError when none does."""
        began, refusals = time.monotonic(), row.failures
        told = self._told() or (broken is not None and self.begun)
        low, high = _RETRY_S
        refusal = None if broken is None else broken.error
        while True:
            try:
                plan = await self._plan(emitted)
            except BatonError as error:
                if await self._turned_away(error):
                    continue
                patience = began + self._patience_s(told, error)
                # What has been taken once was right: those who could do it are away.
                absent = error.reason in NO_PLACE or (broken is not None and error.reason in _TOO_MUCH)
                if absent and time.monotonic() < patience and time.time() < self.work.deadline:
                    # Whoever was left out may be back by now.
                    self._exclude.clear()
                    await asyncio.sleep(low * random.uniform(0.5, 1.0))
                    low = min(high, low * 2)
                    continue
                if refusal is not None and error.reason in NO_PLACE and refusal.reason not in _UNREACHABLE:
                    raise refusal from error
                raise
            try:
                await self._submit(plan, indices, emitted, broken, row)
                return
            except BatonError as error:
                if await self._turned_away(error):
                    continue
                self._backend.metrics.attempt_failures.labels(error.reason.name).inc()
                refusals += error.reason not in _UNREACHABLE
                patience = began + self._patience_s(told, error)
                if not error.reason.retryable or (refusals > MAX_FAILURES and time.monotonic() >= patience):
                    raise
                refusal = error
                self._exclude.add(plan.worker.id)
                self._note(RouteReason.REROUTED)
                _log.info("submit refused", uid=self.work.uid, worker=plan.worker.id, error=str(error))

    async def _plan(self, emitted: Sequence[int]) -> worker_pb2.Plan:
        turn = self.work.turn
        if turn is None:
            return await self._backend.router.route(self._route_request(emitted))
        while True:
            none = await turn.wait()
            request = self._route_request(emitted)
            request.exclude.extend(none)
            plan = await self._backend.router.route(request, self._away_s)
            if turn.placed:
                return plan

    async def _turned_away(self, error: BatonError) -> bool:
        away = await turned_away(self.work.turn, error, self.work.deadline)
        if away:
            self._exclude.clear()
        return away

    def _patience_s(self, told: bool, refusal: BatonError) -> float:
        """How long to look for a worker: an answer that has begun is worth more waiting than a refusal in time."""
        if told:
            return self._backend.resume_patience_s
        return START_PATIENCE_S if refusal.reason in _NOBODY else 0.0

    async def _submit(
        self, plan: worker_pb2.Plan, indices: tuple[int, ...], emitted: Sequence[int], broken: Broken | None, row: Row
    ) -> None:
        backend, work = self._backend, self.work
        session = backend.sessions.to(plan.worker)
        leg = Leg(self, self.attempts, indices, plan, session, row)
        leg.resumes = broken if emitted else None
        self.attempts += 1
        request = worker_pb2.SubmitRequest(
            attempt=worker_pb2.Attempt(
                uid=work.uid,
                attempt=leg.attempt,
                prompt_ids=work.prompt.ids,
                emitted_ids=emitted,
                sampling=work.sampling,
                key_root=work.prompt.root,
                deadline=work.deadline,
                choices=indices,
                model=backend.card.model,
                tenant=work.prompt.tenant,
                batch=work.turn is not None,
                parted=backend.prompts.parted(work.prompt),
            ),
            plan=plan,
            fallback=backend.fallback,
            card=backend.card,
        )
        self._legs[leg.attempt] = leg
        if work.turn is None:
            backend.placed.add(leg)
        for index in indices:
            self._choices[index].attempt = leg.attempt
        backend.metrics.attempts.inc()
        accepted = False
        try:
            await session.submit(request, leg, work.deadline)
            accepted = True
        except BatonError as error:
            if leg.attempt in self._legs:
                self._outcome(leg, error.reason)
            raise
        finally:
            if not accepted:
                # A submit that timed out or was cancelled may have arrived: the worker is told to drop it.
                self._legs.pop(leg.attempt, None)
                backend.placed.discard(leg)
                for index in indices:
                    if self._choices[index].attempt == leg.attempt:
                        self._choices[index].attempt = NO_ATTEMPT
                if session.connected:
                    backend.background.spawn(session.abort(leg.key), f"abort {leg.key}")
        if leg.attempt not in self._legs and any(not self._choices[i].finished for i in indices) and session.connected:
            # It gave way before it was taken: what was aborted then may not have been there yet.
            backend.background.spawn(session.abort(leg.key), f"abort {leg.key}")
        self.plan = plan
        for reason in plan.reasons:
            self._note(reason)

    def _route_request(self, emitted: Sequence[int]) -> router_pb2.RouteRequest:
        work = self.work
        return router_pb2.RouteRequest(
            uid=work.uid,
            attempt=self.attempts,
            model=self._backend.card.model,
            tenant=work.prompt.tenant,
            prompt_tokens=len(work.prompt.ids) + len(emitted),
            max_tokens=max(0, work.sampling.max_tokens - len(emitted)),
            packed_keys=b"".join(self._backend.prompts.extended(work.prompt, emitted)),
            deadline=work.deadline,
            ttft_slo_s=self._backend.ttft_slo_s if self._refusable else 0.0,
            exclude=sorted(self._exclude),
            fallback=self._backend.fallback,
            merged_only=work.merged_only,
            needs=work.needs,
        )

    @property
    def _refusable(self) -> bool:
        """Whether it may be refused for coming late. Not what was taken once, or promised; the batch lane waits. The
        first prompt of an answer decides for all: the others wait for it, or behind it."""
        placed = bool(self.attempts) or self._placed()
        return not placed and self.work.turn is None and not self._told()

    def _settle(self, attempt: int) -> None:
        """End a leg whose choices have all ended; the worker is told when it would go on."""
        leg = self._legs.get(attempt)
        if leg is not None and all(self._choices[i].finished for i in leg.choices):
            self._end(leg, None, abort=any(self._choices[i].ended_here for i in leg.choices))

    def _end(self, leg: Leg, reason: Reason | None, *, abort: bool) -> None:
        """Forget a leg: detach it, tell the worker if it may still run, and the routers in any case."""
        self._legs.pop(leg.attempt, None)
        self._backend.placed.discard(leg)
        leg.session.detach(leg.key)
        if abort:
            self._backend.background.spawn(leg.session.abort(leg.key), f"abort {leg.key}")
        if leg.route is not None:
            self.route = leg.route
            self.kv_bytes += leg.route.kv_bytes
            if self.cached_tokens is None and (leg.tokens or reason is None):
                # A later one finds the output of this one as well: that is no part of what was asked.
                self.cached_tokens = leg.route.cached_tokens + leg.route.stored_tokens
            for name in leg.route.reasons:
                self._note(name)
        self._outcome(leg, reason)

    def _outcome(self, leg: Leg, reason: Reason | None) -> None:
        outcome = router_pb2.Outcome(
            uid=self.work.uid,
            attempt=leg.attempt,
            worker=leg.plan.worker.id,
            prefill=leg.plan.prefill.id,
            route=leg.route,
            reason="" if reason is None else reason.name,
            ttft_s=leg.first_token - leg.started if leg.first_token else 0.0,
            prompt_tokens=len(self.work.prompt.ids),
            output_tokens=leg.tokens,
        )
        self._backend.router.report(outcome)

    def _note(self, reason: str) -> None:
        if reason not in self.reasons:
            self.reasons.append(reason)

    def _drop(self, why: str) -> None:
        self._backend.metrics.dropped.labels(why).inc()
