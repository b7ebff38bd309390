"""Prefill and decode on vLLM: what torch's workers are held to, with vLLM's own processes behind it."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from pathlib import Path

import pytest

from baton.v1 import worker_pb2 as pb
from tests.integration.plans import LOCAL, disaggregated, metric, prompt
from tests.integration.vllm.conftest import VllmFleet
from tests.scripted_prefill import Write, blocks, done, hold, run_request, scripted_prefill
from tests.tiny_model import greedy
from tests.worker_process import HANG_S, frontend, settle

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(900)]

BLOCK = 32
LENGTHS = (1, 31, 32, 33, 64, 200, 257, 700)
"""Inside a block and at its end; shorter and longer than a chunk."""


async def test_disaggregated_local_and_transformers_agree(fleet: VllmFleet) -> None:
    prompts = {tokens: prompt(tokens, tokens) for tokens in LENGTHS}
    async with frontend(fleet.decode) as decode:
        pd = {n: await decode.run(f"pd-{n}", ids, disaggregated(fleet.prefill)) for n, ids in prompts.items()}
        await settle(fleet.decode)
        await decode.worker.ClearCache(pb.ClearCacheRequest(), timeout=HANG_S)
        local = {n: await decode.run(f"local-{n}", ids, LOCAL) for n, ids in prompts.items()}
    for tokens, ids in prompts.items():
        expected = greedy(fleet.model, ids, 16)
        assert pd[tokens].tokens == local[tokens].tokens == {0: expected}, tokens
        assert pd[tokens].finish == local[tokens].finish == {0: "length"}
        route = pd[tokens].route
        assert route is not None
        assert (route.prefill, list(route.reasons)) == ("prefill-vllm", ["DISAGGREGATED"])
        assert route.loaded_tokens == tokens // BLOCK * BLOCK
        assert route.transport in ("nixl", "tcp")
        route = local[tokens].route
        assert route is not None
        assert (route.kv_bytes, route.computed_tokens) == (0, tokens)


async def test_decode_does_not_prefill(fleet: VllmFleet) -> None:
    """Garbage prompt ids with the true prompt's KV give the true prompt's output: nothing was computed from the ids."""
    true, garbage = prompt(5 * BLOCK, 31), prompt(5 * BLOCK, 32)
    async with scripted_prefill() as scripted, frontend(fleet.decode) as decode:
        request = run_request(decode.attempt("compute", true), decode.described)
        computed = await scripted.compute(fleet.prefill.address, request)
        handles = scripted.relabelled(computed, decode.root(), garbage, BLOCK)

        async def script(request: pb.RunRequest, write: Write) -> None:
            await write(scripted.accepted())
            await write(blocks(handles))
            await write(done(computed.first))
            await hold()

        scripted.script = script
        plan = pb.Plan(mode=pb.MODE_DISAGGREGATED, prefill=scripted.target())
        result = await decode.run("garbage", garbage, plan, max_tokens=20)
        await settle(fleet.decode)
        # Those blocks are now cached under the garbage prompt's keys: nobody else may find them.
        await decode.worker.ClearCache(pb.ClearCacheRequest(), timeout=HANG_S)
    assert result.tokens == {0: greedy(fleet.model, true, 20)}
    assert result.tokens != {0: greedy(fleet.model, garbage, 20)}


async def test_a_flipped_byte_is_never_used(fleet: VllmFleet) -> None:
    ids = prompt(200, 33)
    async with scripted_prefill() as scripted, frontend(fleet.decode) as decode:
        request = run_request(decode.attempt("compute", ids), decode.described)
        computed = await scripted.compute(fleet.prefill.address, request)
        segment = computed.handles[2].segments[0]
        scripted.arena.view(segment.offset + 100, 1)[0] ^= 1

        async def script(request: pb.RunRequest, write: Write) -> None:
            await write(scripted.accepted())
            await write(blocks(computed.handles))
            await write(done(computed.first))
            await hold()

        scripted.script = script
        plan = pb.Plan(mode=pb.MODE_DISAGGREGATED, prefill=scripted.target(), local_is_cheapest=True)
        result = await decode.run("flipped", ids, plan)
    assert result.tokens == {0: greedy(fleet.model, ids, 16)}
    assert result.route is not None
    assert list(result.route.reasons) == ["KV_CHECKSUM_MISMATCH", "LOCAL_FALLBACK"]
    assert result.route.computed_tokens == 200 - 2 * BLOCK


async def test_requests_share_blocks(fleet: VllmFleet) -> None:
    """Prefix hits are told, moved once, and every request is answered with its own text."""
    shared = prompt(300, 5)
    prompts = [[*shared, *prompt(20 + 9 * i, i)] for i in range(6)]
    async with frontend(fleet.decode) as decode:
        cold = await decode.run("shared", shared, disaggregated(fleet.prefill))
        plan = disaggregated(fleet.prefill)
        results = await asyncio.gather(*(decode.run(f"share-{i}", ids, plan) for i, ids in enumerate(prompts)))
    assert cold.route is not None
    assert (cold.route.cached_tokens, cold.route.loaded_tokens) == (0, 288)
    for ids, result in zip(prompts, results, strict=True):
        assert result.tokens == {0: greedy(fleet.model, ids, 16)}
        assert result.route is not None
        assert 288 <= result.route.cached_tokens <= len(ids)
        assert result.route.loaded_tokens == (len(ids) - 288) // BLOCK * BLOCK


async def test_seeded_sampling_is_the_same_disaggregated_local_and_resumed(fleet: VllmFleet) -> None:
    """Two choices, penalties, top-p: noise depends on the seed, the choice and the output index alone."""
    ids = prompt(120, 9)
    options = {"temperature": 0.9, "top_p": 0.9, "seed": 1234, "presence_penalty": 0.5, "repetition_penalty": 1.1}
    async with frontend(fleet.decode) as decode:
        one = await decode.run("seed", ids, LOCAL, choices=(0, 1), max_tokens=24, **options)
        pd = await decode.run("seed", ids, disaggregated(fleet.prefill), choices=(0, 1), max_tokens=24, **options)
        have = one.tokens[0][:10]
        resumed = await decode.run(
            "seed", ids, disaggregated(fleet.prefill), attempt=2, emitted=have, max_tokens=24, **options
        )
    assert pd.tokens == one.tokens
    assert one.tokens[0] != one.tokens[1]
    assert have + resumed.tokens[0] == one.tokens[0]


async def test_budgets_stops_and_logprobs(fleet: VllmFleet) -> None:
    ids = prompt(70, 10)
    pd_plan = disaggregated(fleet.prefill)
    async with frontend(fleet.decode) as decode:
        single = await decode.run("one", ids, pd_plan, max_tokens=1, logprobs=2)
        pd = await decode.run("lp", ids, pd_plan, max_tokens=6, logprobs=2)
        one = await decode.run("lp", ids, LOCAL, max_tokens=6, logprobs=2, prompt_logprobs=1)
        stop = pd.tokens[0][3]
        stopped = await decode.run("stop", ids, pd_plan, max_tokens=6, stop_token_ids=[stop])
        at_once = await decode.run("stop-0", ids, pd_plan, max_tokens=6, stop_token_ids=[pd.tokens[0][0]])
        least = await decode.run("least", ids, pd_plan, max_tokens=8, min_tokens=5, stop_token_ids=[stop])
        banned = await decode.run("bias", ids, pd_plan, max_tokens=6, logit_bias={pd.tokens[0][0]: -100.0})
    assert single.finish == pd.finish == {0: "length"}
    assert single.tokens[0] == pd.tokens[0][:1]
    assert [lp.token_id for lp in pd.logprobs[0]] == pd.tokens[0] == one.tokens[0]
    assert all(len(lp.top_ids) == 2 for lp in pd.logprobs[0])
    assert [lp.logprob for lp in pd.logprobs[0]] == pytest.approx([lp.logprob for lp in one.logprobs[0]], abs=1e-3)
    assert [lp.token_id for lp in one.prompt_logprobs[1:]] == ids[1:]
    assert stopped.tokens[0] == pd.tokens[0][: pd.tokens[0].index(stop)]
    assert stopped.finish == at_once.finish == {0: "stop"}
    assert not at_once.tokens[0]
    assert stop not in least.tokens[0][:5]
    assert len(least.tokens[0]) >= 5
    assert pd.tokens[0][0] not in banned.tokens[0]


async def test_a_burst_is_answered_in_full_and_never_mixed(fleet: VllmFleet) -> None:
    """More than run at once, in both modes, and preempted where the cache is too small for all."""
    prompts = [prompt(random.Random(i).randrange(20, 400), 100 + i) for i in range(24)]
    async with frontend(fleet.decode) as decode:
        plans = [LOCAL if i % 3 == 0 else disaggregated(fleet.prefill) for i in range(len(prompts))]
        results = await asyncio.gather(
            *(decode.run(f"burst-{i}", ids, plans[i], max_tokens=40) for i, ids in enumerate(prompts))
        )
    for ids, result in zip(prompts, results, strict=True):
        assert result.tokens == {0: greedy(fleet.model, ids, 40)}


async def test_abort_in_each_stage_frees_both_sides(fleet: VllmFleet) -> None:
    """Queued, prefilling, transferring or decoding: wherever the abort falls."""
    random_ = random.Random(1)
    async with frontend(fleet.decode) as decode:
        for i in range(6):
            for stage in ("at once", "prefilling", "transferring", "decoding"):
                uid = f"abort-{stage}-{i}"
                ids = prompt(random_.randrange(40, 1200), 1000 + 4 * i)
                plan = LOCAL if i % 3 == 2 else disaggregated(fleet.prefill)
                await decode.submit(decode.attempt(uid, ids, max_tokens=800), plan)
                if stage == "prefilling":
                    await asyncio.sleep(random_.random() * 0.05)
                elif stage == "transferring":
                    await asyncio.sleep(random_.random() * 0.4)
                elif stage == "decoding":
                    await anext(decode.events(uid))
                assert await decode.abort(uid)
            await settle(fleet.decode, fleet.prefill)
        ids = prompt(150, 77)
        assert (await decode.run("after", ids, disaggregated(fleet.prefill))).tokens == {
            0: greedy(fleet.model, ids, 16)
        }


async def test_a_full_pool_refuses(fleet: VllmFleet) -> None:
    """NO_CAPACITY before anything runs, and nothing of it stays."""
    async with frontend(fleet.decode) as decode:
        replies = []
        for i in range(24):
            attempt = decode.attempt(f"full-{i}", prompt(1000, 500 + i), max_tokens=200)
            replies.append(await decode.submit(attempt, LOCAL))
        refused = [reply.failure.reason for reply in replies if reply.HasField("failure")]
        for i in range(24):
            await decode.abort(f"full-{i}")
    assert refused
    assert set(refused) == {"NO_CAPACITY"}


async def test_an_idle_worker_rests(fleet: VllmFleet) -> None:
    def spent() -> float:
        found = [fleet.decode.process.pid, *descendants(fleet.decode.process.pid)]
        ticks = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13] for pid in found]
        return sum(int(t) for pair in ticks for t in pair) / os.sysconf("SC_CLK_TCK")

    await settle(fleet.decode)
    before = spent()
    await asyncio.sleep(4.0)
    assert (spent() - before) / 4.0 < 0.15, "of one core"


async def test_prefill_is_killed_in_the_middle(fleet: VllmFleet) -> None:
    """The last test that uses the spare one."""
    prompts = [prompt(1500, 40 + i) for i in range(3)]
    started = descendants(fleet.spare.process.pid)
    assert started
    async with frontend(fleet.decode) as decode:
        await decode.run("killed-warm", prompt(40, 51), disaggregated(fleet.spare))  # connected and paired
        for i, ids in enumerate(prompts):
            plan = disaggregated(fleet.spare, fleet.prefill if i % 2 else None, local=True)
            reply = await decode.submit(decode.attempt(f"killed-{i}", ids, max_tokens=8), plan)
            assert not reply.HasField("failure")
        before = await metric(fleet.decode, "transfer_bytes_total")
        async with asyncio.timeout(HANG_S):
            while await metric(fleet.decode, "transfer_bytes_total") == before:  # noqa: ASYNC110 - a process
                await asyncio.sleep(0.02)
        fleet.spare.kill()
        results = [await decode.collect(f"killed-{i}") for i in range(len(prompts))]
    for ids, result in zip(prompts, results, strict=True):
        assert result.tokens == {0: greedy(fleet.model, ids, 8)}
        assert result.route is not None
        assert len(result.route.reasons) > 1, "the kill came too late to test anything"
    async with asyncio.timeout(HANG_S):
        while any(alive(pid) for pid in started):  # noqa: ASYNC110 - processes
            await asyncio.sleep(0.1)


async def test_the_engine_dies_and_the_worker_with_it(fleet: VllmFleet) -> None:
    """The last test that uses the decode worker."""
    async with frontend(fleet.decode) as decode:
        await decode.submit(decode.attempt("engine", prompt(30, 1), max_tokens=1500), LOCAL)
        await anext(decode.events("engine"))
        for pid in descendants(fleet.decode.process.pid)[:1]:
            os.kill(pid, signal.SIGKILL)
        failure = ""
        async for event in decode.events("engine"):
            failure = event.failure.reason
            if failure:
                break
        assert failure == "ENGINE_FAILED"
    assert await asyncio.to_thread(fleet.decode.process.wait, HANG_S) == 1


def descendants(pid: int) -> list[int]:
    """vLLM's processes of a worker, the helper of multiprocessing left out."""
    found: list[int] = []
    children = Path(f"/proc/{pid}/task").glob("*/children")
    for child in {int(word) for path in children for word in path.read_text().split()}:
        if b"resource_tracker" not in Path(f"/proc/{child}/cmdline").read_bytes():
            found += [child, *descendants(child)]
    return found


def alive(pid: int) -> bool:
    """Whether that process still runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
