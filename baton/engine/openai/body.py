"""One choice of a request as the body of `/v1/completions`. Pure.

Every sampling parameter that the server takes is said, neutral or not: servers fill what is missing from defaults of
their own (llama.cpp a `top_k` of 40, vLLM the model's generation config), and two workers of one model must not differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from baton.engine import needs
from baton.engine.openai.dialect import Dialect
from baton.engine.port import SamplingParams

SEED_BITS = 31
"""What every server takes for a seed."""
NEXT_CHOICE = 0x9E3779B1
"""Between the seeds of two choices: odd, so that no two of a request are equal."""


def completion(
    model: str,
    prompt: str | Sequence[int],
    sampling: SamplingParams,
    dialect: Dialect,
    *,
    emitted: int,
    choice: int,
    salt: str = "",
) -> dict[str, Any]:
    """The body; `emitted` tokens of the budget are spent. Each choice is a request of its own, with its own seed.
    `salt` parts the server's prefix cache where the server can do that."""
    body: dict[str, Any] = {
        "model": model,
        "prompt": prompt,
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": sampling.max_tokens - emitted,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "frequency_penalty": sampling.frequency_penalty,
        "seed": (sampling.seed + choice * NEXT_CHOICE) % 2**SEED_BITS,
    }
    if sampling.top_p == 1.0 and not dialect.top_p_one:
        del body["top_p"]
    values: dict[str, Any] = {
        needs.PRESENCE_PENALTY: sampling.presence_penalty,
        needs.TOP_K: sampling.top_k or dialect.all_tokens,
        needs.MIN_P: sampling.min_p,
        needs.REPETITION_PENALTY: sampling.repetition_penalty,
        needs.MIN_TOKENS: max(0, sampling.min_tokens - emitted),
        needs.IGNORE_EOS: sampling.ignore_eos,
    }
    if sampling.logit_bias:
        values[needs.LOGIT_BIAS] = {str(token): bias for token, bias in sampling.logit_bias.items()}
    if sampling.stop_token_ids:
        values[needs.STOP_TOKEN_IDS] = list(sampling.stop_token_ids)
    for need, value in values.items():
        if need in dialect.fields:
            body[dialect.fields[need]] = value
    if salt and dialect.salt:
        body[dialect.salt] = salt
    return {**body, **dialect.always}
