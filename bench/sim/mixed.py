"""The mixes of `baton bench mix` in the simulator: the same arrivals, setups and figures, the router's own policy.

So the policy can be judged over hundreds of turns in seconds, where real ones take a minute each and differ by what
else the machine did.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from bench.load import Answer
from bench.mix_figures import Turn, turn_of
from bench.mixes import (
    CHAT_PROMPT,
    CHAT_TOKENS,
    CHATS,
    DOCUMENT_PROMPT,
    DOCUMENT_TOKENS,
    FILL,
    PD_CHUNK,
    PREFIXES,
    Arrival,
    Idle,
    Mix,
    arrivals,
)
from bench.sim.cores import Cores, Engine, Job, Speed
from services.router.costs import DECODE, MERGED, PREFILL, Ask, Parameters, WorkerState
from services.router.devices import with_neighbours
from services.router.policy import Choice, candidates, choose
from services.router.rates import PrefillShare, Rates

REPORT_S = 0.1
MAX_STREAMS = 32
REST = 5.0
"""Of a turn: how long a setup rests after it, while the others are measured."""
LINK_BYTES_S = 1e9
BLOCK_TOKENS, BLOCK_BYTES = 32, 737_280

Send = Callable[[Job, int, int], str]
"""Gives a job of so many prompt tokens to an engine (with its prefix, or -1), and says where it went."""


def idle(speed: Speed) -> Idle:
    """What lone documents take, a token of some streams, and what each other adds."""
    chunks, rest = divmod(DOCUMENT_PROMPT, PD_CHUNK)
    document_s = chunks * speed.prefill(PD_CHUNK) + speed.prefill(rest) + speed.handover_s
    return Idle(document_s, speed.decode(CHATS), speed.stream_s)


class Setup:
    """Some engines on two cores, and who of them gets a request."""

    def __init__(self, name: str, speed: Speed, parameters: Parameters, chunk: int) -> None:
        if name == "pd":
            roles = [[(PREFILL, PD_CHUNK)], [(DECODE, PD_CHUNK)]]
        elif name == "merged":
            roles = [[(MERGED, chunk)], [(MERGED, chunk)]]
        else:
            roles = [[(PREFILL, PD_CHUNK), (MERGED, chunk)], [(DECODE, chunk)]]
        cores = [[Engine(f"{role}-{core}", role, size, speed) for role, size in of] for core, of in enumerate(roles)]
        self.engines = [engine for core in cores for engine in core]
        self.cores = Cores(cores, speed)
        self._held = {engine.name: set(range(PREFIXES)) for engine in self.engines}
        self.send: Send = self._route if name == "ours" else self._spread
        self._parameters = parameters
        self._device = {engine.name: f"sim/cpu:{core}" for core, of in enumerate(cores) for engine in of}
        self._rates, self._shares, self._reported = Rates(), PrefillShare(), 0.0
        for engine in self.engines:
            self._rates.register(engine.name, 1 / speed.token_s, speed.lone_s, LINK_BYTES_S, MAX_STREAMS)
        self._sent = 0

    def wait(self, until: float) -> None:
        """Let time pass; workers report what they see meanwhile."""
        while self._reported + REPORT_S < until:
            self._reported += REPORT_S
            self.cores.advance(self._reported)
            for engine in self.engines:
                self._rates.reported(
                    engine.name, engine.prefill_tok_s, engine.step_s, len(engine.streams), self._reported
                )
        self.cores.advance(until)

    def _hit(self, engine: str, prefix: int, tokens: int) -> int:
        return tokens if prefix in self._held[engine] else 0

    def _spread(self, job: Job, shared: int, prefix: int) -> str:
        """To the one with fewest outstanding; a prefill has its decode worker."""
        takers = [engine for engine in self.engines if engine.role is not DECODE]
        taker = min(takers, key=lambda engine: (engine.load, engine.name))
        job.decode = next((engine for engine in self.engines if engine.role is DECODE), None)
        job.left -= self._hit(taker.name, prefix, shared)
        taker.line.append(job)
        return taker.name

    def _route(self, job: Job, shared: int, prefix: int) -> str:
        """To where the router's policy says."""
        now = self.cores.now
        hits = {engine.name: self._hit(engine.name, prefix, shared) for engine in self.engines}
        self._sent += 1
        ask = Ask(str(self._sent), job.left, min(job.output, self._rates.output_tokens), hits=hits, now=now)
        states = with_neighbours([self._state(engine, now) for engine in self.engines])
        choice = choose(candidates(states, ask, self._rates.transfer, self._parameters), ask, self._parameters)
        assert isinstance(choice, Choice)
        winner = choice.winner
        by_name = {engine.name: engine for engine in self.engines}
        computes, streams = by_name[(winner.prefill or winner.worker).id], by_name[winner.worker.id]
        job.left -= winner.cached_tokens
        job.decode = streams if winner.prefill else None
        self._shares.add(computes.name, job.left / self._rates.speed(computes.name).prefill_tok_s, now)
        self._rates.answered(job.output)
        computes.line.append(job)
        return f"{winner.mode}; {streams.name}"

    def _state(self, engine: Engine, now: float) -> WorkerState:
        speed = self._rates.speed(engine.name)
        streams = 0 if engine.role is PREFILL else engine.load + self.cores.moving_to(engine)
        return WorkerState(
            id=engine.name, role=engine.role, fingerprint="sim", block_size=BLOCK_TOKENS, block_bytes=BLOCK_BYTES,
            max_context=0, max_streams=MAX_STREAMS, streams=streams, queued_tokens=engine.queued_tokens,
            blocks_total=0, blocks_free=0, prefill_tok_s=speed.prefill_tok_s, step_s=speed.steps.lone_s,
            stream_s=speed.steps.stream_s, prefill_share=self._shares.of(engine.name, now),
            chunk_tokens=engine.chunk, short_tokens=engine.short, queued_short=engine.queued_short,
            device=self._device[engine.name], as_of=now,
        )  # fmt: skip


