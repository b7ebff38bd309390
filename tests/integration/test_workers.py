"""Prefill, decode and merged as real processes, with a gRPC client in the frontend's place."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc
import pytest

from baton.v1 import worker_pb2 as pb
from baton.v1 import worker_pb2_grpc
from tests.etcd import EtcdServer
from tests.integration.idle import idle_shares
from tests.integration.plans import LOCAL, MERGED, disaggregated, metric, prompt, target
from tests.scripted_prefill import Computed, ScriptedPrefill, Write, blocks, done, hold, run_request, scripted_prefill
from tests.tiny_model import greedy, make_tiny_model
from tests.worker_process import HANG_S, Frontend, WorkerProcess, frontend, integrity, settle

pytestmark = pytest.mark.integration

FREED_S = 10.0
"""The promise is 1 s; machines that run tests are slower than that when they like."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[dict[str, object]]:
    with EtcdServer(tmp_path_factory.mktemp("etcd")) as etcd:
        yield {
            "model": model,
            "served_name": "tiny",
            "dtype": "float32",
            "pool_gib": 0.02,
            "chunk_tokens": 64,
            "etcd": etcd.address,
        }


class Fleet:
    """One prefill, one decode, one merged."""

    def __init__(self, directory: Path, flags: dict[str, object]) -> None:
        self.prefill = WorkerProcess("prefill", "prefill-1", directory, **flags)
        self.decode = WorkerProcess("decode", "decode-1", directory, **flags)
        self.merged = WorkerProcess("merged", "merged-1", directory, **flags)
        self.all = [self.prefill, self.decode, self.merged]


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory, flags: dict[str, object]) -> Iterator[Fleet]:
    with contextlib.ExitStack() as stack:
        fleet = Fleet(tmp_path_factory.mktemp("fleet"), flags)
        for worker in fleet.all:
            stack.callback(worker.stop)
        for worker in fleet.all:
            worker.wait_ready()
        yield fleet


@pytest.fixture
async def fleet(processes: Fleet) -> AsyncIterator[Fleet]:
    """The module's fleet, clean before it is used and after."""
    yield processes
    await settle(*processes.all)


@pytest.fixture
def spare(tmp_path: Path, flags: dict[str, object]) -> Iterator[WorkerProcess]:
    """A prefill of this test's own: to kill, stop or drain."""
    with WorkerProcess("prefill", "prefill-spare", tmp_path, **flags) as worker:
        yield worker


async def computed(worker: WorkerProcess) -> float:
    """Prompt tokens this worker has computed since it started."""
    await asyncio.sleep(1.2)  # the engine's figures are refreshed each second
    return await metric(worker, "prefill_tokens_computed_total")


async def test_disaggregated_merged_and_transformers_agree(fleet: Fleet, model: Path) -> None:
    prompts = {tokens: prompt(tokens, tokens) for tokens in (1, 31, 32, 33, 200, 700)}
    before = await computed(fleet.decode)
    async with frontend(fleet.decode) as decode, frontend(fleet.merged) as merged:
        plan = disaggregated(fleet.prefill)
        handed_over = {n: await decode.run(f"pd-{n}", ids, plan, max_tokens=24) for n, ids in prompts.items()}
        in_one = {n: await merged.run(f"m-{n}", ids, MERGED, max_tokens=24) for n, ids in prompts.items()}
    assert await computed(fleet.decode) == before, "decode computed a part of a prompt"
    for tokens, ids in prompts.items():
        pd, one = handed_over[tokens], in_one[tokens]
        assert pd.tokens == one.tokens == {0: greedy(model, ids, 24)}, tokens
        assert pd.finish == one.finish == {0: "length"}
        assert pd.route is not None
        assert pd.route.mode == pb.MODE_DISAGGREGATED
        assert (pd.route.prefill, pd.route.worker) == ("prefill-1", "decode-1")
        assert pd.route.loaded_tokens == tokens
        assert pd.route.computed_tokens == 0
        assert pd.route.kv_bytes > 0
        assert pd.route.transport in ("nixl", "tcp")
        assert list(pd.route.reasons) == ["DISAGGREGATED"]
        assert one.route is not None
        assert (one.route.kv_bytes, one.route.computed_tokens) == (0, tokens)


