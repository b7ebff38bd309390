"""What running a request somewhere costs: pure functions from a worker's state to terms in seconds.

The formula, its inputs, parameters and limits are in README.md beside this file.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from services.router.reservations import Held
from services.router.stored import Load, LoadTime, Reader, StoredRun, loads, worth


class Role(StrEnum):
    """What a worker is for."""

    PREFILL = "prefill"
    DECODE = "decode"
    MERGED = "merged"


PREFILL, DECODE, MERGED = Role
"""Names of their own: on the way of every request, and looked up through the class they take five times as long."""


BATCH_WAYS = 2.0
"""A stream makes those that it joins slower by as much as they make it."""
BESIDE_WAYS = 3.0
"""Time shared with a neighbour's prompt is lost to the stream, to the prompt, and to whoever waits behind that one."""


@dataclass(frozen=True)
class Parameters:
    """The policy's constants; README.md says where each comes from."""

    stall_weight: float = 5.0
    assumed_streams: float = 1.0
    handover_s: float = 0.005
    assumed_arrivals_s: float = 0.5
    whole: int = 8
    tie_s: float = 0.001
    load_margin: float = 1.25


@dataclass(slots=True)
class Told:
    """What a worker has to do, as it told at `at`; see WorkerState."""

    streams: int
    queued_tokens: float
    queued_short: float
    blocks_free: int
    at: float