def turn(setup: Setup, mix: Mix, idle: Idle, seed: int, seconds: float) -> Turn:
    """Let requests come for a quarter of `seconds`, then measure for `seconds`, wait for the last of them, and rest."""
    fill, began, chance = FILL * seconds, setup.cores.now, random.Random(seed)
    before: list[Answer] = []
    chats: list[Answer] = []
    documents: list[Answer] = []
    for arrival in arrivals(mix, idle, fill + seconds, seed):
        setup.wait(began + arrival.at)
        answer = Answer(sent=setup.cores.now)
        (before if arrival.at < fill else documents if arrival.document else chats).append(answer)
        _send(setup, mix, arrival, answer, chance)
    while not setup.cores.idle():
        setup.wait(setup.cores.now + REPORT_S)
    setup.wait(setup.cores.now + REST * seconds)
    return turn_of(chats, documents, before, began + fill, began + fill + seconds, idle)


def _send(setup: Setup, mix: Mix, arrival: Arrival, answer: Answer, chance: random.Random) -> None:
    if arrival.document:
        prefix = chance.randrange(PREFIXES) if mix.shared else -1
        answer.route = setup.send(Job(answer, DOCUMENT_PROMPT, DOCUMENT_TOKENS), mix.shared, prefix)
    else:
        answer.route = setup.send(Job(answer, CHAT_PROMPT, CHAT_TOKENS), 0, -1)


def simulate(
    mix: Mix,
    turns: int,
    seconds: float,
    chunk: int,
    parameters: Parameters,
    setups: Sequence[str] = ("pd", "merged", "ours"),
) -> dict[str, list[Turn]]:
    """Turns of each setup, with the same arrivals."""
    speed = Speed()
    ready = {name: Setup(name, speed, parameters, chunk) for name in setups}
    return {
        name: [turn(setup, mix, idle(speed), seed, seconds) for seed in range(turns)] for name, setup in ready.items()
    }