async def test_local_on_decode(fleet: Fleet, model: Path) -> None:
    ids = prompt(90, 4711)
    async with frontend(fleet.decode) as decode:
        result = await decode.run("local", ids, LOCAL, max_tokens=12)
    assert result.tokens == {0: greedy(model, ids, 12)}
    assert result.route is not None
    assert result.route.computed_tokens == 90


async def test_prefix_hits_on_decode_are_not_moved_again(fleet: Fleet, model: Path) -> None:
    ids = prompt(300, 5)
    async with frontend(fleet.decode) as decode:
        first = await decode.run("hit-1", ids, disaggregated(fleet.prefill))
        again = await decode.run("hit-2", [*ids, *prompt(40, 6)], disaggregated(fleet.prefill))
    assert first.route is not None
    assert again.route is not None
    assert again.route.loaded_tokens == 340 - 288
    assert 0 < again.route.kv_bytes < first.route.kv_bytes
    assert again.route.cached_tokens >= 288
    assert again.tokens == {0: greedy(model, [*ids, *prompt(40, 6)], 16)}


async def test_two_choices_fork_after_one_prefill(fleet: Fleet) -> None:
    ids = prompt(100, 8)
    options = {"choices": (0, 1), "temperature": 1.0, "seed": 99, "max_tokens": 20}
    async with frontend(fleet.decode) as decode, frontend(fleet.merged) as merged:
        pd = await decode.run("n2", ids, disaggregated(fleet.prefill), **options)
        one = await merged.run("n2", ids, MERGED, **options)
    assert pd.tokens == one.tokens
    assert pd.tokens[0] != pd.tokens[1]
    assert {len(t) for t in pd.tokens.values()} == {20}


async def test_seeded_sampling_is_the_same_merged_disaggregated_and_resumed(fleet: Fleet) -> None:
    ids = prompt(120, 9)
    options = {"temperature": 0.9, "top_p": 0.9, "seed": 1234, "presence_penalty": 0.5, "max_tokens": 24}
    async with frontend(fleet.decode) as decode, frontend(fleet.merged) as merged:
        one = await merged.run("seed", ids, MERGED, **options)
        pd = await decode.run("seed", ids, disaggregated(fleet.prefill), **options)
        have = one.tokens[0][:10]
        resumed = await decode.run("seed", ids, disaggregated(fleet.prefill), attempt=2, emitted=have, **options)
    assert pd.tokens == one.tokens
    assert have + resumed.tokens[0] == one.tokens[0]


async def test_one_token_and_logprobs(fleet: Fleet) -> None:
    ids = prompt(70, 10)
    async with frontend(fleet.decode) as decode, frontend(fleet.merged) as merged:
        single = await decode.run("one", ids, disaggregated(fleet.prefill), max_tokens=1, logprobs=2)
        pd = await decode.run("lp", ids, disaggregated(fleet.prefill), max_tokens=5, logprobs=2)
        one = await merged.run("lp", ids, MERGED, max_tokens=5, logprobs=2, prompt_logprobs=1)
    assert single.finish == {0: "length"}
    assert single.tokens[0] == pd.tokens[0][:1]
    assert [lp.token_id for lp in pd.logprobs[0]] == pd.tokens[0] == one.tokens[0]
    assert all(len(lp.top_ids) == 2 for lp in pd.logprobs[0])
    assert [lp.logprob for lp in pd.logprobs[0]] == pytest.approx([lp.logprob for lp in one.logprobs[0]], abs=1e-4)
    assert [lp.token_id for lp in one.prompt_logprobs[1:]] == ids[1:]