@dataclass(slots=True)
class WorkerState:
    """One worker at this moment, with the reservations already added. Changed only by `promise`, never while a request
    is decided.

    `max_context` and `blocks_total` are 0 when unknown. `streams` counts running, waiting and reserved ones;
    `queued_tokens` are prompt tokens ahead of a new one; `prefill_share` is the share of recent time it spent computing
    prompts, 0 to 1. `unusable` is empty, or the reason (a name, a colon, words) why it may not be taken at all. Workers
    of equal `device`, when it is not empty, compute on the same; `beside_streams`, `beside_queue_s` and `beside_share`
    are streams, queued prompts and `prefill_share` of the others there (devices.py). `waking_s` is what each token of a
    stream put here costs those on other cores of its host, when it is the first on its own. `step_s` is what a decode
    step of one stream takes, `stream_s` what each other stream adds to it (steps.py). `queued_tokens` were so at
    `as_of`, in seconds on the clock of `Ask.now`; since then the worker computes them. `lacks` is what it cannot do of
    what a request may need. A step computes `chunk_tokens` of prompts; those with no more than `short_tokens` to
    compute wait for one step and not for longer ones. `queued_short` are the queued tokens of such. `longest` is worked
    out of the others: the longest prompt that it takes, in tokens; -1 when it takes none.
    """

    id: str
    role: Role
    fingerprint: str
    block_size: int
    block_bytes: int
    max_context: int
    max_streams: int
    streams: int
    queued_tokens: float
    blocks_total: int
    blocks_free: int
    prefill_tok_s: float
    step_s: float
    stream_s: float = 0.0
    prefill_share: float = 0.0
    unusable: str = ""
    device: str = ""
    beside_streams: int = 0
    beside_queue_s: float = 0.0
    beside_share: float = 0.0
    waking_s: float = 0.0
    as_of: float = 0.0
    lacks: frozenset[str] = frozenset()
    chunk_tokens: int = 0
    short_tokens: int = 0
    queued_short: float = 0.0
    longest: float = field(init=False)

    def __post_init__(self) -> None:
        self._measure()

    def _measure(self) -> None:
        longest = (self.blocks_free - 1) * self.block_size if self.blocks_total else math.inf
        if self.max_context and longest >= self.max_context:
            longest = self.max_context - 1
        self.longest = -1.0 if self.unusable else longest

    def promise(self, told: Told, held: Held, prefill_share: float, now: float) -> None:
        """Be the worker as it told, at `now`, with what is `held` promised to it."""
        done = (now - told.at) * self.prefill_tok_s
        queued, short = told.queued_tokens - done, told.queued_short - done
        self.streams = told.streams + held.streams
        self.queued_tokens = (queued if queued > 0.0 else 0.0) + held.prefill_tokens
        self.queued_short = (short if short > 0.0 else 0.0) + held.short_tokens
        self.blocks_free = told.blocks_free - held.blocks
        self.prefill_share = prefill_share
        self.as_of = now
        self._measure()

    def blocks_for(self, tokens: int) -> int:
        """Blocks that a prompt of `tokens` takes, with the one more that the first output needs."""
        return -(-tokens // self.block_size) + 1


@dataclass(slots=True)
class Ask:
    """What is to be routed; never changed once made (not frozen: that would take four times as long to make).

    `output_tokens` is the expected length of the answer, `hits` are prefix-hit tokens by worker id, `stored` what
    stores hold of the prompt; `now` is when, on the clock of `WorkerState.as_of`; `needs` what not every engine can do.
    Hits are of whole blocks.
    """

    uid: str
    prompt_tokens: int
    output_tokens: float
    hits: Mapping[str, int] = field(default_factory=dict)
    exclude: frozenset[str] = frozenset()
    merged_only: bool = False
    strict: bool = False
    ttft_slo_s: float = 0.0
    stored: Sequence[StoredRun] = ()
    now: float = 0.0
    needs: frozenset[str] = frozenset()

    def cached(self, worker: WorkerState) -> int:
        """Tokens of the prompt whose KV is on `worker`: whole blocks, never the last token (its logits are needed)."""
        hit = self.hits.get(worker.id, 0)
        return hit if hit < self.prompt_tokens else max(0, self.reusable(worker))

    def reusable(self, worker: WorkerState) -> int:
        """Tokens of the prompt that need not be computed when their KV is there: whole blocks, never the last token."""
        return (self.prompt_tokens - 1) // worker.block_size * worker.block_size


TransferRate = Callable[[str, str], float]
"""(prefill id, decode id) -> bytes per second."""


def no_loads(store: str, tier: str, worker: str, bytes_: float) -> float:
    """A LoadTime without stores."""
    return math.inf


def worthwhile_loads(
    worker: WorkerState, ask: Ask, load_time: LoadTime, parameters: Parameters, pass_s: float | None = None
) -> list[Load]:
    """Loads that cost `worker` less than computing what they bring."""
    if not ask.stored:
        return []
    have = ask.cached(worker)
    reader = Reader(worker.id, worker.fingerprint, worker.block_size, worker.block_bytes, have, ask.reusable(worker))
    return worth(
        loads(ask.stored, reader, load_time),
        have,
        lambda there: prefill_seconds(worker, ask.prompt_tokens - there, pass_s),
        parameters.load_margin,
    )


def prefill_seconds(worker: WorkerState, tokens: float, pass_s: float | None = None) -> float:
    """How long `worker` computes `tokens` of a prompt: at its rate, and never less than one forward pass (`pass_s`, or
    the worker's own step)."""
    if tokens <= 0:
        return 0.0
    least, seconds = worker.step_s if pass_s is None else pass_s, tokens / worker.prefill_tok_s
    return seconds if seconds > least else least


def short_queue_tokens(worker: WorkerState) -> float:
    """Prompt tokens that `worker` computes until it has done with the short prompts that it has: half of the step under
    way, then steps in which long ones may have all but `short_tokens`."""
    return worker.chunk_tokens * (0.5 + worker.queued_short / worker.short_tokens)


def queue_seconds(worker: WorkerState, ask: Ask) -> float:
    """How long a new request waits before `worker` starts it: prompt tokens ahead, when it is short those of short
    ones only and what is computed beside them; then a free stream.

    Streams leave one by one: with `max_streams` running for `output * step` seconds each, one ends every
    `output * step / max_streams` seconds. The step is that of a full batch.
    """
    ahead = worker.queued_tokens / worker.prefill_tok_s - (ask.now - worker.as_of)
    if ahead < 0.0:
        ahead = 0.0
    elif worker.short_tokens and ask.prompt_tokens - ask.cached(worker) <= worker.short_tokens:
        ahead = min(ahead, short_queue_tokens(worker) / worker.prefill_tok_s)
    if worker.streams < worker.max_streams or worker.role is PREFILL:
        return ahead
    excess = worker.streams + 1 - worker.max_streams
    step_s = worker.step_s + worker.stream_s * (worker.max_streams - 1)
    return ahead + excess * ask.output_tokens * step_s / worker.max_streams


def shared_seconds(worker: WorkerState, compute_s: float) -> float:
    """How much longer a prompt takes beside others on the same device: each gets its share, so it takes twice as long
    while they have prompts, too. Nothing without a queue beside it."""
    beside = worker.beside_queue_s
    return beside if beside < compute_s else compute_s


def interfering(worker: WorkerState, least: float = 0.0) -> float:
    """What a second of streaming on `worker` costs because of later prompts. Those that it computes itself, `least` of
    the time at least, freeze the stream. With those of its neighbours it shares the device: the stream loses time, the
    prompt as much, and whoever waits behind that one."""
    own = worker.prefill_share
    if least > own:
        own = least
    return (own if own < 1.0 else 1.0) + BESIDE_WAYS * worker.beside_share


class Terms(NamedTuple):
    """What a candidate costs, in seconds by what they are for (README.md)."""

    queue: float
    prefill: float
    load: float
    transfer: float
    stall: float
    batch: float
    interference: float
    waking: float

    @property
    def total(self) -> float:
        """The cost."""
        return sum(self)

    @property
    def ttft(self) -> float:
        """Predicted seconds to the first token: the terms that this request itself waits for."""
        return self.queue + self.prefill + self.load + self.transfer


def own_cost(worker: WorkerState, ask: Ask, parameters: Parameters, load: Load | None = None) -> Terms:
    """Terms of a worker that computes the prompt and streams: merged, or local on a decode worker. What it loads from a
    store it need not compute."""
    uncached = ask.prompt_tokens - (load.tokens if load else ask.cached(worker))
    freeze_s = uncached / worker.prefill_tok_s
    longer = ask.output_tokens * worker.stream_s * (worker.streams + worker.beside_streams)
    compute = prefill_seconds(worker, uncached)
    queue = queue_seconds(worker, ask)
    if worker.beside_queue_s:
        queue += shared_seconds(worker, compute)
    return Terms(
        queue,
        compute,
        load.seconds if load else 0.0,
        0.0,
        freeze_s * ((worker.streams + parameters.assumed_streams) * parameters.stall_weight + worker.beside_streams),
        BATCH_WAYS * longer,
        (ask.output_tokens * worker.step_s + longer) * interfering(worker, parameters.assumed_arrivals_s * freeze_s),
        ask.output_tokens * worker.waking_s,
    )


def pair_pass_s(prefill: WorkerState, decode: WorkerState) -> float:
    """Seconds of a forward pass on the prefill of a pair: it runs no decode steps, so what it knows of one is as old as
    its start. Both run the same model."""
    return prefill.step_s if prefill.step_s < decode.step_s else decode.step_s


def pair_cost(
    prefill: WorkerState,
    decode: WorkerState,
    ask: Ask,
    transfer_rate: TransferRate,
    parameters: Parameters,
    load: Load | None = None,
) -> Terms:
    """Terms of a hand-over. The decode worker's own queue passes while the prefill loads and computes: the rest of it
    counts."""
    there = load.tokens if load else ask.cached(prefill)
    load_s = load.seconds if load else 0.0
    uncached = ask.prompt_tokens - there
    compute = prefill_seconds(prefill, uncached, pair_pass_s(prefill, decode))
    ahead = queue_seconds(prefill, ask)
    if prefill.beside_queue_s:
        ahead += shared_seconds(prefill, compute)
    missing = -(-(ask.prompt_tokens - ask.cached(decode)) // decode.block_size) * decode.block_bytes
    longer = ask.output_tokens * decode.stream_s * (decode.streams + decode.beside_streams)
    rest = queue_seconds(decode, ask) - ahead - load_s - compute
    return Terms(
        ahead + rest if rest > 0.0 else ahead,
        compute,
        load_s,
        parameters.handover_s + missing / transfer_rate(prefill.id, decode.id),
        uncached / prefill.prefill_tok_s * prefill.beside_streams,
        BATCH_WAYS * longer,
        (ask.output_tokens * decode.step_s + longer) * interfering(decode),
        ask.output_tokens * decode.waking_s,
    )


def prefill_side(prefill: WorkerState, ask: Ask) -> float:
    """What a pair's cost takes from its prefill, whatever the decode worker."""
    uncached = ask.prompt_tokens - ask.cached(prefill)
    compute = prefill_seconds(prefill, uncached)
    stall = uncached / prefill.prefill_tok_s * prefill.beside_streams
    return queue_seconds(prefill, ask) + shared_seconds(prefill, compute) + compute + stall


def decode_side(decode: WorkerState, ask: Ask) -> float:
    """What a pair's cost takes from its decode worker, whatever the prefill; transfer aside."""
    longer = ask.output_tokens * decode.stream_s * (decode.streams + decode.beside_streams)
    decoding = ask.output_tokens * decode.step_s + longer
    waking = ask.output_tokens * decode.waking_s
    return queue_seconds(decode, ask) + BATCH_WAYS * longer + decoding * interfering(decode) + waking
