"""What a request must be to get in."""

from __future__ import annotations

import math
from dataclasses import dataclass

from baton.engine.port import Request
from baton.errors import BatonError, Reason

_NUMBERS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")


@dataclass(frozen=True)
class Limits:
    """What one engine takes. `max_jobs` bounds reservations, queued ones included."""

    block_size: int
    chunk_tokens: int
    max_streams: int
    max_jobs: int
    max_context: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]


def validate(request: Request, prompt: list[int], limits: Limits) -> None:
    """Raises BatonError(INVALID_REQUEST | CONTEXT_LENGTH_EXCEEDED) that names the field at fault.

    `prompt` is the request's prompt and emitted ids.
    """
    choices, params = request.choices, request.sampling
    if not prompt:
        raise BatonError(Reason.INVALID_REQUEST, "the prompt is empty", param="prompt_ids")
    if not choices or len(set(choices)) < len(choices):
        raise BatonError(Reason.INVALID_REQUEST, "choices must be given, each once", param="n")
    if request.emitted_ids and len(choices) > 1:
        raise BatonError(Reason.INVALID_REQUEST, "resume each choice on its own", param="emitted_ids")
    if max(prompt) >= limits.vocab_size or min(prompt) < 0:
        raise BatonError(
            Reason.INVALID_REQUEST, f"a token id is outside 0...{limits.vocab_size - 1}", param="prompt_ids"
        )
    for name, ids in (("logit_bias", params.logit_bias), ("stop_token_ids", params.stop_token_ids)):
        if ids and (max(ids) >= limits.vocab_size or min(ids) < 0):
            raise BatonError(Reason.INVALID_REQUEST, f"an id is outside 0...{limits.vocab_size - 1}", param=name)
    for name in _NUMBERS:
        if not math.isfinite(getattr(params, name)):
            raise BatonError(Reason.INVALID_REQUEST, f"{name} must be a finite number", param=name)
    if len(prompt) + 1 > limits.max_context:
        raise BatonError(
            Reason.CONTEXT_LENGTH_EXCEEDED,
            f"{len(prompt)} prompt tokens leave no room in a context of {limits.max_context}",
            param="prompt_ids",
        )
    if params.max_tokens <= len(request.emitted_ids):
        raise BatonError(Reason.INVALID_REQUEST, "max_tokens leaves nothing to generate", param="max_tokens")