async def test_a_burst_is_answered_in_full_and_never_mixed(fleet: Fleet, model: Path) -> None:
    prompts = [prompt(20 + 3 * i, 100 + i) for i in range(64)]
    async with frontend(fleet.decode) as decode:
        results = await asyncio.gather(
            *(
                decode.run(f"burst-{i}", ids, disaggregated(fleet.prefill, local=True), max_tokens=8)
                for i, ids in enumerate(prompts)
            )
        )
    for i in range(0, 64, 7):
        assert results[i].tokens == {0: greedy(model, prompts[i], 8)}
    assert all(len(r.tokens[0]) == 8 and not r.failure for r in results)


async def test_steps_are_frames(fleet: Fleet) -> None:
    async with frontend(fleet.decode) as decode:
        await asyncio.gather(*(decode.run(f"f{i}", prompt(40, i), LOCAL, max_tokens=64) for i in range(16)))
        events = sum(len(f.events) for f in decode.frames)
        filled = sum(bool(f.events) for f in decode.frames)
        assert events > 16 * 60
        assert filled < events / 4, "tokens of one step travel together"
        assert [f.seq for f in decode.frames] == list(range(1, len(decode.frames) + 1))
        await decode.frame(lambda f: f.HasField("heartbeat") and f.seq > 1)


# --- refusals ---


async def test_refusals_leave_nothing(fleet: Fleet) -> None:
    async with frontend(fleet.decode) as decode, frontend(fleet.prefill) as prefill:
        ids = prompt(40, 1)
        plan = disaggregated(fleet.prefill)

        async def refused(client: Frontend, attempt: pb.Attempt, plan: pb.Plan) -> str:
            reply = await client.submit(attempt, plan)
            return str(reply.failure.reason)

        assert await refused(decode, decode.attempt("a", ids), MERGED) == "INVALID_REQUEST"
        assert await refused(prefill, prefill.attempt("a", ids), LOCAL) == "INVALID_REQUEST"
        assert await refused(decode, decode.attempt("a", ids, deadline_s=-1), plan) == "DEADLINE_EXCEEDED"
        assert await refused(decode, decode.attempt("a", [*ids, 99999]), plan) == "INVALID_REQUEST"
        assert await refused(decode, decode.attempt("a", ids * 60), plan) == "CONTEXT_LENGTH_EXCEEDED"
        assert await refused(decode, decode.attempt("a", ids, prompt_logprobs=1), plan) == "INVALID_REQUEST"
        stale = pb.Plan(mode=pb.MODE_LOCAL, worker=pb.Target(id="decode-1", epoch=1))
        assert await refused(decode, decode.attempt("a", ids), stale) == "DECODE_UNAVAILABLE"
        another = pb.Plan(mode=pb.MODE_MERGED, worker=pb.Target(id="merged-1"))  # who was at this address before
        assert await refused(decode, decode.attempt("a", ids), another) == "DECODE_UNAVAILABLE"
        assert decode.card is not None
        decode.card.chat_template = "another"
        assert await refused(decode, decode.attempt("a", ids), plan) == "VERSION_MISMATCH"
        decode.card.CopyFrom(prefill.described.card)
        decode.session = "never opened"
        assert await refused(decode, decode.attempt("a", ids), plan) == "SESSION_LOST"


async def test_a_live_attempt_is_not_taken_twice(fleet: Fleet) -> None:
    async with frontend(fleet.decode) as decode:
        ids = prompt(40, 2)
        assert not (await decode.submit(decode.attempt("twice", ids, max_tokens=1000), LOCAL)).HasField("failure")
        again = await decode.submit(decode.attempt("twice", ids, max_tokens=1000), LOCAL)
        assert again.failure.reason == "DUPLICATE_REQUEST"
        assert await decode.abort("twice")
        await settle(fleet.decode)
        assert (await decode.run("twice", ids, LOCAL)).finish == {0: "length"}


# --- the hand-over, with a prefill that does what the test says ---


