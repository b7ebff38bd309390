"""What is asked of each kind of server: all that it takes is said, nothing that it would ignore."""

from __future__ import annotations

from typing import Any

import pytest

from baton.engine import needs
from baton.engine.openai.body import completion
from baton.engine.openai.dialect import BY_NAME, DIALECTS, OPENAI, Dialect, known_by
from baton.engine.port import SamplingParams

ASKED = SamplingParams(
    max_tokens=50,
    seed=2**63 + 5,
    temperature=0.7,
    top_k=40,
    min_p=0.1,
    repetition_penalty=1.2,
    logit_bias={7: -100.0},
    presence_penalty=0.5,
    min_tokens=10,
    stop_token_ids=(3,),
    ignore_eos=True,
)
PLAIN = SamplingParams(max_tokens=50, seed=1)
STANDARD = {
    "model",
    "prompt",
    "stream",
    "stream_options",
    "max_tokens",
    "temperature",
    "top_p",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "logit_bias",
}


def body(sampling: SamplingParams, dialect: Dialect, **more: Any) -> dict[str, Any]:
    return completion("m", [1, 2], sampling, dialect, **({"emitted": 0, "choice": 0} | more))


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda d: d.name)
def test_every_need_is_said_or_lacking(dialect: Dialect) -> None:
    said = body(ASKED, dialect)
    asked = needs.needs(ASKED)
    never = {needs.LOGPROBS, needs.PROMPT_LOGPROBS, needs.TOKEN_IDS, needs.SPECIAL_TOKENS, needs.EMBEDDINGS}
    never |= set(needs.GRAMMARS.values())
    assert asked == needs.ALL - never
    for need in asked:
        assert (need in dialect.lacks) != (dialect.fields.get(need) in said), need
    assert set(said) - STANDARD == (set(dialect.fields.values()) | set(dialect.always)) - STANDARD
    assert never <= dialect.lacks


def test_neutral_values_are_said_too() -> None:
    """Else the server's own defaults would count."""
    vllm, plain = body(PLAIN, known_by("vllm")), body(PLAIN, OPENAI)
    assert (vllm["top_k"], vllm["min_p"], vllm["repetition_penalty"], vllm["ignore_eos"]) == (-1, 0.0, 1.0, False)
    assert body(PLAIN, known_by("llamacpp"))["top_k"] == 0
    assert set(plain) == STANDARD - {"logit_bias"}
    assert "top_p" not in body(PLAIN, BY_NAME["tgi"]), "it refuses 1"


def test_budgets_are_what_is_left() -> None:
    said = body(ASKED, known_by("vllm"), emitted=8)
    assert (said["max_tokens"], said["min_tokens"]) == (42, 2)
    assert body(ASKED, known_by("vllm"), emitted=12)["min_tokens"] == 0


def test_seeds_fit_and_differ_between_choices() -> None:
    seeds = [body(ASKED, OPENAI, choice=choice)["seed"] for choice in range(128)]
    assert len(set(seeds)) == 128
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert seeds == [body(ASKED, OPENAI, choice=choice)["seed"] for choice in range(128)]


def test_servers_are_known_by_who_owns_their_models() -> None:
    assert [
        known_by(o).name for o in ("vllm", "llamacpp", "SGLang", "TensorRT_LLM", "Triton Inference Server", "x")
    ] == [
        "vllm",
        "llama.cpp",
        "sglang",
        "tensorrt-llm",
        "triton",
        "openai",
    ]


def test_needs_are_those_of_the_draw() -> None:
    greedy = SamplingParams(max_tokens=1, seed=0, temperature=0.0, top_k=40, min_p=0.5)
    assert needs.needs(greedy) == frozenset()
    assert needs.needs(SamplingParams(max_tokens=1, seed=0, logprobs=0)) == {"logprobs"}
