"""Engines that step, on cores that they share: what chunks of prompts do to streams of their own engine and of others.

An engine works in steps. One step is a token for each of its streams and, beside them, up to a chunk of the prompts in
its line, as the torch engine's scheduler takes them: oldest first, with room for short ones. Engines that have
something to do share their core's time evenly, as processes do whose turns are much shorter than a step. Cores that
compute at the same time slow each other: they share memory, and the processes around the engines, which use a core that
rests, then need one that does not. Seconds are simulated.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from baton.engine.chunk import SHORT_SHARE, ChunkBudget
from bench.load import Answer
from services.router.costs import Role


@dataclass(frozen=True)
class Speed:
    """What a step takes, in seconds on a core of its own. The defaults are the default model's in bf16 on one core of
    the machines of docs/benchmarks.md: 1,000 tokens in chunks of 256 take 1.8 s, a token of four streams 30 ms."""

    lone_s: float = 0.0215
    stream_s: float = 0.0028
    pass_s: float = 0.015
    token_s: float = 0.00178
    handover_s: float = 0.02
    beside: float = 0.25
    """By how much longer everything takes while all other cores compute, too (docs/benchmarks.md)."""

    def decode(self, streams: int) -> float:
        """A token for each of so many streams."""
        return self.lone_s + self.stream_s * (streams - 1) if streams else 0.0

    def prefill(self, tokens: int) -> float:
        """So many prompt tokens, in one step."""
        return self.pass_s + self.token_s * tokens if tokens else 0.0


@dataclass(eq=False)
class Job:
    """A request under way: `left` prompt tokens to compute, `output` tokens to stream. `decode`: who streams when
    another computes the prompt."""

    answer: Answer
    left: int
    output: int
    decode: Engine | None = None


@dataclass(eq=False)
class Engine:
    """One worker's. `chunk` is the most prompt tokens of a step. `prefill_tok_s` and `step_s` are its averages of what
    it saw, as a worker reports them; 0 before the first."""

    name: str
    role: Role
    chunk: int
    speed: Speed
    line: deque[Job] = field(default_factory=deque)
    streams: list[Job] = field(default_factory=list)
    left_s: float = 0.0
    """Of the step under way, on a core of its own; 0 between steps."""
    prefill_tok_s: float = 0.0
    step_s: float = 0.0
    _chunks: list[tuple[Job, int]] = field(default_factory=list)
    _stepping: list[Job] = field(default_factory=list)
    _began: float = 0.0

    @property
    def short(self) -> int:
        """Prompts with no more tokens to compute overtake longer ones."""
        return self.chunk // SHORT_SHARE

    @property
    def load(self) -> int:
        """Requests that it streams, or will once their prompt is computed."""
        return len(self.streams) + sum(job.decode is None for job in self.line)

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens in its line."""
        return sum(job.left for job in self.line)

    @property
    def queued_short(self) -> int:
        """Of these, those of short prompts."""
        return sum(job.left for job in self.line if job.left <= self.short)

    def begin(self, now: float) -> None:
        """The next step, when there is something to do."""
        budget = ChunkBudget(self.chunk, self.short, self.queued_short)
        self._chunks = []
        for job in self.line:
            if (most := budget.most(job.left)) <= 0:
                continue
            taken = min(most, job.left)
            budget.take(job.left, taken)
            self._chunks.append((job, taken))
        self._stepping, self._began = list(self.streams), now
        self.left_s = self.speed.decode(len(self._stepping)) + self.speed.prefill(self.chunk - budget.left)

    def end(self, now: float) -> list[Job]:
        """The step is done at `now`. Returns the jobs whose prompt is, and that others stream."""
        tokens = sum(taken for _, taken in self._chunks)
        self._measure(tokens, now - self._began)
        for job in self._stepping:
            self.streams.remove(job)
            self.token(job, now)
        leaving = []
        for job, taken in self._chunks:
            job.left -= taken
            if job.left:
                continue
            self.line.remove(job)
            if job.decode is not None:
                leaving.append(job)
                continue
            self.token(job, now)
        return leaving

    def token(self, job: Job, now: float) -> None:
        """One more; the job streams on unless it was the last."""
        job.answer.times.append(now)
        if len(job.answer.times) < job.output:
            self.streams.append(job)

    def _measure(self, tokens: int, took_s: float) -> None:
        alone = self.speed.decode(len(self._stepping))
        if not tokens:
            self.step_s += 0.1 * (took_s - self.step_s) if self.step_s else took_s
            return
        rate = tokens / (took_s * (1.0 - alone / (alone + self.speed.prefill(tokens))))
        gain = min(1.0, tokens / 320) if self.prefill_tok_s else 1.0
        self.prefill_tok_s += gain * (rate - self.prefill_tok_s)


class Cores:
    """Engines by core, a clock, and prompts on their way from a prefill to its decode worker."""

    def __init__(self, cores: Sequence[Sequence[Engine]], speed: Speed) -> None:
        self.now = 0.0
        self._cores = cores
        self._speed = speed
        self._moving: deque[tuple[float, Job]] = deque()

    def moving_to(self, engine: Engine) -> int:
        """Requests that `engine` will stream, but that are not there yet."""
        lines = [job for core in self._cores for other in core for job in other.line]
        return sum(job.decode is engine for job in (*lines, *(job for _, job in self._moving)))

    def advance(self, until: float) -> None:
        """Let everything run until that moment."""
        while (moment := self._next(until)) is not None:
            self._pass(moment - self.now)
            self.now = moment
            self._deliver()
        self._pass(until - self.now)
        self.now = until

    def idle(self) -> bool:
        """Whether nothing is left to do."""
        return not self._moving and not any(e.line or e.streams or e.left_s for core in self._cores for e in core)

    def _next(self, until: float) -> float | None:
        """When something ends or arrives next; None when that is after `until`. What was added since begins now."""
        for core in self._cores:
            for engine in core:
                if not engine.left_s and (engine.line or engine.streams):
                    engine.begin(self.now)
        moments = [moment for moment, _ in list(self._moving)[:1]]
        slower = self._slower()
        for core in self._cores:
            busy = [engine.left_s for engine in core if engine.left_s]
            moments += [self.now + min(busy) * len(busy) * slower] if busy else []
        soonest = min(moments, default=until)
        return soonest if soonest < until else None

    def _slower(self) -> float:
        """How much longer than alone each busy core takes now: by `beside` when all are, in equal parts."""
        busy = sum(any(engine.left_s for engine in core) for core in self._cores)
        return 1.0 + self._speed.beside * (busy - 1) / (len(self._cores) - 1) if busy > 1 else 1.0

    def _pass(self, seconds: float) -> None:
        slower = self._slower()
        for core in self._cores:
            busy = [engine for engine in core if engine.left_s]
            for engine in busy:
                engine.left_s -= seconds / (len(busy) * slower)
                if engine.left_s > 1e-9:
                    continue
                engine.left_s = 0.0
                self._moving += [
                    (self.now + seconds + self._speed.handover_s, job) for job in engine.end(self.now + seconds)
                ]

    def _deliver(self) -> None:
        while self._moving and self._moving[0][0] <= self.now + 1e-9:
            job = self._moving.popleft()[1]
            assert job.decode is not None
            job.decode.token(job, self.now)