@pytest.fixture
async def scripted(fleet: Fleet) -> AsyncIterator[ScriptedPrefill]:
    async with scripted_prefill() as prefill:
        yield prefill
        assert prefill.open_runs == 0, "decode left a lease open"


def plan_of(prefill: ScriptedPrefill, alternate: WorkerProcess | None = None, *, local: bool = False) -> pb.Plan:
    plan = pb.Plan(mode=pb.MODE_DISAGGREGATED, prefill=prefill.target(), local_is_cheapest=local)
    if alternate is not None:
        plan.alternate.CopyFrom(target(alternate))
    return plan


async def computed_for(fleet: Fleet, scripted: ScriptedPrefill, client: Frontend, ids: list[int]) -> Computed:
    attempt = client.attempt("compute", ids)
    return await scripted.compute(fleet.prefill.address, run_request(attempt, client.described))


@pytest.mark.parametrize("tokens", [64, 150])
async def test_decode_does_not_prefill(fleet: Fleet, scripted: ScriptedPrefill, model: Path, tokens: int) -> None:
    """Garbage prompt ids with the true prompt's KV give the true prompt's output: nothing was computed from the ids."""
    true, garbage = prompt(tokens, 31), prompt(tokens, 32)
    async with frontend(fleet.decode) as decode:
        computed = await computed_for(fleet, scripted, decode, true)
        handles = scripted.relabelled(computed, decode.root(), garbage, decode.described.block_size)

        async def script(request: pb.RunRequest, write: Write) -> None:
            await write(scripted.accepted())
            await write(blocks(handles))
            await write(done(computed.first))
            await hold()

        scripted.script = script
        result = await decode.run("garbage", garbage, plan_of(scripted), max_tokens=20)
        assert result.tokens == {0: greedy(model, true, 20)}
        assert result.tokens != {0: greedy(model, garbage, 20)}
        # Those blocks are now cached under the garbage prompt's keys: nobody else may find them.
        await decode.worker.ClearCache(pb.ClearCacheRequest(), timeout=HANG_S)


async def test_a_flipped_byte_is_never_used(fleet: Fleet, scripted: ScriptedPrefill, model: Path) -> None:
    ids = prompt(200, 33)
    async with frontend(fleet.decode) as decode:
        computed = await computed_for(fleet, scripted, decode, ids)
        segment = computed.handles[2].segments[0]
        scripted.arena.view(segment.offset + 100, 1)[0] ^= 1

        async def script(request: pb.RunRequest, write: Write) -> None:
            await write(scripted.accepted())
            await write(blocks(computed.handles))
            await hold()

        scripted.script = script
        result = await decode.run("flipped", ids, plan_of(scripted, fleet.prefill))
    assert result.tokens == {0: greedy(model, ids, 16)}
    assert result.route is not None
    assert list(result.route.reasons) == ["KV_CHECKSUM_MISMATCH", "ALTERNATE_PREFILL"]
    assert result.route.prefill == "prefill-1"
    assert result.route.loaded_tokens == 200, "the two good blocks were kept, the rest came from the alternate"


async def test_wrong_keys_are_refused(fleet: Fleet, scripted: ScriptedPrefill) -> None:
    ids, other = prompt(100, 34), prompt(100, 35)
    async with frontend(fleet.decode) as decode:
        computed = await computed_for(fleet, scripted, decode, other)

        async def script(request: pb.RunRequest, write: Write) -> None:
            await write(scripted.accepted())
            await write(blocks(computed.handles))
            await hold()

        scripted.script = script
        result = await decode.run("wrong", ids, plan_of(scripted))
    assert result.handback is not None
    assert (result.handback.reason, result.handback.verified_tokens) == ("KV_BAD_HANDLE", 0)


