"""The right text: alone, in company, handed over, resumed, and from any number of choices."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from baton.v1 import worker_pb2 as pb
from tests.conformance.asking import Answer, answers, complete, disaggregated, local, merged
from tests.conformance.subjects import Subject
from tests.worker_process import Frontend

pytestmark = [pytest.mark.integration, pytest.mark.slow]

TEXTS = [
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "def fibonacci(n):\n",
    "The three laws of thermodynamics are:\n1.",
    "Q: Why is the sky blue?\nA:",
    "To bake a loaf of bread you need",
    "In 1969, the first humans",
    "A list of prime numbers: 2, 3, 5,",
]
TOKENS = 32


def prompts(subject: Subject) -> list[list[int]]:
    """Of less than a block to more than three, some ending with one."""
    out = []
    for n, text in enumerate(TEXTS):
        ids = subject.tokenizer.encode(text, add_special=False)
        out.append((ids * 20)[: (len(ids), 32, 33, 64, 47, 96, 100, 31)[n]])
    return out


def right(answer: Answer, subject: Subject, prompt: list[int], tokens: int = TOKENS) -> None:
    assert answer.text == subject.golden(tuple(prompt), tokens)
    assert (answer.tokens, answer.finish) == (tokens, "length")


async def test_greedy_alone(subject: Subject, client: Frontend) -> None:
    for n, prompt in enumerate(prompts(subject)):
        plan = merged(subject.merged)
        right(await complete(client, subject.tokenizer, f"alone{n}", prompt, plan, max_tokens=TOKENS), subject, prompt)


async def test_greedy_in_company(subject: Subject, client: Frontend) -> None:
    """Nobody's text depends on who is computed beside it. (For an engine whose sums do: each text goes its own way, to
    its end, and none is another's.)"""
    asked = prompts(subject)
    plan = merged(subject.merged)
    found = await asyncio.gather(
        *(
            complete(client, subject.tokenizer, f"crowd{n}", prompt, plan, max_tokens=TOKENS)
            for n, prompt in enumerate(asked)
        )
    )
    for answer, prompt in zip(found, asked, strict=True):
        if subject.exact:
            right(answer, subject, prompt)
        assert (answer.tokens, answer.finish) == (TOKENS, "length")
        assert answer.text[:8] == subject.golden(tuple(prompt), TOKENS)[:8]


async def test_greedy_handed_over(subject: Subject, decode: Frontend) -> None:
    """All at once, from KV that the decode worker did not compute."""
    assert subject.prefill is not None
    assert subject.decode is not None
    plan, asked = disaggregated(subject.prefill, subject.decode), prompts(subject)
    found = await asyncio.gather(
        *(
            complete(decode, subject.tokenizer, f"over{n}", prompt, plan, max_tokens=TOKENS)
            for n, prompt in enumerate(asked)
        )
    )
    for answer, prompt in zip(found, asked, strict=True):
        right(answer, subject, prompt)
        route = answer.route
        assert (route.mode, route.prefill) == (pb.MODE_DISAGGREGATED, subject.prefill.id)
        moved = len(prompt) // 32 * 32 if subject.whole_blocks else len(prompt)
        assert route.loaded_tokens + route.cached_tokens >= moved
        assert (route.kv_bytes > 0) == (route.loaded_tokens > 0)


async def test_greedy_local_on_decode(subject: Subject, decode: Frontend) -> None:
    assert subject.decode is not None
    prompt = prompts(subject)[6]
    answer = await complete(decode, subject.tokenizer, "local", prompt, local(subject.decode), max_tokens=TOKENS)
    right(answer, subject, prompt)


@pytest.mark.parametrize("have", [1, 13, TOKENS - 1])
async def test_resumed(subject: Subject, client: Frontend, have: int) -> None:
    """What the client has is not said again; budgets count it."""
    prompt = prompts(subject)[4]
    whole = subject.golden(tuple(prompt), TOKENS)
    emitted = subject.tokenizer.encode(whole, add_special=False)[:have]
    answer = await complete(
        client,
        subject.tokenizer,
        f"resumed{have}",
        prompt,
        merged(subject.merged),
        max_tokens=TOKENS,
        emitted=emitted,
    )
    assert (answer.tokens, answer.finish) == (TOKENS - have, "length")
    if subject.exact:
        assert subject.tokenizer.decode([*emitted, *answer.ids]) == whole
    assert answer.text


SAMPLING: dict[str, Any] = {"temperature": 1.2, "top_p": 0.95, "max_tokens": 24}


async def test_seeds(subject: Subject, client: Frontend) -> None:
    """Another seed is another text; of an engine that promises it, the same seed the same text."""
    plan, prompt = merged(subject.merged), prompts(subject)[1]
    texts = [
        (await complete(client, subject.tokenizer, f"seed{n}", prompt, plan, seed=seed, **SAMPLING)).text
        for n, seed in enumerate((5, 6, 7, 5))
    ]
    assert len(set(texts[:3])) > 1
    if subject.exact:
        assert texts[3] == texts[0]


async def test_choices(subject: Subject, client: Frontend) -> None:
    """Each is drawn for itself; greedily all are the same."""
    plan, prompt = merged(subject.merged), prompts(subject)[2]
    drawn = answers(await client.run("drawn", prompt, plan, choices=(0, 1, 2), **SAMPLING), subject.tokenizer)
    assert sorted(drawn) == [0, 1, 2]
    assert len({answer.text for answer in drawn.values()}) > 1
    greedy = answers(await client.run("same", prompt, plan, choices=(0, 1, 2), max_tokens=8), subject.tokenizer)
    for answer in greedy.values():
        right(answer, subject, prompt, 8)
