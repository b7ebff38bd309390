"""Streams whose workers die, stop and wake, at chosen tokens: the client gets what an undisturbed run gives.

A random model in f32, so each answer has one right text, greedy or seeded; slow enough that a client sees every token.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import httpx
import jsonschema
import pytest

from tests.integration.asking import plain_client
from tests.integration.resuming import Completion, complete, same
from tests.integration.stack import HANG_S, Stack, until
from tests.tiny_model import make_tiny_model

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(600)]

TOKENS = 60
PROMPT = "The lighthouse keeper counted the ships that passed, and wrote each one down:"
LONG = "Each evening she climbed the stairs, lit the lamp, and waited for the fog to come in from the sea. " * 16
SEEDED: dict[str, Any] = {"temperature": 0.9, "top_p": 0.95, "seed": 11}
PENALTIES = {"presence_penalty": 0.6, "frequency_penalty": 0.4, "repetition_penalty": 1.2}
"""Their history is prompt and output: a resumed attempt must have both."""


@pytest.fixture(scope="module")
def module_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    directory = tmp_path_factory.mktemp("resume")
    model = make_tiny_model(directory / "tiny", layers=12, hidden=256)
    flags = {"kvstore": False, "pool_gib": 0.1, "chunk_tokens": 64}
    run = Stack(directory, model, prefill=1, decode=2, merged=2, http={"resume_patience_s": 4.0}, **flags).start()
    yield run
    run.wake()
    run.teardown()


@pytest.fixture
def rest(module_stack: Stack) -> Iterator[Stack]:
    """What the last test left alive, clean."""
    yield module_stack
    module_stack.wake()
    module_stack.settle()


@pytest.fixture
def stack(rest: Stack) -> Stack:
    """Clean, with cold caches, and with at least one worker of each role."""
    enough(rest)
    return rest


def enough(run: Stack) -> None:
    """Start the dead when a role has nobody left: several at once, because a start takes longer than a test."""
    run.wake()
    if all(run.alive(role) for role in ("prefill", "decode", "merged")):
        run.wait_usable()
    else:
        run.heal()
    run.settle()
    run.clear_caches()


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    async with plain_client() as http:
        yield http


def body(**more: object) -> dict[str, Any]:
    """Greedy, streamed, of exactly TOKENS tokens, unless told otherwise."""
    defaults = {"prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "stream": True}
    return {**defaults, **more}


async def undisturbed(stack: Stack, client: httpx.AsyncClient, asked: dict[str, Any]) -> Completion:
    """What it should be; the caches are cold again after it."""
    wanted = await served(stack, client, asked)
    stack.clear_caches()
    return wanted


async def served(stack: Stack, client: httpx.AsyncClient, asked: dict[str, Any]) -> Completion:
    """The whole answer; a machine that stands still for seconds may have it refused at first, as clients know."""
    async with asyncio.timeout(HANG_S):
        got = await complete(client, stack.url(), asked)
        while got.status == 503:
            await asyncio.sleep(1.0)
            got = await complete(client, stack.url(), asked)
    assert (got.status, got.errors, got.done) == (200, [], True), got
    return got


async def disturbed(
    stack: Stack,
    client: httpx.AsyncClient,
    asked: dict[str, Any],
    when: Callable[[Completion], bool],
    disturb: Callable[[str], None] | None = None,
) -> Completion:
    """Ask, and once `when` what has come so far says so, kill (or `disturb`) the worker that streams."""
    struck = False

    def heard(sofar: Completion) -> None:
        nonlocal struck
        if not struck and when(sofar):
            struck = True
            (disturb or stack.kill)(sofar.worker)

    got = await complete(client, stack.url(), asked, heard)
    assert struck, got
    return got


def after(pieces: int) -> Callable[[Completion], bool]:
    return lambda sofar: sofar.pieces >= pieces


async def moved(
    stack: Stack,
    client: httpx.AsyncClient,
    asked: dict[str, Any],
    wanted: Completion,
    when: Callable[[Completion], bool],
    disturb: Callable[[str], None] | None = None,
) -> Completion:
    """Disturbed in mid-stream, and as it should be all the same. Asked again when the worker had said all by then: a
    client that lags behind sees that too late."""
    for _ in range(4):
        got = await disturbed(stack, client, asked, when, disturb)
        same(got, wanted)
        if resumed(got):
            return got
        await asyncio.to_thread(enough, stack)
    raise AssertionError(f"never struck in mid-stream: {got}")


async def killed(stack: Stack, client: httpx.AsyncClient, asked: dict[str, Any], pieces: int) -> Completion:
    """Killed in mid-stream, after that many pieces of text; the answer is checked against the undisturbed one."""
    return await moved(stack, client, asked, await undisturbed(stack, client, asked), after(pieces))


def streaming(stack: Stack) -> list[str]:
    """Workers that have attempts."""
    held = stack.findings()
    return [n for n in stack.workers("decode", "merged") if any("attempt" in line for line in held.get(n, []))]


async def under_way(
    stack: Stack, client: httpx.AsyncClient, asked: dict[str, Any], condition: Callable[[], object]
) -> asyncio.Task[Completion]:
    """A request at a moment when `condition()`; asked again, with cold caches, when it was over too soon."""
    for _ in range(8):
        task = asyncio.create_task(complete(client, stack.url(), asked))
        await asyncio.to_thread(until, lambda task=task: condition() or task.done())
        if not task.done():
            return task
        stack.clear_caches()
    raise AssertionError(f"never seen under way: {task.result()}")


def resumed(got: Completion) -> bool:
    return "RESUMED" in got.story["reasons"]


SAMPLINGS = {
    "greedy": {},
    "seeded": SEEDED,
    "penalties": {**SEEDED, **PENALTIES},
    "bias": {**SEEDED, "logit_bias": {"40": 4.0, "41": -100.0, "42": 3.0}},
    "min_tokens": {**SEEDED, "ignore_eos": False, "min_tokens": TOKENS - 5},
}


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS.keys())
async def test_any_sampling_in_the_middle(stack: Stack, client: httpx.AsyncClient, sampling: dict[str, Any]) -> None:
    await killed(stack, client, body(**sampling), 20)


STRINGS = {"type": "array", "items": {"type": "string", "minLength": 4, "maxLength": 9}, "minItems": 7, "maxItems": 9}
FUNCTION = {"name": "note", "parameters": {"type": "object", "properties": {"lines": STRINGS}, "required": ["lines"]}}


@pytest.mark.parametrize("sampling", [{}, SEEDED], ids=["greedy", "seeded"])
async def test_amid_json(stack: Stack, client: httpx.AsyncClient, sampling: dict[str, Any]) -> None:
    """The grammar's state moves with the output."""
    asked = body(**sampling, guided_json=STRINGS, max_tokens=5 * TOKENS, ignore_eos=False)
    got = await killed(stack, client, asked, 20)
    jsonschema.validate(json.loads(got.of(0).text), STRINGS)


