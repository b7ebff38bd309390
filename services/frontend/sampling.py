"""From what a client asked to what a worker is told: defaults filled in, budgets made absolute."""

from __future__ import annotations

import secrets

from baton.engine.port import Grammar
from baton.model.generation import GenerationConfig
from baton.rpc.codec import grammar_to_pb
from baton.v1.worker_pb2 import Sampling
from services.frontend.prompt import too_long
from services.frontend.schema import Options

NARROWEST = 1e-9
"""A `top_p` that leaves the likeliest token alone. 0 means the same to the API, but engines refuse it."""


def output_budget(options: Options, prompt_tokens: int, context_length: int, default: int | None, param: str) -> int:
    """How many tokens one output may have; 0 only when the client asked for none.

    Without a wish it is `default`, or all that the context holds. Raises BatonError(CONTEXT_LENGTH_EXCEEDED) when
    prompt and wish do not fit together.
    """
    room = context_length - prompt_tokens
    wish = options.max_tokens
    if wish is None:
        return room if default is None else min(default, room)
    if wish > room:
        # A wish that no prompt leaves room for is at fault itself.
        blamed = options.budget if wish >= context_length else param
        raise too_long(context_length, prompt_tokens, param, completion=wish, blamed=blamed)
    return wish


def make_sampling(
    options: Options,
    defaults: GenerationConfig,
    max_tokens: int,
    *,
    prompt_logprobs: bool,
    grammar: Grammar | None = None,
) -> Sampling:
    """The worker's parameters. A missing seed is drawn here, so that every attempt of the request draws the same."""
    seed = secrets.randbits(63) if options.seed is None else options.seed

    def pick(value: float | None, default: float) -> float:
        return default if value is None else value

    sampling = Sampling(
        # An engine makes at least one token: with `max_tokens` 0 it is not shown.
        max_tokens=max(1, max_tokens),
        seed=seed & 0xFFFF_FFFF_FFFF_FFFF,
        temperature=pick(options.temperature, defaults.temperature),
        top_p=max(NARROWEST, pick(options.top_p, defaults.top_p)),
        top_k=int(pick(options.top_k, defaults.top_k)),
        min_p=pick(options.min_p, defaults.min_p),
        repetition_penalty=pick(options.repetition_penalty, defaults.repetition_penalty),
        presence_penalty=options.presence_penalty,
        frequency_penalty=options.frequency_penalty,
        logit_bias=options.logit_bias,
        min_tokens=min(options.min_tokens, max(1, max_tokens)),
        stop_token_ids=options.stop_token_ids,
        ignore_eos=options.ignore_eos,
    )
    if grammar is not None:
        sampling.grammar.CopyFrom(grammar_to_pb(grammar))
    if options.logprobs is not None:
        sampling.logprobs = options.logprobs
        if prompt_logprobs:
            sampling.prompt_logprobs = options.logprobs
    return sampling