async def test_the_lease_ends_before_everything_is_here(fleet: Fleet, scripted: ScriptedPrefill, model: Path) -> None:
    """After a first token: the tokens go on from it, the rest of the prompt is computed here."""
    ids = prompt(200, 36)
    async with frontend(fleet.decode) as decode:
        computed = await computed_for(fleet, scripted, decode, ids)

        three = sum(h.length for h in computed.handles[:3])

        async def script(request: pb.RunRequest, write: Write) -> None:
            moved = await metric(fleet.decode, "transfer_bytes_total")
            await write(scripted.accepted())
            await write(blocks(computed.handles[:3]))
            while await metric(fleet.decode, "transfer_bytes_total") < moved + three:  # noqa: ASYNC110 - a process
                await asyncio.sleep(0.02)
            await write(done(computed.first))

        scripted.script = script
        local = await decode.run("lease-1", ids, plan_of(scripted, local=True))
        assert local.tokens == {0: greedy(model, ids, 16)}
        assert local.route is not None
        assert list(local.route.reasons) == ["KV_LEASE_LOST", "LOCAL_FALLBACK"]
        assert local.route.computed_tokens == 200 - 96
        await decode.worker.ClearCache(pb.ClearCacheRequest(), timeout=HANG_S)

        attempt = decode.attempt("lease-2", ids)
        assert not (await decode.submit(attempt, plan_of(scripted))).HasField("failure")
        events = [event async for event in _until_end(decode, "lease-2")]
        assert list(events[0].tokens.ids) == greedy(model, ids, 1)
        assert events[-1].handback.reason == "KV_LEASE_LOST"
        assert events[-1].handback.verified_tokens == 96


async def _until_end(client: Frontend, uid: str, attempt: int = 1) -> AsyncIterator[pb.Event]:
    async for event in client.events(uid, attempt):
        yield event
        if event.finish or event.HasField("handback") or event.HasField("failure"):
            return


@pytest.mark.parametrize(
    ("reason", "told"),
    [
        ("NO_CAPACITY", "PREFILL_NO_CAPACITY"),
        ("KV_LAYOUT_MISMATCH", "KV_LAYOUT_MISMATCH"),
        ("DRAINING", "PREFILL_UNAVAILABLE"),
        ("ENGINE_FAILED", "PREFILL_FAILED"),
    ],
)
async def test_what_prefill_refuses(fleet: Fleet, scripted: ScriptedPrefill, reason: str, told: str) -> None:
    from baton.v1 import kv_pb2

    async def script(request: pb.RunRequest, write: Write) -> None:
        await write(pb.RunEvent(failure=kv_pb2.Failure(reason=reason, message="scripted")))

    scripted.script = script
    ids = prompt(50, 37)
    async with frontend(fleet.decode) as decode:
        back = await decode.run(f"back-{reason}", ids, plan_of(scripted))
        local = await decode.run(f"local-{reason}", ids, plan_of(scripted, local=True))
        strict = await decode.run(
            f"strict-{reason}", ids, plan_of(scripted, fleet.prefill, local=True), fallback=pb.FALLBACK_STRICT
        )
    failed = told if reason == "DRAINING" else reason
    assert back.handback is not None
    assert back.handback.reason == failed
    assert back.route is not None
    assert list(back.route.reasons) == [told, "HANDBACK"]
    assert local.route is not None
    assert list(local.route.reasons) == [told, "LOCAL_FALLBACK"]
    assert local.route.mode == pb.MODE_LOCAL
    assert strict.failure == failed
    assert not strict.tokens


async def test_prefill_itself_refuses_another_layout(fleet: Fleet) -> None:
    async with frontend(fleet.decode) as decode, grpc.aio.insecure_channel(fleet.prefill.address) as channel:
        request = run_request(decode.attempt("layout", prompt(40, 1)), decode.described)
        request.fingerprint = "another"
        events = [e async for e in worker_pb2_grpc.PrefillServiceStub(channel).Run(request, timeout=HANG_S)]
    assert [e.failure.reason for e in events] == ["KV_LAYOUT_MISMATCH"]


