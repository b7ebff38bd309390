"""The one codec between data classes and messages. `x_to_pb(x_from_pb(m))` equals `m` for every message we send."""

from __future__ import annotations

import math
from collections.abc import Iterable

from baton.engine.port import (
    FinishReason,
    FirstToken,
    Grammar,
    GrammarKind,
    Request,
    SamplingParams,
    TokenEvent,
    TokenLogprob,
)
from baton.errors import BatonError, Reason
from baton.kv.handle import Handle, Segment
from baton.kv.keys import KEY_BYTES
from baton.kv.layout import LayoutFingerprint
from baton.transfer.port import Peer
from baton.v1 import kv_pb2, worker_pb2


def handle_to_pb(handle: Handle) -> kv_pb2.Handle:
    """A handle as its message."""
    return kv_pb2.Handle(
        key=handle.key,
        fingerprint=handle.fingerprint,
        owner=handle.owner,
        epoch=handle.epoch,
        generation=handle.generation,
        tokens=handle.tokens,
        segments=[kv_pb2.Segment(region=s.region, offset=s.offset, length=s.length) for s in handle.segments],
        checksum=handle.checksum,
        algorithm=handle.algorithm,
    )


def handle_from_pb(message: kv_pb2.Handle) -> Handle:
    """The handle in a message, as the peer said it: nothing is believed before transport and reservation checked it."""
    return Handle(
        key=message.key,
        fingerprint=message.fingerprint,
        owner=message.owner,
        epoch=message.epoch,
        generation=message.generation,
        tokens=message.tokens,
        segments=tuple(Segment(s.region, s.offset, s.length) for s in message.segments),
        checksum=message.checksum,
        algorithm=message.algorithm,
    )


def peer_to_pb(peer: Peer, host: str = "") -> kv_pb2.Peer:
    """A transport peer as its message; `host` is its machine identity."""
    return kv_pb2.Peer(
        owner=peer.owner, epoch=peer.epoch, arena_bytes=peer.arena_bytes, metadata=peer.metadata, host=host
    )


def peer_from_pb(message: kv_pb2.Peer) -> Peer:
    """The transport peer in a message."""
    return Peer(message.owner, message.epoch, message.arena_bytes, dict(message.metadata))


def layout_to_pb(layout: LayoutFingerprint) -> kv_pb2.Layout:
    """A layout as its message."""
    return kv_pb2.Layout(
        model=layout.model,
        layers=layout.layers,
        kv_heads=layout.kv_heads,
        head_dim=layout.head_dim,
        block_size=layout.block_size,
        dtype=layout.dtype,
        quantisation=layout.quantisation,
        order=layout.order,
        tensor_parallel=layout.tensor_parallel,
        pipeline_parallel=layout.pipeline_parallel,
        variant=layout.variant,
    )


def layout_from_pb(message: kv_pb2.Layout) -> LayoutFingerprint:
    """The layout in a message."""
    return LayoutFingerprint(
        model=message.model,
        layers=message.layers,
        kv_heads=message.kv_heads,
        head_dim=message.head_dim,
        block_size=message.block_size,
        dtype=message.dtype,
        quantisation=message.quantisation,
        order=message.order,
        tensor_parallel=message.tensor_parallel,
        pipeline_parallel=message.pipeline_parallel,
        variant=message.variant,
    )


def sampling_to_pb(params: SamplingParams) -> worker_pb2.Sampling:
    """Sampling parameters as their message. `seed` is taken modulo 2**64: OpenAI's may be negative."""
    return worker_pb2.Sampling(
        max_tokens=params.max_tokens,
        seed=params.seed % 2**64,
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=params.min_p,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty,
        logit_bias=params.logit_bias,
        min_tokens=params.min_tokens,
        stop_token_ids=params.stop_token_ids,
        ignore_eos=params.ignore_eos,
        logprobs=params.logprobs,
        prompt_logprobs=params.prompt_logprobs,
        grammar=None if params.grammar is None else grammar_to_pb(params.grammar),
    )


def grammar_to_pb(grammar: Grammar) -> worker_pb2.Grammar:
    """A grammar as its message."""
    return worker_pb2.Grammar(kind=grammar.kind.value, text=grammar.text, after=grammar.after, opening=grammar.opening)


def grammar_from_pb(message: worker_pb2.Grammar) -> Grammar:
    """The grammar in a message. Raises BatonError(INVALID_REQUEST) for a kind of a newer peer."""
    try:
        return Grammar(GrammarKind(message.kind), message.text, message.after, message.opening)
    except ValueError:
        raise BatonError(
            Reason.INVALID_REQUEST, f"no grammars of kind {message.kind!r} here", param="grammar"
        ) from None


