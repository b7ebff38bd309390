"""The Engine port: what prefill, decode and merged workers ask of an engine. Async in, batches of token events out.

A request's life in an engine:

    reservation = await engine.reserve(request, room)        # prompt blocks (+1), all or nothing
    report = await reservation.load(handles, read, deadline) # optional: KV from a peer or a store, verified
    engine.generate(reservation, first)                      # decode side: continue from token 2
    async for event in engine.prefill(reservation): ...      # prefill side: announce sealed blocks, sample token 1
    await reservation.release()                              # every exit path; idempotent

Blocks loaded or computed stay pinned until `release`; closing the prefill iterator stops the computation. Token events
of every generating request arrive, one list a step, from `engine.events()`.
"""

from __future__ import annotations

import abc
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from enum import StrEnum

from baton.errors import BatonError, Reason
from baton.kv.arena import Arena
from baton.kv.handle import Handle
from baton.kv.layout import LayoutFingerprint
from baton.transfer.port import ReadReport


class Resume(StrEnum):
    """What an engine promises of a resumed stream: the same text, some text that continues, or nothing."""

    EXACT = "exact"
    TEXT = "text"
    NONE = "none"


class FinishReason(StrEnum):
    """Why a choice ended. Stop *strings* are the frontend's: an engine knows token ids only."""

    STOP = "stop"
    LENGTH = "length"
    CONTEXT = "context"
    """Not at `max_tokens` but at the end of its engine's context, from an engine whose tokens only itself can count."""


class GrammarKind(StrEnum):
    """The languages a grammar may be written in. An engine says in its spec which of them it follows."""

    JSON = "json"
    """A JSON schema: the output is one JSON value of it."""
    REGEX = "regex"
    """A regular expression that matches the whole output."""
    CHOICE = "choice"
    """A JSON list of strings: the output is one of them."""
    GRAMMAR = "grammar"
    """A context-free grammar in the syntax of Lark or GBNF."""


@dataclass(frozen=True)
class Grammar:
    """What the output must look like, as data: every worker compiles it for itself.

    Its state is a function of the output tokens alone, so any worker goes on where another one stopped.
    """

    kind: GrammarKind
    text: str
    after: str = ""
    """The output begins with free text up to and including this, and what follows is under the grammar: a thought's
    closing mark. "": all of it is."""
    opening: str = ""
    """With `after`: the free text begins with this token's text; an output that does not is under the grammar from its
    first token. "": there is always free text."""


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is drawn. Neutral values leave the distribution alone.

    `temperature` 0 is greedy. `top_k` 0 is off. `seed` is always set: noise is counter-based, a function of
    (seed, choice, output index) only, so a resumed stream draws what the first would have drawn.
    Penalties: `presence` and `frequency` are over output tokens (OpenAI), `repetition` over prompt and output (HF).
    `logprobs`: None = not wanted, k = the sampled token's and the k most likely ones', from the unmodified
    distribution. `max_tokens` counts emitted tokens as well. `grammar` masks what penalties and biases have left, for
    every output token; an end of text is drawn only where it may end, also with `ignore_eos` or before `min_tokens`
    when nothing else can follow.
    """

    max_tokens: int
    seed: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: Grammar | None = None


@dataclass(frozen=True)
class Request:
    """One attempt at a request.

    `choices` are the output indices to produce (usually `(0,)`; `n > 1` forks after one prefill). `emitted_ids` are the
    output tokens that the client already has: the engine continues from there and never repeats them; more than one
    choice together with emitted tokens is refused (resume each choice on its own). `batch`: it gives way to all others.
    `key_root` is `Namespace.root()`; block keys follow from it and the tokens. `parted`: it has a tenant or a salt, and
    shares no cache with those that have another one, or none. `deadline` is `time.time()` seconds.
    """

    uid: str
    attempt: int
    prompt_ids: Sequence[int]
    sampling: SamplingParams
    key_root: bytes
    deadline: float
    choices: tuple[int, ...] = (0,)
    emitted_ids: Sequence[int] = ()
    batch: bool = False
    parted: bool = False


@dataclass(frozen=True)
class TokenLogprob:
    """Natural-log probability of a token, and of the most likely ones as (id, logprob), best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class TokenEvent:
    """New tokens of one choice. `offset` is the output index of the first of them (emitted tokens count).

    `finish` is set on the choice's last event (which may carry no token); `error` instead when the engine gave up.
    An engine that has no token ids to tell sets `text` (maybe empty) in each event: then `offset` counts the characters
    of this attempt before it, and `text_tokens` all tokens of this attempt up to its end.
    """

    uid: str
    attempt: int
    choice: int
    offset: int
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish: FinishReason | None = None
    error: Reason | None = None
    message: str = ""
    text: str | None = None
    text_tokens: int = 0
    cached_tokens: int = 0
    """With the last event of text: prompt tokens that the upstream found in its own cache."""


