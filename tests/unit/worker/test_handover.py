"""The hand-over between two workers, with engines that stop where the test says."""

from __future__ import annotations

import asyncio
import random

import pytest

from baton.errors import BatonError, Reason
from baton.v1 import worker_pb2 as pb
from tests.unit.worker.engine import SPEC, token
from tests.unit.worker.pair import HANG_S, Client, pair

PROMPT = list(range(1, 15))  # 14 tokens: three blocks and a half


def expected(n: int, choice: int = 0) -> list[int]:
    return [token(PROMPT, choice, i) for i in range(n)]


async def test_tokens_come_once_and_in_order() -> None:
    async with pair() as both:
        await both.client.submit("u", PROMPT, both.plan())
        last = await both.client.until("u")
        assert both.client.tokens("u") == expected(6)
        assert [e.offset for e in both.client.of("u")] == list(range(6))
        assert last.finish == "length"
        assert last.route.loaded_tokens == 14
        assert last.route.kv_bytes == 400
        assert last.route.computed_tokens == 0
        request, first, cached = both.decode.engine.generated[0]
        assert (request.uid, [t.token_id for t in first], cached) == ("u", expected(1), 14)
        await both.idle()


async def test_the_first_token_does_not_wait_for_the_kv() -> None:
    async with pair() as both:
        await both.client.submit("u", PROMPT, both.plan())
        both.decode.engine.gate.clear()  # loads stand still
        await both.client.first("u")
        assert both.client.tokens("u") == expected(1)
        assert both.decode.engine.generated == []
        both.decode.engine.gate.set()
        await both.client.until("u")
        assert both.client.tokens("u") == expected(6)


async def test_one_token_needs_no_kv() -> None:
    async with pair() as both:
        await both.client.submit("u", PROMPT, both.plan(), max_tokens=1)
        last = await both.client.until("u")
        assert (both.client.tokens("u"), last.finish) == (expected(1), "length")
        assert last.HasField("route")
        await both.idle()
        assert both.decode.engine.generated == []


async def test_a_first_token_that_fills_our_context_is_the_last() -> None:
    async with pair() as both:
        prompt = [1] * (SPEC.max_context - 1)
        await both.client.submit("u", prompt, both.plan())
        last = await both.client.until("u")
        assert (len(both.client.tokens("u")), last.finish) == (1, "length")
        await both.idle()
        assert both.decode.engine.generated == []


async def test_a_first_token_that_stops_is_no_output() -> None:
    async with pair() as both:
        both.prefill.engine.first_stops = True
        await both.client.submit("u", PROMPT, both.plan())
        last = await both.client.until("u")
        assert (both.client.tokens("u"), last.finish) == ([], "stop")
        await both.idle()


async def test_choices() -> None:
    async with pair() as both:
        await both.client.submit("u", PROMPT, both.plan(), choices=(0, 1))
        await both.client.until("u", 2)
        assert both.client.tokens("u", 0) == expected(6)
        assert both.client.tokens("u", 1) == expected(6, 1)


async def test_a_resume_starts_at_its_offset() -> None:
    async with pair() as both:
        await both.client.submit("u", PROMPT, both.plan(), emitted=expected(3))
        await both.client.until("u")
        assert both.client.tokens("u") == expected(6)[3:]
        assert [e.offset for e in both.client.of("u")] == [3, 4, 5]


@pytest.mark.parametrize("reason", [Reason.KV_CHECKSUM_MISMATCH, Reason.KV_TRANSFER_TIMEOUT, Reason.KV_BAD_HANDLE])
async def test_a_failed_read_keeps_the_prefix(reason: Reason) -> None:
    async with pair() as both:
        both.prefill.engine.gate.clear()
        both.decode.engine.fail_read = [reason]
        await both.client.submit("u", PROMPT, both.plan(local=True))
        both.prefill.engine.gate.set()
        last = await both.client.until("u")
        assert both.client.tokens("u") == expected(6)
        assert list(last.route.reasons)[-1] == "LOCAL_FALLBACK"
        assert last.route.computed_tokens == 14 - both.decode.engine.generated[0][2]
        await both.idle()


async def test_strict_fails_and_frees() -> None:
    async with pair() as both:
        both.decode.engine.fail_read = [Reason.KV_TRANSFER_FAILED]
        await both.client.submit("u", PROMPT, both.plan(local=True), fallback=pb.FALLBACK_STRICT)
        last = await both.client.until("u")
        assert last.failure.reason == "KV_TRANSFER_FAILED"
        await both.idle()