@pytest.mark.parametrize("sampling", [{}, SEEDED], ids=["greedy", "seeded"])
async def test_amid_a_call(stack: Stack, client: httpx.AsyncClient, sampling: dict[str, Any]) -> None:
    """So does the parser's, which is the frontend's."""
    tools = {
        "tools": [{"type": "function", "function": FUNCTION}],
        "tool_choice": "required",
        "parallel_tool_calls": False,
    }
    messages = [{"role": "user", "content": PROMPT}]
    asked = body(**sampling, **tools, messages=messages, max_tokens=5 * TOKENS, ignore_eos=False)
    del asked["prompt"]
    got = await killed(stack, client, asked, 20)
    assert got.of(0).finish == "tool_calls"
    name, _, arguments = got.of(0).text.partition("{")
    assert name == "note"
    jsonschema.validate(json.loads("{" + arguments), FUNCTION["parameters"])


async def test_right_after_the_first_token(stack: Stack, client: httpx.AsyncClient) -> None:
    await killed(stack, client, body(**SEEDED), 1)


async def test_at_the_last_but_one(stack: Stack, client: httpx.AsyncClient) -> None:
    """Whether the last token was out already or not."""
    asked = body(**SEEDED)
    wanted = await undisturbed(stack, client, asked)
    for left in (1, 2, 3):
        got = await disturbed(stack, client, asked, after(wanted.pieces - left))
        same(got, wanted)
        await asyncio.to_thread(enough, stack)


async def test_logprobs_and_their_lists(stack: Stack, client: httpx.AsyncClient) -> None:
    got = await killed(stack, client, body(**SEEDED, logprobs=4), 20)
    assert sum(len(part["token_logprobs"]) for part in got.of(0).logprobs) == TOKENS


async def test_chat_with_logprobs(stack: Stack, client: httpx.AsyncClient) -> None:
    asked = body(**SEEDED, messages=[{"role": "user", "content": PROMPT}], logprobs=True, top_logprobs=3)
    del asked["prompt"]
    await killed(stack, client, asked, 20)


async def test_a_stop_string_that_is_half_there(stack: Stack, client: httpx.AsyncClient) -> None:
    """Killed before, amid and at the end of the match: it is found, and nothing of it is shown."""
    text = (await undisturbed(stack, client, body())).of(0).text
    start = next(i for i in range(20, len(text)) if text.find(text[i : i + 8]) == i)
    asked = body(stop=text[start : start + 8])
    wanted = await undisturbed(stack, client, asked)
    assert (wanted.of(0).text, wanted.of(0).finish) == (text[:start], "stop")
    for before in (6, 2, 0):
        same(await disturbed(stack, client, asked, after(wanted.pieces - before)), wanted)
        await asyncio.to_thread(enough, stack)


