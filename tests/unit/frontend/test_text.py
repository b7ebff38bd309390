"""Engines that answer text: shown as it comes, stopped by strings, counted by their own word, resumed in both ways."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.model.card import Model
from baton.v1 import worker_pb2
from services.frontend.detokenise import ChoiceText
from tests.unit.frontend.peers import HANG_S, Attempt, ScriptedWorker, Stack, running, until
from tests.unit.frontend.test_failures import TEXT, ids_of, says, stream_text

pytestmark = pytest.mark.timeout(60)


def piece(attempt: Attempt, text: str, at: int, tokens: int, **more: Any) -> worker_pb2.Event:
    return attempt.event(offset=at, text=text, text_tokens=tokens, **more)


async def say(attempt: Attempt, text: str, finish: str = "", size: int = 3) -> None:
    """All of `text` in pieces, each counted as a token; the last one may finish."""
    starts = range(0, len(text), size)
    for n, at in enumerate(starts):
        await attempt.send(piece(attempt, text[at : at + size], at, n + 1))
    if finish:
        await attempt.send(piece(attempt, "", len(text), len(starts), finish=finish, route=attempt.route()))


async def completion(stack: Stack, **fields: Any) -> dict[str, Any]:
    async with httpx.AsyncClient(base_url=stack.url, timeout=HANG_S, trust_env=False) as client:
        asked = {"model": stack.model.name, "prompt": "hi", "max_tokens": 100} | fields
        reply = await client.post("/v1/completions", json=asked)
        assert reply.status_code == 200, reply.text
        return dict(reply.json())


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 8)), max_size=20))
def test_tokens_and_text_in_turn_are_one_text(model: Model, legs: list[tuple[bool, int]]) -> None:
    """Whoever goes on says the next characters, by the tokens that a resume counts as output."""
    choice = ChoiceText(model.tokenizer, stops=(), ends=frozenset(), min_tokens=0, max_tokens=1000)
    shown, at, counted = "", 0, 0
    for as_text, size in legs:
        part = TEXT[at : at + size]
        at += len(part)
        if as_text:
            shown += choice.push_text(part, size, "").text
            counted += size
        else:
            ids = model.tokenizer.encode_continuation(part)
            shown += choice.push(ids, (), "").text
            counted += len(ids)
    shown += choice.push_text(TEXT[at:], 1, "length").text
    assert shown == TEXT
    assert (choice.tokens, choice.finish) == (counted + 1, "length")


def test_a_character_that_tokens_only_began_is_said_by_the_text(model: Model) -> None:
    ids = model.tokenizer.encode("a😀", add_special=False)
    choice = ChoiceText(model.tokenizer, stops=(), ends=frozenset(), min_tokens=0, max_tokens=1000)
    shown = choice.push(ids[:-1], (), "").text + choice.push_text("😀b", 2, "").text
    shown += choice.push(model.tokenizer.encode("c", add_special=False), (), "length").text
    assert shown == "a😀bc"


@pytest.mark.parametrize("size", [1, 2, 7, 100])
async def test_shown_counted_and_ended(model: Model, size: int) -> None:
    async def script(attempt: Attempt) -> None:
        await say(attempt, TEXT, "stop", size)

    async with running(model, ScriptedWorker("up", script)) as stack:
        text, story = await stream_text(stack)
        assert (text, story["worker"], story["attempts"]) == (TEXT, "up", 1)
        answer = await completion(stack)
        assert answer["choices"][0] | {"logprobs": None} == {
            "index": 0,
            "text": TEXT,
            "logprobs": None,
            "finish_reason": "stop",
        }
        assert answer["usage"]["completion_tokens"] == -(-len(TEXT) // size)


async def test_the_servers_own_count_is_the_last_word(model: Model) -> None:
    async def script(attempt: Attempt) -> None:
        await attempt.send(piece(attempt, TEXT, 0, 1))
        await attempt.send(piece(attempt, "", len(TEXT), 23, finish="length", route=attempt.route()))

    async with running(model, ScriptedWorker("up", script)) as stack:
        assert (await completion(stack))["usage"]["completion_tokens"] == 23


@pytest.mark.parametrize("longer", [True, False])
async def test_a_context_that_ends_is_left_for_a_longer_one(model: Model, longer: bool) -> None:
    async def outgrown(attempt: Attempt) -> None:
        await say(attempt, TEXT[:9], "context")

    async def goes_on(attempt: Attempt) -> None:
        emitted = list(attempt.message.emitted_ids)
        assert model.tokenizer.decode(emitted) == TEXT[:9]
        await attempt.tokens(model.tokenizer.encode_continuation(TEXT[9:]), offset=len(emitted), finish="stop")

    small, other = ScriptedWorker("up", outgrown), ScriptedWorker("torch", goes_on)
    small.max_context, other.max_context = 500, 501 if longer else 500
    async with running(model, small, other) as stack:
        text, story = await stream_text(stack)
    assert (text, "RESUMED" in story["reasons"]) == ((TEXT, True) if longer else (TEXT[:9], False))
    assert len(other.attempts) == longer


@pytest.mark.parametrize("size", [1, 3, 100])
async def test_stop_strings_are_found_over_pieces_and_end_the_attempt(model: Model, size: int) -> None:
    async def script(attempt: Attempt) -> None:
        await say(attempt, TEXT, "", size)  # it never ends by itself
        await attempt.aborted.wait()

    worker = ScriptedWorker("up", script)
    async with running(model, worker) as stack:
        answer = await completion(stack, stop=["is a te"])
        assert (answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]) == (
            TEXT[: TEXT.index("is a te")],
            "stop",
        )
        await until(lambda: worker.attempts[0].aborted.is_set())


@pytest.mark.parametrize("have", [1, 6, 7, 30])
async def test_text_that_breaks_is_resumed_as_tokens(model: Model, have: int) -> None:
    async def dies(attempt: Attempt) -> None:
        await say(attempt, TEXT[:have], size=1)
        await asyncio.sleep(0.05)
        attempt.worker.cut()

    async def goes_on(attempt: Attempt) -> None:
        emitted = list(attempt.message.emitted_ids)
        assert model.tokenizer.decode(emitted) == TEXT[:have]
        ids = model.tokenizer.encode_continuation(TEXT[have:])
        for n, token in enumerate(ids):
            last = {"finish": "stop", "route": attempt.route()} if n == len(ids) - 1 else {}
            await attempt.tokens([token], offset=len(emitted) + n, **last)

    dying = ScriptedWorker("up", dies)
    async with running(model, dying, ScriptedWorker("torch", goes_on)) as stack:
        text, story = await stream_text(stack)
        assert text == TEXT
        assert "RESUMED" in story["reasons"]
        assert story["attempts"] == 2


@pytest.mark.parametrize("have", [1, 2, 3, 4, 5, 9])
async def test_tokens_that_break_are_resumed_as_text(model: Model, have: int) -> None:
    """At any token, also one that only began a character: the text then says that character."""
    ids = ids_of(model)

    async def dies(attempt: Attempt) -> None:
        for offset in range(have):
            await attempt.tokens([ids[offset]], offset=offset)
        await asyncio.sleep(0.05)
        attempt.worker.cut()

    async def goes_on(attempt: Attempt) -> None:
        assert list(attempt.message.emitted_ids) == ids[:have]
        said = model.tokenizer.decode(ids[:have]).rstrip("\ufffd")
        await say(attempt, TEXT[len(said) :], "stop")

    async with running(model, ScriptedWorker("torch", dies), ScriptedWorker("up", goes_on)) as stack:
        text, _ = await stream_text(stack)
        assert text == TEXT


async def test_a_character_that_is_said_again_is_once_in_what_goes_on(model: Model) -> None:
    """Tokens that end within a character, the text of that character, tokens again: nothing of it is twice."""
    begun = model.tokenizer.encode("a😀", add_special=False)[:-1]

    async def tokens(attempt: Attempt) -> None:
        await attempt.tokens(begun, offset=0)
        await asyncio.sleep(0.05)
        attempt.worker.cut()

    async def text(attempt: Attempt) -> None:
        await say(attempt, "😀b", size=1)
        await asyncio.sleep(0.05)
        attempt.worker.cut()

    async def ends(attempt: Attempt) -> None:
        emitted = list(attempt.message.emitted_ids)
        await attempt.tokens(model.tokenizer.encode("c", add_special=False), offset=len(emitted), finish="stop")

    last = ScriptedWorker("torch-2", ends)
    async with running(model, ScriptedWorker("torch", tokens), ScriptedWorker("up", text), last) as stack:
        said, _ = await stream_text(stack)
    assert said == "a😀bc"
    assert model.tokenizer.decode(list(last.attempts[0].message.emitted_ids)) == "a😀b"


async def test_what_comes_twice_or_too_far_is_not_taken(model: Model) -> None:
    async def stutters(attempt: Attempt) -> None:
        await attempt.send(piece(attempt, TEXT[:5], 0, 1))
        await attempt.send(piece(attempt, TEXT[:5], 0, 1))
        await attempt.send(piece(attempt, TEXT[5:9], 5, 2))
        await attempt.send(piece(attempt, TEXT[20:], 20, 3, finish="stop"))

    async with running(model, ScriptedWorker("up", stutters), ScriptedWorker("torch", says(model))) as stack:

        async def goes_on(attempt: Attempt) -> None:
            said = model.tokenizer.decode(list(attempt.message.emitted_ids))
            assert said == TEXT[:9]
            await say(attempt, TEXT[9:], "stop")

        stack.workers[1].script = goes_on
        text, _ = await stream_text(stack)
        assert text == TEXT
        assert stack.count("dropped_events", why="doubled") == 1
        assert stack.count("dropped_events", why="gap") == 1


async def test_what_a_request_needs_goes_to_the_router(model: Model) -> None:
    async with running(model, ScriptedWorker("up", says(model))) as stack:
        await completion(stack, logprobs=1, top_k=5, temperature=1, ignore_eos=True)
        await completion(stack, temperature=0.5)
        await completion(stack, return_token_ids=True)
        await completion(stack, skip_special_tokens=False)
        needs = [list(request.needs) for request in stack.router.requests]
        assert needs == [["ignore_eos", "logprobs", "top_k"], [], ["return_token_ids"], ["skip_special_tokens"]]
