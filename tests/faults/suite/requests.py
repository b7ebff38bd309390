"""What clients ask, what an undisturbed run answers, and how an answer under faults is judged."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

TIE = 1e-4
"""Where the undisturbed run's two best log-probabilities lie within this, another batch's rounding may choose."""
_WORDS = ("river", "stone", "lamp", "winter", "train", "letter", "garden", "silver", "cloud", "harbour", "violin")


@dataclass(frozen=True)
class Ask:
    """One kind of request: `body` is for /v1/completions; every answer has exactly `tokens` tokens, or a stop."""

    name: str
    body: dict[str, Any]
    choices: int = 1
    stream: bool = True


@dataclass(frozen=True)
class Step:
    """One token of an undisturbed answer: where its text begins, and how far the second best was."""

    at: int
    margin: float


@dataclass
class Reference:
    """An undisturbed answer."""

    texts: list[str]
    finishes: list[str]
    tokens: int
    """Output tokens of all choices."""
    prompt_tokens: int
    steps: list[Step] = field(default_factory=list)
    """Of the only choice of a greedy answer."""


class Verdict(StrEnum):
    """What an answer is, against its reference."""

    RIGHT = "right"
    NEAR_TIE = "near tie"
    LOST = "lost tokens"
    DOUBLED = "doubled tokens"
    WRONG = "wrong text"


@dataclass(frozen=True)
class Judgement:
    """`amount`: tokens lost or doubled."""

    verdict: Verdict
    amount: int = 0
    detail: str = ""


def judge(reference: Reference, texts: list[str], finishes: list[str], tokens: int) -> Judgement:
    """Compare a whole answer; `tokens` is what its usage says."""
    if texts == reference.texts and finishes == reference.finishes and tokens == reference.tokens:
        return Judgement(Verdict.RIGHT)
    different = next((i for i, (a, b) in enumerate(zip(texts, reference.texts, strict=True)) if a != b), 0)
    got, wanted = texts[different], reference.texts[different]
    at = next((i for i, (a, b) in enumerate(zip(got, wanted, strict=False)) if a != b), min(len(got), len(wanted)))
    where = f"choice {different} at character {at}: {got[at : at + 40]!r}, not {wanted[at : at + 40]!r}"
    # The token of that character, or the one before: text of half a character is held back.
    near = [step for step in reference.steps if step.at <= at][-2:]
    if any(step.margin <= TIE for step in near):
        return Judgement(Verdict.NEAR_TIE, detail=where)
    if tokens < reference.tokens:
        return Judgement(Verdict.LOST, reference.tokens - tokens, where)
    if tokens > reference.tokens:
        return Judgement(Verdict.DOUBLED, tokens - reference.tokens, where)
    return Judgement(Verdict.WRONG, detail=f"{where}; {finishes} against {reference.finishes}")


def is_prefix(reference: Reference, texts: list[str]) -> bool:
    """Whether what came of an answer that was cut off (its frontend died) is the beginning of it."""
    return all(whole.startswith(part) for part, whole in zip(texts, reference.texts, strict=True))


def catalogue(seed: int, model: str, tokens: int, longest_prompt: int) -> list[Ask]:
    """A mix of prompts and parameters: each with another way to go wrong when a stream moves."""
    chance = random.Random(seed)

    def prompt(words: int) -> str:
        return " ".join(chance.choices(_WORDS, k=max(2, words)))

    def ask(name: str, **more: Any) -> Ask:
        choices = more.get("n", 1)
        stream = more.pop("stream", True)
        words = chance.choice((3, 12, longest_prompt // 12, longest_prompt // 6))
        body = {"model": model, "prompt": prompt(words), "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        return Ask(name, body | more, choices, stream)

    asks = [ask(f"greedy {i}") for i in range(6)]
    asks += [ask(f"seeded {i}", temperature=0.9, top_p=0.95, seed=chance.randrange(1 << 30)) for i in range(4)]
    asks += [ask("top-k", temperature=1.1, top_k=20, min_p=0.02, seed=7)]
    asks += [ask("penalties", presence_penalty=0.6, frequency_penalty=0.4)]
    asks += [ask("repetition", repetition_penalty=1.2, temperature=0.7, seed=11)]
    asks += [ask("two choices", n=2, temperature=0.8, seed=5, max_tokens=tokens // 2)]
    asks += [ask("unstreamed", stream=False), ask("unstreamed seeded", stream=False, temperature=0.8, seed=3)]
    asks += [ask("logprobs", logprobs=2)]
    asks += [ask("one token", max_tokens=1)]
    return asks


def with_stop(ask: Ask, reference: Reference, chance: random.Random) -> Ask | None:
    """The same request, to be stopped in its middle by a string of its own answer; None when it has no such string."""
    text = reference.texts[0]
    middle = len(text) // 2
    at = chance.randrange(middle, max(middle + 1, len(text) * 3 // 4))
    stop = text[at : at + 4]
    if len(stop) < 4 or "\ufffd" in stop:
        return None
    return Ask(f"{ask.name}, stopped", ask.body | {"stop": [stop]}, ask.choices, ask.stream)