def sampling_from_pb(message: worker_pb2.Sampling) -> SamplingParams:
    """The sampling parameters in a message.

    `top_p` and `repetition_penalty` of 0 mean that an operator's tool left them out: both are meaningless at 0.
    Raises BatonError(INVALID_REQUEST) for a grammar of unknown kind.
    """
    return SamplingParams(
        max_tokens=message.max_tokens,
        seed=message.seed,
        temperature=message.temperature,
        top_p=message.top_p or 1.0,
        top_k=message.top_k,
        min_p=message.min_p,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        repetition_penalty=message.repetition_penalty or 1.0,
        logit_bias=dict(message.logit_bias),
        min_tokens=message.min_tokens,
        stop_token_ids=tuple(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
        logprobs=message.logprobs if message.HasField("logprobs") else None,
        prompt_logprobs=message.prompt_logprobs if message.HasField("prompt_logprobs") else None,
        grammar=grammar_from_pb(message.grammar) if message.HasField("grammar") else None,
    )


def request_to_pb(request: Request, *, model: str = "", tenant: str = "") -> worker_pb2.Attempt:
    """One attempt as its message."""
    return worker_pb2.Attempt(
        uid=request.uid,
        attempt=request.attempt,
        prompt_ids=request.prompt_ids,
        emitted_ids=request.emitted_ids,
        sampling=sampling_to_pb(request.sampling),
        key_root=request.key_root,
        deadline=request.deadline,
        choices=request.choices,
        model=model,
        tenant=tenant,
        batch=request.batch,
        parted=request.parted,
    )


MAX_UID = 256


def request_from_pb(message: worker_pb2.Attempt) -> Request:
    """The attempt in a message. Raises BatonError(INVALID_REQUEST) naming the field that cannot be."""
    if not message.uid:
        raise BatonError(Reason.INVALID_REQUEST, "uid must not be empty", param="uid")
    if len(message.uid) > MAX_UID:
        raise BatonError(Reason.INVALID_REQUEST, f"uid must have at most {MAX_UID} characters", param="uid")
    if len(message.key_root) > KEY_BYTES:
        raise BatonError(Reason.INVALID_REQUEST, f"key_root must have at most {KEY_BYTES} bytes", param="key_root")
    if not math.isfinite(message.deadline):
        raise BatonError(Reason.INVALID_REQUEST, "deadline must be a time", param="deadline")
    if not message.prompt_ids:
        raise BatonError(Reason.INVALID_REQUEST, "prompt_ids must not be empty", param="prompt_ids")
    choices = tuple(message.choices) or (0,)
    if len(set(choices)) != len(choices):
        raise BatonError(Reason.INVALID_REQUEST, f"choices repeat: {choices}", param="choices")
    if len(choices) > 1 and message.emitted_ids:
        raise BatonError(Reason.INVALID_REQUEST, "emitted_ids go with one choice", param="emitted_ids")
    return Request(
        uid=message.uid,
        attempt=message.attempt,
        prompt_ids=list(message.prompt_ids),
        sampling=sampling_from_pb(message.sampling),
        key_root=message.key_root,
        deadline=message.deadline,
        choices=choices,
        emitted_ids=list(message.emitted_ids),
        batch=message.batch,
        parted=message.parted,
    )


def logprob_to_pb(logprob: TokenLogprob) -> worker_pb2.Logprob:
    """A token's logprob as its message."""
    return worker_pb2.Logprob(
        token_id=logprob.token_id,
        logprob=logprob.logprob,
        top_ids=[token for token, _ in logprob.top],
        top_logprobs=[value for _, value in logprob.top],
    )


def logprob_from_pb(message: worker_pb2.Logprob) -> TokenLogprob:
    """The logprob in a message."""
    return TokenLogprob(
        message.token_id, message.logprob, tuple(zip(message.top_ids, message.top_logprobs, strict=False))
    )


def first_token_to_pb(first: FirstToken) -> worker_pb2.FirstToken:
    """A handed-over first token as its message."""
    return worker_pb2.FirstToken(
        choice=first.choice,
        token_id=first.token_id,
        logprob=logprob_to_pb(first.logprob) if first.logprob else None,
        finish=first.finish or "",
    )


def first_token_from_pb(message: worker_pb2.FirstToken) -> FirstToken:
    """The first token in a message."""
    return FirstToken(
        choice=message.choice,
        token_id=message.token_id,
        logprob=logprob_from_pb(message.logprob) if message.HasField("logprob") else None,
        finish=FinishReason(message.finish) if message.finish else None,
    )


def token_event_to_pb(event: TokenEvent) -> worker_pb2.Event:
    """An engine's event as a session event, without the route."""
    message = worker_pb2.Event(
        uid=event.uid, attempt=event.attempt, choice=event.choice, offset=event.offset, finish=event.finish or ""
    )
    if event.error is not None:
        message.failure.CopyFrom(kv_pb2.Failure(reason=event.error.name, message=event.message))
    elif event.token_ids:
        message.tokens.CopyFrom(tokens_to_pb(event.token_ids, event.logprobs))
    return message


def tokens_to_pb(ids: Iterable[int], logprobs: Iterable[TokenLogprob] = ()) -> worker_pb2.Tokens:
    """Token ids, with their logprobs when there are any."""
    return worker_pb2.Tokens(ids=ids, logprobs=[logprob_to_pb(entry) for entry in logprobs])