async def test_a_stop_token(stack: Stack, client: httpx.AsyncClient) -> None:
    text = (await undisturbed(stack, client, body(max_tokens=5 * TOKENS))).of(0).text
    letter = next(c for i, c in enumerate(text) if i >= 25 and "!" <= c <= "~" and text.index(c) == i)
    asked = body(stop_token_ids=[ord(letter) - ord("!")], max_tokens=5 * TOKENS)
    await killed(stack, client, asked, 10)


async def test_three_choices_of_which_one_has_finished(stack: Stack, client: httpx.AsyncClient) -> None:
    asked = body(**SEEDED, n=3, logprobs=2)
    free = await undisturbed(stack, client, asked)
    texts = [free.of(i).text for i in range(3)]
    stop = next(
        texts[0][i : i + 3]
        for i in range(8, 30)
        if all(other.find(texts[0][i : i + 3]) < 0 for other in texts[1:]) and texts[0].find(texts[0][i : i + 3]) == i
    )
    asked["stop"] = stop
    wanted = await undisturbed(stack, client, asked)
    assert [wanted.of(i).finish for i in range(3)] == ["stop", "length", "length"]
    await moved(stack, client, asked, wanted, lambda sofar: bool(sofar.of(0).finish))


async def test_several_prompts_of_which_some_have_begun(stack: Stack, client: httpx.AsyncClient) -> None:
    await asyncio.to_thread(stack.heal)
    asked = body(**SEEDED, prompt=[PROMPT, LONG[:300], "One more:"], n=2)
    wanted = await undisturbed(stack, client, asked)
    busy = stack.workers("decode", "merged")[:3]

    def strike(_: str) -> None:
        stack.kill(*busy)

    same(await disturbed(stack, client, asked, after(20), strike), wanted, hits=False)


async def test_echo_with_prompt_logprobs(stack: Stack, client: httpx.AsyncClient) -> None:
    """Runs merged; the prompt is told once."""
    await asyncio.to_thread(stack.heal, "merged-1", "merged-2")
    got = await killed(stack, client, body(**SEEDED, echo=True, logprobs=2), 20)
    assert got.of(0).text.startswith(PROMPT)


async def test_an_answer_in_one_piece(stack: Stack, client: httpx.AsyncClient) -> None:
    asked = body(**SEEDED, stream=False, n=2, logprobs=2)
    wanted = await undisturbed(stack, client, asked)
    task = await under_way(stack, client, asked, lambda: streaming(stack))
    stack.kill(*streaming(stack))
    same(await task, wanted, hits=False)


async def test_killed_again_and_again(stack: Stack, client: httpx.AsyncClient) -> None:
    """Whoever streams is killed, until one worker is left."""
    await asyncio.to_thread(stack.heal)
    asked = body(**SEEDED, **PENALTIES, max_tokens=5 * TOKENS)
    wanted = await undisturbed(stack, client, asked)
    task = await under_way(stack, client, asked, lambda: streaming(stack))
    for _ in range(3):
        await asyncio.to_thread(until, lambda: streaming(stack) or task.done())
        stack.kill(*streaming(stack))
    got = await task
    same(got, wanted, hits=False)
    assert got.story["attempts"] >= 3


async def test_stopped_and_woken_while_the_stream_goes_on(stack: Stack, client: httpx.AsyncClient) -> None:
    """What a stopped worker says when it wakes belongs to a session that has ended: nothing is doubled."""
    asked = body(**SEEDED, max_tokens=5 * TOKENS)
    wanted = await undisturbed(stack, client, asked)
    await moved(stack, client, asked, wanted, after(20), lambda name: stop_until_missed(stack, name))


def stop_until_missed(stack: Stack, name: str) -> None:
    """SIGSTOP now, SIGCONT as soon as the frontend has given it up for silent."""
    before = silences(stack, name)
    stack.stop(name)

    def wake() -> None:
        until(lambda: silences(stack, name) > before)
        stack.cont(name)

    threading.Thread(target=wake, daemon=True).start()


def silences(stack: Stack, name: str) -> float:
    return stack.metric("frontend", "baton_frontend_sessions_lost_total", worker=name, why="silent")