async def test_a_held_run_stays_open_in_silence(fleet: Fleet) -> None:
    """The lease holds through many keepalive intervals; closing it frees the blocks."""
    async with frontend(fleet.decode) as decode:
        request = run_request(decode.attempt("held", prompt(100, 38)), decode.described)
    async with grpc.aio.insecure_channel(
        fleet.prefill.address,
        options=[
            ("grpc.keepalive_time_ms", 200),
            ("grpc.keepalive_timeout_ms", 20000),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.max_pings_without_data", 0),
        ],
    ) as channel:
        call = worker_pb2_grpc.PrefillServiceStub(channel).Run(request, timeout=HANG_S)
        while not (event := await call.read()).HasField("done"):
            pass
        silent = asyncio.create_task(call.read())
        finished, _ = await asyncio.wait((silent,), timeout=4.0)
        assert not finished, f"the run ended: {event}"
        assert await integrity(fleet.prefill.address) != []
        call.cancel()
        await asyncio.gather(silent, return_exceptions=True)
    await settle(fleet.prefill)


# --- processes that die, stop and leave ---


async def test_no_prefill_there(fleet: Fleet, model: Path) -> None:
    gone = pb.Plan(mode=pb.MODE_DISAGGREGATED, prefill=pb.Target(id="gone", address="127.0.0.1:1"))
    ids = prompt(80, 39)
    async with frontend(fleet.decode) as decode:
        back = await decode.run("gone-1", ids, gone)
        gone.local_is_cheapest = True
        local = await decode.run("gone-2", ids, gone)
        gone.alternate.CopyFrom(target(fleet.prefill))
        alternate = await decode.run("gone-3", ids, gone)
        strict = await decode.run("gone-4", ids, gone, fallback=pb.FALLBACK_STRICT)
    assert back.handback is not None
    assert back.handback.reason == "PREFILL_UNAVAILABLE"
    assert local.tokens == alternate.tokens == {0: greedy(model, ids, 16)}
    assert alternate.route is not None
    assert list(alternate.route.reasons) == ["PREFILL_UNAVAILABLE", "ALTERNATE_PREFILL"]
    assert alternate.route.mode == pb.MODE_DISAGGREGATED
    assert strict.failure == "PREFILL_UNAVAILABLE"


async def test_prefill_is_stopped(fleet: Fleet, spare: WorkerProcess, model: Path) -> None:
    """A stopped process answers nothing: decode leaves it after its deadlines; awake, it frees everything."""
    ids = prompt(300, 50)
    async with frontend(fleet.decode) as decode:
        await decode.run("stopped-0", prompt(40, 51), disaggregated(spare))  # connected and paired
        spare.signal(signal.SIGSTOP)
        result = await decode.run("stopped-1", ids, disaggregated(spare, local=True))
        assert result.tokens == {0: greedy(model, ids, 16)}
        assert result.route is not None
        assert result.route.reasons[-1] == "LOCAL_FALLBACK"
        spare.signal(signal.SIGCONT)
        await settle(spare, fleet.decode)


async def test_decode_is_stopped(fleet: Fleet, tmp_path: Path, flags: dict[str, object], model: Path) -> None:
    """Prefill does not hold its blocks for a process that does not answer; awake, that one goes on by itself."""
    ids = prompt(1800, 52)
    with WorkerProcess("decode", "decode-stopped", tmp_path, **flags) as decode_process:
        async with frontend(decode_process) as decode:
            await decode.submit(decode.attempt("stopped", ids), disaggregated(fleet.prefill, local=True))
            decode_process.signal(signal.SIGSTOP)
            await settle(fleet.prefill)
            decode_process.signal(signal.SIGCONT)
            assert (await decode.collect("stopped")).tokens == {0: greedy(model, ids, 16)}
            # A read that was late settles when its owner next makes progress: in the next run, at the latest.
            again = prompt(300, 53)
            await decode.submit(decode.attempt("again", again), disaggregated(fleet.prefill))
            assert (await decode.collect("again")).tokens == {0: greedy(model, again, 16)}
            await settle(decode_process)


