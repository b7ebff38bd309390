"""What the engine says, against transformers in float32, however the work was cut, shared, moved or interrupted."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from pathlib import Path

import pytest

from baton.engine.port import FinishReason
from baton.kv.keys import block_keys, chain
from tests.unit.torch_engine.client import ROOT, ArenaReader, Client, hand_over, request
from tests.unit.torch_engine.conftest import Oracle, make_engine

pytestmark = pytest.mark.asyncio(loop_scope="package")

LENGTHS = (1, 5, 31, 32, 33, 64, 100, 150)
PROMPTS = [[(i * i + 7 * n + 3 * i) % 300 for i in range(length)] for n, length in enumerate(LENGTHS)]
TOKENS = 64


async def test_alone(client: Client, oracle: Oracle) -> None:
    for prompt in PROMPTS:
        assert await client.complete(request(prompt, max_tokens=TOKENS)) == oracle(prompt, TOKENS)


async def test_in_a_batch_of_eight(client: Client, oracle: Oracle) -> None:
    streams = [await client.submit(request(prompt, max_tokens=TOKENS)) for prompt in PROMPTS]
    for stream, prompt in zip(streams, PROMPTS, strict=True):
        assert await stream.tokens() == oracle(prompt, TOKENS)


async def test_with_prefix_hits(client: Client, oracle: Oracle) -> None:
    """The second time only what is not cached is computed, and the answer is the same."""
    prompt = PROMPTS[-1]
    output = await client.complete(request(prompt, max_tokens=TOKENS))
    before = client.engine.stats()
    again = await client.engine.reserve(request(prompt, max_tokens=TOKENS))
    assert again.hit_tokens == again.cached_tokens == 128
    assert await (await client.generate(again)).tokens() == output == oracle(prompt, TOKENS)
    after = client.engine.stats()
    assert after.prefill_tokens_computed - before.prefill_tokens_computed == len(prompt) - 128
    assert after.cached_prompt_tokens - before.cached_prompt_tokens == 128


async def test_a_conversation_hits_what_was_generated(client: Client, oracle: Oracle) -> None:
    prompt = PROMPTS[5]
    longer = prompt + await client.complete(request(prompt, max_tokens=TOKENS)) + [5, 6, 7]
    reservation = await client.engine.reserve(request(longer))
    # The last drawn token was never computed, so the block that it fills is not there.
    assert reservation.hit_tokens == (len(prompt) + TOKENS - 1) // 32 * 32
    assert await (await client.generate(reservation)).tokens() == oracle(longer, 16)


async def test_a_hit_never_covers_the_last_prompt_token(client: Client, oracle: Oracle) -> None:
    prompt = PROMPTS[5]
    assert len(prompt) % 32 == 0
    await client.complete(request(prompt))
    reservation = await client.engine.reserve(request(prompt))
    assert reservation.hit_tokens == len(prompt) - 32
    assert await (await client.generate(reservation)).tokens() == oracle(prompt, 16)


async def test_other_roots_share_nothing(client: Client) -> None:
    prompt = PROMPTS[-1]
    await client.complete(request(prompt))
    reservation = await client.engine.reserve(request(prompt, root=b"another tenant!!"))
    assert reservation.hit_tokens == 0
    await reservation.release()


async def test_preempted(tiny_model: Path, oracle: Oracle) -> None:
    """A pool for half of the load: the youngest give way and come back with the same text."""
    preempting = Client(make_engine(tiny_model, blocks=12, max_streams=6))
    await preempting.engine.start()
    try:
        prompts = PROMPTS[2:7]
        streams = [await preempting.submit(request(prompt, max_tokens=TOKENS)) for prompt in prompts[:4]]
        for stream, prompt in zip(streams, prompts, strict=False):
            assert await stream.tokens() == oracle(prompt, TOKENS)
        assert preempting.engine.stats().preemptions > 0
        await preempting.idle()
    finally:
        await preempting.close()


async def test_a_step_that_was_given_up_is_computed_again(client: Client, oracle: Oracle) -> None:
    """Requests of the batch lane generate all the time; others come until they have cut a step of these short."""
    before = client.engine.stats().given_up_steps
    for n in range(200):
        lane = [replace(request([7 + n, *range(3, 30 + i)], max_tokens=24), batch=True) for i in range(8)]
        streams = [await client.submit(one) for one in lane]
        await streams[0].moved.wait()
        other = [9 + n, 2, 3, 5, 8]
        assert await client.complete(request(other, max_tokens=2)) == oracle(other, 2)
        for one, stream in zip(lane, streams, strict=True):
            assert await stream.tokens() == oracle(list(one.prompt_ids), 24)
        if client.engine.stats().given_up_steps > before:
            return
    raise AssertionError("no step was given up")


async def test_resumed_from_any_offset(client: Client, oracle: Oracle) -> None:
    prompt = PROMPTS[3]
    whole = oracle(prompt, TOKENS)
    streams = [
        await client.submit(request(prompt, max_tokens=TOKENS, emitted=whole[:have])) for have in range(1, TOKENS, 5)
    ]
    for stream in streams:
        assert await stream.tokens() == whole


@pytest.mark.parametrize("prompt", PROMPTS, ids=len)
async def test_handed_over(engines: tuple[Client, Client], oracle: Oracle, prompt: list[int]) -> None:
    """The second engine computes no prompt token at all."""
    source, target = engines
    before = target.engine.stats()
    stream, done = await hand_over(source, target, request(prompt, max_tokens=TOKENS))
    assert await stream.tokens() == oracle(prompt, TOKENS)
    assert len(done.first) == 1
    assert target.engine.stats().prefill_tokens_computed == before.prefill_tokens_computed
    # What was loaded is a prefix cache there too.
    reservation = await target.engine.reserve(request(prompt))
    assert reservation.hit_tokens == (len(prompt) - 1) // 32 * 32
    await reservation.release()


async def test_true_kv_under_a_garbage_prompt_gives_the_true_text(
    engines: tuple[Client, Client], oracle: Oracle
) -> None:
    """The decode side has only the KV to go by: it gets ids that mean something else."""
    source, target = engines
    prompt = PROMPTS[6]
    asked = request(prompt, max_tokens=TOKENS)
    garbage = request([9] * len(prompt), max_tokens=TOKENS, root=b"garbage garbage!")
    there = await source.engine.reserve(asked)
    here = await target.engine.reserve(garbage)
    handles, done = await source.prefill(there)
    keys = block_keys(garbage.key_root, garbage.prompt_ids)
    keys.append(chain(keys[-1], garbage.prompt_ids[96:]))
    reader = ArenaReader(source.engine, target.engine)
    reader.verify = False
    renamed = [replace(handle, key=key) for handle, key in zip(handles, keys, strict=True)]
    await here.load(0, renamed, reader, time.monotonic() + 10)
    assert here.cached_tokens == len(prompt)
    assert await (await target.generate(here, done.first)).tokens() == oracle(prompt, TOKENS)
    await there.release()


@pytest.mark.parametrize("blocks", [1, 3])
async def test_loaded_in_part(engines: tuple[Client, Client], oracle: Oracle, blocks: int) -> None:
    source, target = engines
    prompt = PROMPTS[-1]
    asked = request(prompt, max_tokens=TOKENS)
    there, here = await source.engine.reserve(asked), await target.engine.reserve(asked)
    handles, _ = await source.prefill(there)
    await here.load(0, handles[:blocks], ArenaReader(source.engine, target.engine), time.monotonic() + 10)
    assert here.cached_tokens == 32 * blocks
    before = target.engine.stats().prefill_tokens_computed
    assert await (await target.generate(here)).tokens() == oracle(prompt, TOKENS)
    assert target.engine.stats().prefill_tokens_computed - before == len(prompt) - 32 * blocks
    await there.release()


@pytest.mark.parametrize("prompt", [PROMPTS[5], PROMPTS[6]], ids=len)
async def test_loaded_whole_without_a_first_token(
    engines: tuple[Client, Client], oracle: Oracle, prompt: list[int]
) -> None:
    """Only the last prompt token is computed again, and loaded blocks that others may read stay untouched."""
    source, target = engines
    asked = request(prompt, max_tokens=TOKENS)
    there, here = await source.engine.reserve(asked), await target.engine.reserve(asked)
    handles, _ = await source.prefill(there)
    await here.load(0, handles, ArenaReader(source.engine, target.engine), time.monotonic() + 10)
    before = target.engine.stats().prefill_tokens_computed
    assert await (await target.generate(here)).tokens() == oracle(prompt, TOKENS)
    assert target.engine.stats().prefill_tokens_computed - before == 1
    await there.release()


async def test_prefilled_from_what_was_loaded(engines: tuple[Client, Client], oracle: Oracle) -> None:
    """A prefill worker that got its prefix from elsewhere announces it as its own, verifiable."""
    source, target = engines
    prompt = PROMPTS[-1]
    asked = request(prompt, max_tokens=TOKENS)
    first = await source.engine.reserve(asked)
    handles, _ = await source.prefill(first)
    second = await target.engine.reserve(asked)
    await second.load(0, handles[:2], ArenaReader(source.engine, target.engine), time.monotonic() + 10)
    own, done = await target.prefill(second)
    assert [h.key for h in own] == [h.key for h in handles]
    assert {h.owner for h in own} == {"w2"}
    await first.release()
    await source.engine.clear_cache()
    back = await source.engine.reserve(asked)
    report = await back.load(0, own, ArenaReader(target.engine, source.engine), time.monotonic() + 10)
    assert report.verified_prefix() == len(own)
    assert await (await source.generate(back, done.first)).tokens() == oracle(prompt, TOKENS)
    await second.release()


# ---- sampling

SAMPLING = {"temperature": 1.3, "top_p": 0.95, "top_k": 40, "presence_penalty": 0.4, "frequency_penalty": 0.2}


async def test_seeded_text_does_not_depend_on_company_or_resume(engines: tuple[Client, Client]) -> None:
    client, target = engines
    prompt = PROMPTS[4]

    def asked(have: int = 0) -> object:
        return request(prompt, max_tokens=40, seed=77, emitted=alone[:have], **SAMPLING)

    alone: list[int] = []
    alone = await client.complete(asked())  # type: ignore[arg-type]
    assert len(set(alone)) > 10
    crowd = [await client.submit(request(p, max_tokens=40, seed=n, **SAMPLING)) for n, p in enumerate(PROMPTS)]
    stream = await client.submit(asked())  # type: ignore[arg-type]
    assert await stream.tokens() == alone
    await asyncio.gather(*(s.result() for s in crowd))
    for have in (1, 7, 28, 39):
        assert await client.complete(asked(have)) == alone  # type: ignore[arg-type]
    handed, _ = await hand_over(client, target, asked())  # type: ignore[arg-type]
    assert await handed.tokens() == alone
    other = await client.complete(request(prompt, max_tokens=40, seed=78, **SAMPLING))
    assert other != alone


@pytest.mark.parametrize("prompt", [PROMPTS[3], PROMPTS[6]], ids=len)
async def test_four_choices_are_what_each_gives_alone(engines: tuple[Client, Client], prompt: list[int]) -> None:
    client, target = engines
    choices = (0, 1, 2, 3)
    sampling = {"max_tokens": 30, "seed": 5, **SAMPLING}
    alone = [await client.complete(request(prompt, choices=(c,), **sampling)) for c in choices]
    assert len({tuple(tokens) for tokens in alone}) == 4
    await client.engine.clear_cache()
    before = client.engine.stats().prefill_tokens_computed
    outputs = await (await client.submit(request(prompt, choices=choices, **sampling))).result()
    assert [outputs[c].tokens for c in choices] == alone
    assert client.engine.stats().prefill_tokens_computed - before == len(prompt), "one prefill for all"
    stream, done = await hand_over(client, target, request(prompt, choices=choices, **sampling))
    handed = await stream.result()
    assert [handed[c].tokens for c in choices] == alone
    assert [t.choice for t in done.first] == list(choices)


# ---- ends


async def test_a_stop_token_ends_and_is_not_told(engines: tuple[Client, Client], oracle: Oracle) -> None:
    client, target = engines
    prompt = PROMPTS[4]
    whole = oracle(prompt, TOKENS)
    stop = next(t for i, t in enumerate(whole) if i > 5 and t not in whole[:i])
    at = whole.index(stop)
    (output,) = (
        await (await client.submit(request(prompt, max_tokens=TOKENS, stop_token_ids=(stop,)))).result()
    ).values()
    assert (output.tokens, output.finish) == (whole[:at], FinishReason.STOP)
    # Drawn as the first token of a resumed prefill, it ends the choice there.
    resumed = request(prompt, max_tokens=TOKENS, stop_token_ids=(stop,), emitted=whole[:at])
    stream, done = await hand_over(client, target, resumed)
    assert done.first[0].finish is FinishReason.STOP
    assert await stream.tokens() == whole[:at]


async def test_end_of_text_counts_unless_ignored(client: Client) -> None:
    """With a bias that makes the end the only choice, the output is empty; `min_tokens` forbids it until then."""
    eos = client.engine.spec.eos_token_ids[0]
    asked = request(PROMPTS[1], logit_bias={eos: 100.0}, ignore_eos=False)
    (output,) = (await (await client.submit(asked)).result()).values()
    assert (output.tokens, output.finish) == ([], FinishReason.STOP)
    asked = request(PROMPTS[1], logit_bias={eos: 100.0}, ignore_eos=False, min_tokens=4)
    (output,) = (await (await client.submit(asked)).result()).values()
    assert (len(output.tokens), output.finish) == (4, FinishReason.STOP)
    assert eos not in output.tokens
    assert await client.complete(request(PROMPTS[1], logit_bias={eos: 100.0}, max_tokens=3)) == [eos] * 3


async def test_the_context_ends_it(tiny_model: Path) -> None:
    client = Client(make_engine(tiny_model, blocks=70))
    spec = await client.engine.start()
    try:
        prompt = [i % 250 for i in range(spec.max_context - 5)]
        (output,) = (await (await client.submit(request(prompt, max_tokens=100))).result()).values()
        assert (len(output.tokens), output.finish) == (5, FinishReason.LENGTH)
        await client.idle()
    finally:
        await client.close()


async def test_logprobs(client: Client, oracle: Oracle) -> None:
    prompt = PROMPTS[2]
    stream = await client.submit(request(prompt, max_tokens=5, logprobs=3))
    (output,) = (await stream.result()).values()
    assert [e.token_id for e in output.logprobs] == output.tokens == oracle(prompt, 5)
    for entry in output.logprobs:
        assert len(entry.top) == 3
        assert entry.top[0] == (entry.token_id, entry.logprob), "greedy takes the most likely"
        assert entry.logprob < 0


async def test_prompt_logprobs_cover_every_prompt_token(client: Client) -> None:
    """Chunked or not, each prompt token has one after the first; and they are what generation says of the same text."""
    prompt = PROMPTS[6]
    stream = await client.submit(request(prompt[:60], max_tokens=1, logprobs=0, logit_bias={prompt[60]: 1000.0}))
    (output,) = (await stream.result()).values()
    reservation = await client.engine.reserve(request(prompt, max_tokens=1, prompt_logprobs=2))
    assert reservation.hit_tokens == 0
    _, done = await client.prefill(reservation)
    entries = done.prompt_logprobs
    assert entries[0] is None
    assert [e.token_id for e in entries[1:] if e is not None] == prompt[1:]
    assert entries[60] is not None
    assert entries[60].logprob == pytest.approx(output.logprobs[0].logprob, abs=1e-3)
    await reservation.release()


async def test_two_hundred_streams_at_once(tiny_model: Path, oracle: Oracle) -> None:
    client = Client(make_engine(tiny_model, blocks=1000, max_streams=32, chunk_tokens=128))
    await client.engine.start()
    try:
        prompts = [PROMPTS[n % 8] for n in range(200)]
        streams = [await client.submit(request(prompt, max_tokens=8)) for prompt in prompts]
        for stream, prompt in zip(streams, prompts, strict=True):
            assert await stream.tokens() == oracle(prompt, TOKENS)[:8]
        await client.idle()
    finally:
        await client.close()


async def test_bfloat16(tiny_model: Path) -> None:
    """The default dtype: another fingerprint, no promise of exact resumption, text all the same."""
    client = Client(make_engine(tiny_model, dtype="bfloat16"))
    spec = await client.engine.start()
    try:
        assert spec.resume.value == "text"
        assert len(await client.complete(request(PROMPTS[4], max_tokens=20, root=ROOT))) == 20
        await client.idle()
    finally:
        await client.close()
