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
    beginning), by which the dialect is known. `all_tokens` is the `top_k` that means all of them, `top_p_one` whether a
    `top_p` of 1 may be said, `always` what is said in every request, `salt` how it calls what parts its cache."""

    name: str
    fields: Mapping[str, str] = field(default_factory=dict)
    owners: tuple[str, ...] = ()
    all_tokens: int = 0
    top_p_one: bool = True
    always: Mapping[str, object] = field(default_factory=dict)
    salt: str = ""

    @property
    def lacks(self) -> frozenset[str]:
        """What a request may need that this server cannot do. Always logprobs: they come as text, not as token ids."""
        return needs.ALL - frozenset(self.fields)


WHOLE_CONTEXT = 1 << 17
"""Tokens that llama.cpp's penalties look back: more than there are. (Recent releases refuse the -1 of older ones.)"""


def _same(*names: str) -> dict[str, str]:
    return {name: name for name in names}


_STANDARD = _same(needs.LOGIT_BIAS, needs.PRESENCE_PENALTY)
_COMMON = _STANDARD | _same(needs.TOP_K, needs.MIN_P, needs.IGNORE_EOS)
_ALL = _COMMON | _same(needs.REPETITION_PENALTY, needs.MIN_TOKENS, needs.STOP_TOKEN_IDS)
_LLAMA = _COMMON | {needs.REPETITION_PENALTY: "repeat_penalty"}

OPENAI = Dialect("openai", _STANDARD)
DIALECTS: tuple[Dialect, ...] = (
    OPENAI,
    Dialect("vllm", _ALL, ("vllm",), all_tokens=-1, salt="cache_salt"),
    Dialect("sglang", _ALL, ("sglang",), all_tokens=-1),
    Dialect("tensorrt-llm", _ALL, ("tensorrt_llm", "tensorrt-llm")),
    # Its penalties look at the last 64 tokens unless told otherwise; ours at all of them.
    Dialect("llama.cpp", _LLAMA, ("llamacpp", "llama.cpp"), always={"repeat_last_n": WHOLE_CONTEXT}),
    Dialect("triton", _STANDARD, ("triton",)),
    Dialect("tgi", _same(needs.REPETITION_PENALTY), top_p_one=False),
    Dialect("mindie", _STANDARD, ("mindie",)),
)
BY_NAME: Mapping[str, Dialect] = {dialect.name: dialect for dialect in DIALECTS}


def known_by(owner: str) -> Dialect:
    """The dialect of a server that names `owner` as its models' owner; OpenAI's own fields when it is nobody known."""
    owner = owner.lower()
    for dialect in DIALECTS:
        if any(owner.startswith(one) for one in dialect.owners):
            return dialect
    return OPENAI