async def test_decode_dies_and_prefill_frees(fleet: Fleet, tmp_path: Path, flags: dict[str, object]) -> None:
    with WorkerProcess("decode", "decode-spare", tmp_path, **flags) as decode_process:
        async with frontend(decode_process) as decode:
            for i in range(4):
                attempt = decode.attempt(f"dies-{i}", prompt(1200, 60 + i))
                await decode.submit(attempt, disaggregated(fleet.prefill))
            decode_process.kill()
            took = await settle(fleet.prefill)
            assert took < FREED_S


async def test_the_engine_dies_and_the_worker_with_it(tmp_path: Path, flags: dict[str, object]) -> None:
    with WorkerProcess("merged", "merged-spare", tmp_path, **flags) as worker:
        async with frontend(worker) as merged:
            await merged.submit(merged.attempt("engine", prompt(30, 1), max_tokens=1500), MERGED)
            await anext(merged.events("engine"))
            for child in worker.children():
                with contextlib.suppress(ProcessLookupError):
                    import os

                    os.kill(child, signal.SIGKILL)
            result = [event async for event in _until_end(merged, "engine")]
            assert result[-1].failure.reason == "ENGINE_FAILED"
        assert await asyncio.to_thread(worker.process.wait, HANG_S) == 1


# --- aborts ---


async def test_abort_in_each_stage_frees_both_sides(fleet: Fleet) -> None:
    """Queued, prefilling, transferring or decoding: wherever the abort falls. (tests/faults does it by the hundred.)"""
    slowest = 0.0
    random_ = random.Random(1)
    async with frontend(fleet.decode) as decode:
        for i in range(5):
            for stage in ("at once", "prefilling", "transferring", "decoding"):
                uid = f"abort-{stage}-{i}"
                ids = prompt(random_.randrange(40, 1200), 1000 + 4 * i)
                await decode.submit(decode.attempt(uid, ids, max_tokens=800), disaggregated(fleet.prefill))
                if stage == "prefilling":
                    await asyncio.sleep(random_.random() * 0.02)
                elif stage == "transferring":
                    await asyncio.sleep(random_.random() * 0.2)
                elif stage == "decoding":
                    await anext(decode.events(uid))
                assert await decode.abort(uid)
            slowest = max(slowest, await settle(fleet.decode, fleet.prefill))
    assert slowest < FREED_S


async def test_the_end_of_a_session_aborts_its_requests(fleet: Fleet) -> None:
    decode = Frontend(fleet.decode.address)
    await decode.open()
    for i in range(6):
        plan = disaggregated(fleet.prefill) if i % 2 else LOCAL
        await decode.submit(decode.attempt(f"end-{i}", prompt(300 + i, i), max_tokens=1000), plan)
    async with frontend(fleet.decode) as other:
        task = asyncio.create_task(other.run("other", prompt(50, 1), LOCAL, max_tokens=100))
        await decode.close()
        assert len((await task).tokens[0]) == 100, "another session's request is not touched"
    assert await settle(fleet.decode, fleet.prefill) < FREED_S


async def test_deadline_passes_in_the_middle(fleet: Fleet) -> None:
    async with frontend(fleet.decode) as decode:
        result = await decode.run("late", prompt(30, 1), LOCAL, max_tokens=2000, deadline_s=0.5)
        assert result.failure == "DEADLINE_EXCEEDED"
        assert result.tokens[0]


# --- capacity ---


async def test_full_pools_refuse_and_never_wait_for_each_other(
    tmp_path: Path, flags: dict[str, object], model: Path
) -> None:
    small = {**flags, "pool_gib": 0.0016}
    with contextlib.ExitStack() as stack:
        prefill = WorkerProcess("prefill", "prefill-small", tmp_path, **small)
        decode_process = WorkerProcess("decode", "decode-small", tmp_path, **small)
        for worker in (prefill, decode_process):
            stack.callback(worker.stop)
        for worker in (prefill, decode_process):
            worker.wait_ready()
        async with frontend(decode_process) as decode:
            refused = 0
            pending = []
            for i in range(40):
                ids = prompt(600, 200 + i)
                attempt = decode.attempt(f"full-{i}", ids, max_tokens=4)
                reply = await decode.submit(attempt, disaggregated(prefill, local=True))
                if reply.HasField("failure"):
                    assert reply.failure.reason == "NO_CAPACITY"
                    refused += 1
                else:
                    pending.append((i, ids))
            assert refused, "the pool was never full: the test tests nothing"
            for i, ids in pending:
                result = await decode.collect(f"full-{i}")
                assert result.tokens == {0: greedy(model, ids, 4)}
        await settle(prefill, decode_process)


