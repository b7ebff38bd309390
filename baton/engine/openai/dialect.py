"""What each kind of server takes beyond OpenAI's own fields, and how it calls that.

A server ignores what it does not know, so a parameter that is sent on luck is one that is silently not honoured. What
a dialect does not list, its worker `lacks`, and the router leaves it out for requests that need it. `docs/engines/`
says of each server where this was read or tried.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from baton.engine import needs


@dataclass(frozen=True)
class Dialect:
    """`fields`: need -> the server's name for it. `owners`: how `/v1/models` names the owner (in lower case, as its
    beginning), by which the dialect is known. `all_tokens` is the `top_k` that means all of them."""

    name: str
    fields: Mapping[str, str] = field(default_factory=dict)
    owners: tuple[str, ...] = ()
    all_tokens: int = 0

    @property
    def lacks(self) -> frozenset[str]:
        """What a request may need that this server cannot do. Never logprobs: they come as text, not as token ids."""
        return needs.ALL - frozenset(self.fields)


_COMMON = {
    needs.LOGIT_BIAS: "logit_bias",
    needs.TOP_K: "top_k",
    needs.MIN_P: "min_p",
    needs.IGNORE_EOS: "ignore_eos",
}
_VLLM = {
    **_COMMON,
    needs.REPETITION_PENALTY: "repetition_penalty",
    needs.MIN_TOKENS: "min_tokens",
    needs.STOP_TOKEN_IDS: "stop_token_ids",
}

OPENAI = Dialect("openai", {needs.LOGIT_BIAS: "logit_bias"})
DIALECTS: tuple[Dialect, ...] = (
    OPENAI,
    Dialect("vllm", _VLLM, ("vllm",), -1),
    Dialect("sglang", _VLLM, ("sglang",), -1),
    Dialect("llama.cpp", _COMMON, ("llamacpp", "llama.cpp")),
    Dialect(
        "tensorrt-llm",
        {name: said for name, said in _VLLM.items() if name != needs.LOGIT_BIAS},
        ("tensorrt_llm", "tensorrt-llm"),
    ),
    Dialect("triton", {needs.LOGIT_BIAS: "logit_bias"}, ("triton",)),
    Dialect("tgi", {}, ("tgi", "huggingface")),
    Dialect("mindie", {name: _VLLM[name] for name in (needs.TOP_K, needs.REPETITION_PENALTY)}, ("mindie",)),
)
BY_NAME: Mapping[str, Dialect] = {dialect.name: dialect for dialect in DIALECTS}


def known_by(owner: str) -> Dialect:
    """The dialect of a server that names `owner` as its models' owner; OpenAI's own fields when it is nobody known."""
    owner = owner.lower()
    for dialect in DIALECTS:
        if any(owner.startswith(one) for one in dialect.owners):
            return dialect
    return OPENAI