async def test_an_engine_that_stands_still_behind_a_live_server(stack: Stack, client: httpx.AsyncClient) -> None:
    """Known by its heartbeats; the router sends nothing there until it moves again."""
    asked = body(**SEEDED, max_tokens=3 * TOKENS)
    wanted = await undisturbed(stack, client, asked)
    stuck: list[str] = []

    def stop(name: str) -> None:
        stuck.append(name)
        stack.stop_engine(name)

    got = await disturbed(stack, client, asked, after(20), stop)
    same(got, wanted)
    assert resumed(got)
    (name,) = stuck
    assert stack.metric("frontend", "baton_frontend_sessions_lost_total", worker=name, why="stuck") >= 1
    await asyncio.to_thread(until, lambda: stack.states()[name] == "quarantined", stack.states)
    for _ in range(4):
        assert (await complete(client, stack.url(), body(max_tokens=8))).worker != name
    assert stack.states()[name] == "quarantined"
    stack.cont(name)
    await asyncio.to_thread(until, lambda: stack.states()[name] == "serving", stack.states)


async def test_an_idle_engine_that_stands_still_is_known_when_it_is_asked(
    stack: Stack, client: httpx.AsyncClient
) -> None:
    """It has no step to be late with: what it was sent is not read."""
    asked = body(prompt=LONG)
    wanted = await undisturbed(stack, client, asked)
    for name in stack.alive("prefill", "decode"):
        stack.stop_engine(name)
    began = time.monotonic()
    same(await complete(client, stack.url(), asked), wanted, hits=False)
    assert time.monotonic() - began < HANG_S / 4


async def test_prefill_killed_in_mid_handover(stack: Stack, client: httpx.AsyncClient) -> None:
    asked = body(**SEEDED, prompt=LONG)
    wanted = await undisturbed(stack, client, asked)
    stack.kill("merged-1", "merged-2")
    for disturb in (stack.kill, stack.stop):
        task = await under_way(stack, client, asked, lambda: stack.metric("prefill-1", "baton_worker_leases"))
        disturb("prefill-1")
        same(await task, wanted, hits=False)
        await asyncio.to_thread(stack.heal, "prefill-1")
        stack.clear_caches()


async def test_decode_killed_while_the_prompt_is_computed(stack: Stack, client: httpx.AsyncClient) -> None:
    asked = body(**SEEDED, prompt=LONG)
    wanted = await undisturbed(stack, client, asked)
    task = await under_way(stack, client, asked, lambda: streaming(stack))
    stack.kill(*streaming(stack))
    same(await task, wanted, hits=False)


async def test_without_any_worker_left_the_stream_ends_with_one_error(stack: Stack, client: httpx.AsyncClient) -> None:
    """After the time that a worker is waited for: no clean end, no second error; in one piece, a status."""
    everyone = stack.workers("decode", "merged")
    got = await disturbed(stack, client, body(), after(10), lambda _: stack.kill(*everyone))
    assert (got.status, got.done, len(got.errors)) == (200, False, 1)
    assert got.errors[0]["code"] in {"session_lost", "decode_unavailable"}
    assert not got.of(0).finish
    refused = await complete(client, stack.url(), body(stream=False))
    assert (refused.status, len(refused.errors)) == (503, 1)


async def test_the_only_worker_left_is_waited_for(rest: Stack, client: httpx.AsyncClient) -> None:
    """Nobody else could go on with the stream: it waits, and the worker that was missed does."""
    await asyncio.to_thread(rest.heal, "decode-1")
    rest.kill(*set(rest.workers("decode", "merged")) - {"decode-1"})
    rest.clear_caches()
    asked = body(**SEEDED, max_tokens=3 * TOKENS)
    wanted = await undisturbed(rest, client, asked)
    got = await disturbed(rest, client, asked, after(10), lambda name: stop_until_missed(rest, name))
    same(got, wanted)
    assert (got.worker, got.story["worker"]) == ("decode-1", "decode-1")
    assert resumed(got)


@pytest.mark.parametrize("name", ["prefill-1", "decode-1", "merged-1"])
async def test_restarted_in_place_has_no_phantom_cache(rest: Stack, client: httpx.AsyncClient, name: str) -> None:
    """Same id, same address, another epoch: what the old one had is not counted, not asked for and not read."""
    asked = body(prompt=LONG)
    left = {name, "decode-1"} if name == "prefill-1" else {name}
    await asyncio.to_thread(rest.heal, *left)
    rest.kill(*set(rest.workers()) - left)
    rest.clear_caches()
    await asyncio.to_thread(until, lambda: rest.states()[name] == "serving", rest.states)
    cold = await served(rest, client, asked)
    warm = await served(rest, client, asked)
    assert warm.of(0).text == cold.of(0).text
    assert (_cached(cold), _cached(warm) > 0) == (0, True)
    await asyncio.to_thread(rest.restart_in_place, name)
    await asyncio.to_thread(until, lambda: rest.states()[name] == "serving", rest.states)
    for other in left - {name}:
        rest.clear_cache(other)
    await asyncio.to_thread(until, lambda: not rest.indexed(), rest.indexed)
    same(await served(rest, client, asked), cold)
    same(await served(rest, client, asked), warm)


def _cached(got: Completion) -> int:
    return int(got.usage["prompt_tokens_details"]["cached_tokens"])