# --- drain ---


async def test_drain_waits_then_hands_back(tmp_path: Path, flags: dict[str, object]) -> None:
    with WorkerProcess("merged", "merged-drain", tmp_path, **flags) as worker:
        async with frontend(worker) as merged:
            await merged.submit(merged.attempt("short", prompt(30, 1), max_tokens=20), MERGED)
            await merged.submit(merged.attempt("long", prompt(30, 2), max_tokens=2000), MERGED)
            draining = asyncio.ensure_future(merged.worker.Drain(pb.DrainRequest(deadline_s=1.0), timeout=HANG_S))
            await merged.frame(lambda f: f.heartbeat.draining)
            refused = await merged.submit(merged.attempt("new", prompt(30, 3)), MERGED)
            assert refused.failure.reason == "DRAINING"
            assert (await merged.collect("short")).finish == {0: "length"}
            long = await merged.collect("long")
            assert long.handback is not None
            assert long.handback.reason == "DRAINING"
            assert (await draining).remaining == 0
        assert await asyncio.to_thread(worker.process.wait, HANG_S) == 0


async def test_sigterm_lets_running_streams_end(tmp_path: Path, flags: dict[str, object]) -> None:
    with WorkerProcess("merged", "merged-term", tmp_path, **flags) as worker:
        async with frontend(worker) as merged:
            await merged.submit(merged.attempt("ends", prompt(30, 1), max_tokens=100), MERGED)
            worker.signal(signal.SIGTERM)
            assert len((await merged.collect("ends")).tokens[0]) == 100
        assert await asyncio.to_thread(worker.process.wait, HANG_S) == 0


# --- what routers hear ---


async def test_watch_tells_the_cache_and_the_load(fleet: Fleet) -> None:
    from baton.kv.keys import block_keys

    ids = prompt(200, 70)
    async with frontend(fleet.merged) as merged:
        await merged.run("watched", ids, MERGED)
        call = merged.worker.Watch(pb.WatchRequest(), timeout=HANG_S)
        keys: set[bytes] = set()
        wanted = set(block_keys(merged.root(), ids, merged.described.block_size))
        seq = 0
        load = False
        while not (load and wanted <= keys):
            update = await call.read()
            assert update.epoch == merged.described.epoch
            if update.HasField("cache"):
                assert update.cache.seq == seq + 1
                assert update.cache.cleared == (seq == 0)
                seq += 1
                keys |= set(update.cache.stored)
            else:
                load = update.load.blocks_total > 0
        more = prompt(100, 71)
        await merged.run("watched-2", more, MERGED)
        wanted = set(block_keys(merged.root(), more, merged.described.block_size))
        admitted = False
        while not (admitted and wanted <= keys):
            update = await call.read()
            keys |= set(update.cache.stored)
            admitted = admitted or "watched-2" in update.load.admitted
        call.cancel()


async def test_an_idle_worker_rests(fleet: Fleet) -> None:
    """No spinning: the worker and its engine together use little of a core when nothing happens."""
    import psutil

    processes = [psutil.Process(w.process.pid) for w in fleet.all]
    processes += [child for p in processes for child in p.children(recursive=True)]
    await asyncio.sleep(3)
    shares = await asyncio.to_thread(idle_shares, lambda: {str(p.cmdline()): sum(p.cpu_times()[:2]) for p in processes})
    assert max(shares.values()) < 0.02, shares
