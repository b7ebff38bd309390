"""What a request may need that not every engine can do, by name.

A frontend says it with `RouteRequest.needs`, a worker what it cannot do with `Worker.lacks`, and the router leaves out
whom a request would ask too much of. The names are those of the API's fields.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from baton.engine.port import GrammarKind, SamplingParams

LOGPROBS: Final = "logprobs"
PROMPT_LOGPROBS: Final = "prompt_logprobs"
TOP_K: Final = "top_k"
MIN_P: Final = "min_p"
REPETITION_PENALTY: Final = "repetition_penalty"
LOGIT_BIAS: Final = "logit_bias"
PRESENCE_PENALTY: Final = "presence_penalty"
MIN_TOKENS: Final = "min_tokens"
STOP_TOKEN_IDS: Final = "stop_token_ids"
IGNORE_EOS: Final = "ignore_eos"
TOKEN_IDS: Final = "return_token_ids"
"""Of the output: an engine that answers text has none."""
SPECIAL_TOKENS: Final = "skip_special_tokens"
"""And its control tokens, which the text of such an engine leaves out."""
EMBEDDINGS: Final = "embeddings"
"""`Engine.embed`."""
GRAMMAR: Final = "grammar:"
"""And a kind: an output that follows a grammar of it."""
GRAMMARS: Final = {kind: f"{GRAMMAR}{kind.value}" for kind in GrammarKind}

ALL: Final = frozenset(
    {
        LOGPROBS,
        PROMPT_LOGPROBS,
        TOP_K,
        MIN_P,
        REPETITION_PENALTY,
        LOGIT_BIAS,
        PRESENCE_PENALTY,
        MIN_TOKENS,
        STOP_TOKEN_IDS,
        IGNORE_EOS,
        TOKEN_IDS,
        SPECIAL_TOKENS,
        EMBEDDINGS,
        *GRAMMARS.values(),
    }
)


def needs(sampling: SamplingParams) -> frozenset[str]:
    """What `sampling` asks for beyond temperature, `top_p`, seed, `frequency_penalty` and `max_tokens`.

    What is asked of the tokens themselves (`TOKEN_IDS`, `SPECIAL_TOKENS`) is not sampling: the frontend adds it.
    """
    greedy = sampling.temperature == 0
    asked = {
        LOGPROBS: sampling.logprobs is not None,
        PROMPT_LOGPROBS: sampling.prompt_logprobs is not None,
        # The most likely token is in every nucleus: without chance these two change nothing.
        TOP_K: sampling.top_k > 0 and not greedy,
        MIN_P: sampling.min_p > 0 and not greedy,
        REPETITION_PENALTY: sampling.repetition_penalty != 1.0,
        LOGIT_BIAS: bool(sampling.logit_bias),
        PRESENCE_PENALTY: sampling.presence_penalty != 0.0,
        MIN_TOKENS: sampling.min_tokens > 0,
        STOP_TOKEN_IDS: bool(sampling.stop_token_ids),
        IGNORE_EOS: sampling.ignore_eos,
    }
    found = {name for name, wanted in asked.items() if wanted}
    return frozenset(found | {GRAMMARS[sampling.grammar.kind]} if sampling.grammar is not None else found)


def lacked_grammars(followed: Collection[GrammarKind]) -> frozenset[str]:
    """What an engine lacks that only follows grammars of those kinds."""
    return frozenset(name for kind, name in GRAMMARS.items() if kind not in followed)