async def test_prefill_without_room_is_given_back() -> None:
    async with pair() as both:
        both.prefill.engine.fail_reserve = BatonError(Reason.NO_CAPACITY, "full")
        await both.client.submit("u", PROMPT, both.plan())
        last = await both.client.until("u")
        assert (last.handback.reason, list(last.route.reasons)) == ("NO_CAPACITY", ["PREFILL_NO_CAPACITY", "HANDBACK"])
        await both.idle()


async def test_too_long_a_prompt_is_refused_by_both_before_anything_else() -> None:
    async with pair() as both:
        for length, refused in ((SPEC.max_context, True), (SPEC.max_context - 1, False)):
            attempt = pb.Attempt(uid="u", prompt_ids=[1] * length)
            for worker in (both.decode, both.prefill):
                if refused:
                    with pytest.raises(BatonError, match="no room") as caught:
                        worker.context.check_length(attempt)
                    assert caught.value.reason is Reason.CONTEXT_LENGTH_EXCEEDED
                else:
                    worker.context.check_length(attempt)
        with pytest.raises(BatonError) as caught:
            await both.client.submit("u", [1] * SPEC.max_context, both.plan())
        assert caught.value.reason is Reason.CONTEXT_LENGTH_EXCEEDED
        assert both.decode.engine.made == both.prefill.engine.made == []


async def test_a_grammar_that_the_engine_does_not_follow_is_refused() -> None:
    """A plan made in error: an engine that cannot would let anything through."""
    async with pair() as both:
        with pytest.raises(BatonError) as refused:
            await both.client.submit("u", [1, 2, 3], both.plan(), grammar=pb.Grammar(kind="regex", text="a"))
        assert refused.value.reason is Reason.GRAMMAR_UNSUPPORTED


async def test_decode_without_room_refuses_before_anything_else() -> None:
    async with pair() as both:
        both.decode.engine.fail_reserve = BatonError(Reason.NO_CAPACITY, "full")
        with pytest.raises(BatonError) as refused:
            await both.client.submit("u", PROMPT, both.plan())
        assert refused.value.reason is Reason.NO_CAPACITY
        assert both.prefill.engine.made == []
        assert both.client.of("u") == []


async def test_a_cancelled_submit_leaves_nothing() -> None:
    async with pair() as both:
        both.decode.engine.gate.clear()
        submit = asyncio.create_task(both.client.submit("u", PROMPT, both.plan()))
        while both.client.attempt("u") is None:  # noqa: ASYNC110 - polls another task's progress
            await asyncio.sleep(0)
        submit.cancel()
        await asyncio.gather(submit, return_exceptions=True)
        both.decode.engine.gate.set()
        await both.idle()
        assert both.decode.engine.live == set()


async def test_deadline() -> None:
    async with pair() as both:
        await both.client.submit("u", PROMPT, both.plan(), deadline_s=0.4)
        both.prefill.engine.gate.clear()
        both.decode.engine.gate.clear()
        last = await both.client.until("u")
        assert last.failure.reason == "DEADLINE_EXCEEDED"
        both.prefill.engine.gate.set()
        await both.idle()


async def test_the_engine_ends_everything() -> None:
    async with pair() as both:
        await both.client.submit("u", PROMPT, both.plan(), max_tokens=1000)
        await both.client.first("u")
        both.decode.engine.queue.put_nowait(BatonError(Reason.ENGINE_FAILED, "dead"))
        last = await both.client.until("u")
        assert last.failure.reason == "ENGINE_FAILED"
        assert both.decode.ended == [1]


@pytest.mark.parametrize("how", ["abort", "session", "prefill closes"])
async def test_an_end_at_any_moment_frees_both_sides(how: str) -> None:
    """Wherever it falls: in the queue, while chunks compute, while blocks are read, while tokens stream."""
    chance = random.Random(how)
    async with pair() as both:
        for i in range(60):
            uid = f"u{i}"
            client = Client(both.decode, f"s{i}")
            await asyncio.sleep(0)
            task = asyncio.create_task(client.submit(uid, PROMPT, both.plan(), max_tokens=200))
            for _ in range(chance.randrange(120)):
                await asyncio.sleep(0)
            if chance.random() < 0.5:
                await asyncio.sleep(chance.random() * 0.01)
            if how == "abort":
                if (attempt := client.attempt(uid)) is not None:
                    attempt.abort()
                    attempt.abort()
            elif how == "session":
                await client.close()
            else:
                both.prefill.serving.runs.close_all()
            await asyncio.wait_for(asyncio.gather(task, return_exceptions=True), HANG_S)
            if how == "prefill closes":
                await client.until(uid)
                assert client.tokens(uid) == expected(len(client.tokens(uid)))
            await both.idle()
            await client.close()