@dataclass(frozen=True)
class FirstToken:
    """The first output token of one choice, sampled where the prompt was computed, and whether it already ended it."""

    choice: int
    token_id: int
    logprob: TokenLogprob | None = None
    finish: FinishReason | None = None


@dataclass(frozen=True)
class SealedBlocks:
    """Blocks that nobody writes again, in prompt order, from prompt block `first_block` on.

    The last one of a prompt may be partial (`Handle.tokens` < block size): private, tail zeroed.
    """

    first_block: int
    handles: tuple[Handle, ...]


@dataclass(frozen=True)
class PrefillDone:
    """The prompt is computed: the first token of every choice, and how many prompt tokens were prefix hits."""

    first: tuple[FirstToken, ...]
    cached_tokens: int
    prompt_logprobs: tuple[TokenLogprob | None, ...] = ()


PrefillEvent = SealedBlocks | PrefillDone


@dataclass(frozen=True)
class EngineSpec:
    """What an engine is, known once it has started.

    `fingerprint` is None for an engine whose KV is out of reach: nothing is handed over, stored or told of it, it only
    runs merged, and `block_size` is that of the logical keys. `partial_blocks`: whether a prompt's last block is handed
    over when the prompt ends inside it; an engine that only takes whole blocks computes those few tokens itself, beside
    the one that it has to compute anyway. `lacks` names what a request may need and it
    cannot do (needs.py). `yields`: `Request.batch` gives way to all others within a step, and `EngineStats` tell of it.
    `chunk_tokens`: prompt tokens that a step computes at most, 0 when unknown. `short_tokens`: prompts with no more
    tokens to compute overtake longer ones, in the next step; 0 when none do.
    """

    name: str
    fingerprint: LayoutFingerprint | None
    block_size: int
    max_context: int
    max_streams: int
    pool_blocks: int
    vocab_size: int
    resume: Resume
    eos_token_ids: tuple[int, ...]
    partial_blocks: bool = True
    lacks: frozenset[str] = frozenset()
    yields: bool = False
    chunk_tokens: int = 0
    short_tokens: int = 0

    @property
    def layout(self) -> LayoutFingerprint:
        """The fingerprint of an engine that has one. Raises BatonError(KV_LAYOUT_MISMATCH)."""
        if self.fingerprint is None:
            raise BatonError(Reason.KV_LAYOUT_MISMATCH, f"{self.name} has no KV that can be handed over")
        return self.fingerprint

    def handed_over(self, tokens: int) -> int:
        """How many of a prompt's `tokens` a whole hand-over brings."""
        return tokens if self.partial_blocks else tokens // self.block_size * self.block_size


@dataclass(frozen=True)
class EngineStats:
    """The engine's state now.

    `step_started` is `time.time()` since when progress is due (0 when idle): when the running step began, or since when
    the engine had work, or a message to take, and did nothing. `step_predicted_s` is how long that was expected to
    take: `baton.engine.progress` tells a long step from a stuck engine. `prefill_tok_s` and `decode_step_s` are
    learnt (exponential averages). `batch_blocks` are not free, and others get them when they want them.
    """

    running: int = 0
    waiting: int = 0
    queued_prefill_tokens: int = 0
    queued_short_tokens: int = 0
    blocks_total: int = 0
    blocks_free: int = 0
    blocks_cached: int = 0
    blocks_pinned: int = 0
    blocks_quarantined: int = 0
    step_started: float = 0.0
    step_predicted_s: float = 0.0
    steps: int = 0
    prefill_tok_s: float = 0.0
    decode_step_s: float = 0.0
    prompt_tokens: int = 0
    prefill_tokens_computed: int = 0
    cached_prompt_tokens: int = 0
    output_tokens: int = 0
    preemptions: int = 0
    corrupted_blocks: int = 0
    unstaged_blocks: int = 0
    batch_running: int = 0
    batch_waiting: int = 0
    batch_queued_tokens: int = 0
    batch_preemptions: int = 0
    given_up_steps: int = 0
    batch_blocks: int = 0


@dataclass(frozen=True)
class CacheEvent:
    """A change of the engine's prefix cache: keys `stored` or `removed`; `cleared` drops everything before it."""

    stored: tuple[bytes, ...] = ()
    removed: tuple[bytes, ...] = ()
    cleared: bool = False


class Reader(abc.ABC):
    """How a reservation gets bytes: the worker's transports, seen from the engine."""

    @abc.abstractmethod
    async def read(self, handles: Sequence[Handle], into: Sequence[int], deadline: float) -> ReadReport:
        """`Transport.read` with verification, to the peer that owns the handles."""


