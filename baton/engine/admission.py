"""What a request must be to get in."""

from __future__ import annotations

import math
from dataclasses import dataclass

from baton.engine.chunk import SHORT_SHARE
from baton.engine.port import GrammarKind, Request
from baton.errors import BatonError, Reason

MAX_CHOICES = 128
MAX_LOGPROBS = 128
_RANGES = {
    "temperature": (0.0, math.inf),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-math.inf, math.inf),
    "frequency_penalty": (-math.inf, math.inf),
    "repetition_penalty": (1e-6, math.inf),
}
"""Of numbers, all finite."""


@dataclass(frozen=True)
class Limits:
    """What one engine takes. `max_jobs` bounds reservations, queued ones included. `chunk_tokens` of prompts are
    computed in a step at most."""

    block_size: int
    chunk_tokens: int
    max_streams: int
    max_jobs: int
    max_context: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    grammars: tuple[GrammarKind, ...] = ()

    @property
    def short_tokens(self) -> int:
        """Prompts with no more tokens to compute overtake longer ones."""
        return self.chunk_tokens // SHORT_SHARE


def validate(request: Request, prompt: list[int], limits: Limits) -> None:
    """Raises BatonError(INVALID_REQUEST | CONTEXT_LENGTH_EXCEEDED | GRAMMAR_UNSUPPORTED) that names the field at fault.

    `prompt` is the request's prompt and emitted ids.
    """
    choices, params = request.choices, request.sampling
    if not prompt:
        raise BatonError(Reason.INVALID_REQUEST, "the prompt is empty", param="prompt_ids")
    if not choices or len(set(choices)) < len(choices):
        raise BatonError(Reason.INVALID_REQUEST, "choices must be given, each once", param="n")
    if max(choices) >= MAX_CHOICES or min(choices) < 0:
        raise BatonError(Reason.INVALID_REQUEST, f"a choice is outside 0...{MAX_CHOICES - 1}", param="n")
    if request.emitted_ids and len(choices) > 1:
        raise BatonError(Reason.INVALID_REQUEST, "resume each choice on its own", param="emitted_ids")
    _in_vocabulary(prompt, limits, "prompt_ids")
    for name, ids in (("logit_bias", params.logit_bias), ("stop_token_ids", params.stop_token_ids)):
        if ids and (max(ids) >= limits.vocab_size or min(ids) < 0):
            raise BatonError(Reason.INVALID_REQUEST, f"an id is outside 0...{limits.vocab_size - 1}", param=name)
    for name, (low, high) in _RANGES.items():
        value = getattr(params, name)
        if not math.isfinite(value) or not low <= value <= high:
            raise BatonError(Reason.INVALID_REQUEST, f"{name} must be a finite number{_between(low, high)}", param=name)
    if not all(map(math.isfinite, params.logit_bias.values())):
        raise BatonError(Reason.INVALID_REQUEST, "logit_bias must be finite numbers", param="logit_bias")
    for name in ("logprobs", "prompt_logprobs"):
        if (getattr(params, name) or 0) > MAX_LOGPROBS:
            raise BatonError(Reason.INVALID_REQUEST, f"{name} must be at most {MAX_LOGPROBS}", param=name)
    if params.grammar is not None and params.grammar.kind not in limits.grammars:
        message = f"no grammars of kind {params.grammar.kind} are followed here"
        raise BatonError(Reason.GRAMMAR_UNSUPPORTED, message, param="grammar")
    if len(prompt) + 1 > limits.max_context:
        raise BatonError(
            Reason.CONTEXT_LENGTH_EXCEEDED,
            f"{len(prompt)} prompt tokens leave no room in a context of {limits.max_context}",
            param="prompt_ids",
        )
    if params.max_tokens <= len(request.emitted_ids):
        raise BatonError(Reason.INVALID_REQUEST, "max_tokens leaves nothing to generate", param="max_tokens")


def validate_input(ids: list[int], limits: Limits) -> None:
    """As `validate`, of an input that is embedded: all of the context is its own."""
    if not ids:
        raise BatonError(Reason.INVALID_REQUEST, "the input is empty", param="input")
    _in_vocabulary(ids, limits, "input")
    if len(ids) > limits.max_context:
        message = f"{len(ids)} tokens are more than the context of {limits.max_context}"
        raise BatonError(Reason.CONTEXT_LENGTH_EXCEEDED, message, param="input")


def _in_vocabulary(ids: list[int], limits: Limits, param: str) -> None:
    if max(ids) >= limits.vocab_size or min(ids) < 0:
        raise BatonError(Reason.INVALID_REQUEST, f"a token id is outside 0...{limits.vocab_size - 1}", param=param)


def _between(low: float, high: float) -> str:
    if math.isinf(low):
        return ""
    return f" of at least {low:g}" if math.isinf(high) else f" from {low:g} to {high:g}"