class Reservation(abc.ABC):
    """Room for one request: its prompt's blocks and one more, taken all or nothing, its prefix hits pinned."""

    request: Request
    cached_tokens: int
    """Tokens of the prompt that are in place: prefix hits at first, then what `load` added. A whole number of blocks,
    or the whole prompt. Local prefix hits never cover the last prompt token, which must be computed for its logits."""
    hit_tokens: int
    """The prefix hits alone, as they were at `reserve`."""

    @abc.abstractmethod
    async def load(self, first_block: int, handles: Sequence[Handle], reader: Reader, deadline: float) -> ReadReport:
        """Read sealed blocks (prompt blocks `first_block`...) into reserved slots, verify, commit the good prefix.

        Refuses (KV_BAD_HANDLE in the report) a handle whose key or token count is not that of the prompt's block, and
        (KV_LAYOUT_MISMATCH) one of another fingerprint. May be called many times, in prompt order; a gap ends the
        usable prefix. Slots that a late read may still write to are swapped for new ones and quarantined.
        """

    @abc.abstractmethod
    async def release(self) -> None:
        """Give everything back (also stops generation). Idempotent; safe after the engine died."""


class Engine(abc.ABC):
    """One model, one pool of KV blocks.

    `arena`: the pool's bytes, where the worker's process registers them with its transports; None: it has none to.
    """

    arena: Arena | None = None

    @abc.abstractmethod
    async def start(self) -> EngineSpec:
        """Load weights, make the pool. Raises BatonError(ENGINE_FAILED) with the cause."""

    @abc.abstractmethod
    async def reserve(self, request: Request, *, decode_room: bool = True) -> Reservation:
        """Pin the prompt's prefix hits and take free blocks for the rest of it (one more with `decode_room`).

        `prompt_ids + emitted_ids` count as prompt here. Raises BatonError: NO_CAPACITY when the pool or the
        queue is full, CONTEXT_LENGTH_EXCEEDED, INVALID_REQUEST (ids outside the vocabulary), DUPLICATE_REQUEST
        for a live (uid, attempt), DRAINING.
        """

    @abc.abstractmethod
    def prefill(self, reservation: Reservation) -> AsyncIterator[PrefillEvent]:
        """Compute what is missing of the prompt in chunks: `SealedBlocks` as chunks complete (prefix hits at once),
        then one `PrefillDone`. Closing the iterator aborts. Blocks stay pinned until the reservation is released."""

    @abc.abstractmethod
    async def generate(self, reservation: Reservation, first: Sequence[FirstToken] = ()) -> None:
        """Start generating; events come from `events()`. With `first`, these tokens are taken as already drawn (and
        already sent to the client: no event repeats them) and decoding continues from token 2; otherwise what
        `cached_tokens` leaves of the prompt is computed here first. The reservation is released by the engine when
        every choice has finished; `release` earlier aborts."""

    @abc.abstractmethod
    def events(self) -> AsyncIterator[list[TokenEvent]]:
        """Every step's token events, one list a step. One consumer. Ends with BatonError(ENGINE_FAILED) when the engine
        dies; the process must then take a new epoch."""

    @abc.abstractmethod
    def cache_events(self) -> AsyncIterator[list[CacheEvent]]:
        """Changes of the prefix cache, in order. One consumer; bounded: on overflow the next event is `cleared` with a
        full listing."""

    @abc.abstractmethod
    def hold(self, keys: Sequence[bytes]) -> AbstractAsyncContextManager[Sequence[Handle]]:
        """Handles of those of `keys` whose sealed blocks are in the pool, in order: they stay where they are until the
        context is left, so that a store can read them. Raises BatonError(ENGINE_FAILED)."""

    async def embed(self, ids: Sequence[int], deadline: float, *, batch: bool = False) -> bytes:
        """The mean of the last hidden states (after the model's final norm) of one input, as little-endian f32.

        Computed beside requests and never before them; `batch`: of the batch lane, as `Request.batch`. `deadline` is
        `time.time()` seconds; cancelling stops it. Raises BatonError: INVALID_REQUEST (an engine that cannot, which its
        spec says it `lacks`, too), NO_CAPACITY, CONTEXT_LENGTH_EXCEEDED, DEADLINE_EXCEEDED, ENGINE_FAILED.
        """
        raise BatonError(Reason.INVALID_REQUEST, "this engine makes no embeddings")

    async def pause_batch(self, seconds: float) -> None:
        """For so long (above 0) from now compute nothing of the batch lane, and give up what of it is being computed.

        Its requests keep their places. Can make an earlier pause longer, not shorter. Nothing in an engine that does
        not yield."""
        return

    @abc.abstractmethod
    def stats(self) -> EngineStats:
        """The last known state; never waits."""

    @property
    def unwell(self) -> str:
        """Why the engine cannot be counted on now, though it is not stuck; empty: it can. Never waits."""
        return ""

    @abc.abstractmethod
    async def check_integrity(self) -> list[str]:
        """Findings of the pool's leak check when idle, in words; empty when every block is accounted for."""

    @abc.abstractmethod
    async def clear_cache(self) -> int:
        """Drop every unpinned cached block; how many were dropped."""

    @abc.abstractmethod
    async def close(self) -> None:
        """Stop the engine and its process. Idempotent."""
