"""The engine against a scripted server that breaks in every way servers break."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from baton.engine.openai import client, engine, health, stream
from baton.engine.openai.engine import OpenAIEngine
from baton.engine.openai.options import UpstreamOptions
from baton.engine.port import FinishReason, Request, Reservation, SamplingParams, TokenEvent
from baton.engine.progress import stuck
from baton.errors import BatonError, Reason
from baton.model.card import Model
from tests.upstream import MODEL, Asked, Script, ScriptedUpstream, hello

HANG_S = 20.0
PROMPT = list(range(40))


@dataclass
class Heard:
    """What came of one attempt."""

    pieces: list[str] = field(default_factory=list)
    length: int = 0
    tokens: int = 0
    finish: FinishReason | None = None
    cached: int = 0
    error: BatonError | None = None
    done: asyncio.Event = field(default_factory=asyncio.Event)
    some: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def take(self, event: TokenEvent) -> None:
        """Offsets join, counts do not fall, nothing comes after the end."""
        assert not self.done.is_set()
        if event.error is not None:
            self.error = BatonError(event.error, event.message)
        else:
            assert event.text is not None
            assert event.offset == self.length
            self.pieces.append(event.text)
            self.length += len(event.text)
            self.tokens, self.finish, self.cached = event.text_tokens, event.finish, event.cached_tokens
        self.some.set()
        if self.error is not None or self.finish is not None:
            self.done.set()


class Client:
    """An engine, its server, and who listens."""

    def __init__(self, upstream: ScriptedUpstream, model: Model, **options: Any) -> None:
        self.upstream = upstream
        self.engine = OpenAIEngine(UpstreamOptions(**{"url": upstream.url, "model": MODEL, **options}), model)
        self.heard: dict[tuple[str, int], Heard] = {}
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await self.engine.start()
        self._task = asyncio.create_task(self._listen())

    async def _listen(self) -> None:
        with contextlib.suppress(BatonError):
            async for events in self.engine.events():
                for event in events:
                    self.heard[event.uid, event.choice].take(event)

    async def submit(self, uid: str, **changes: Any) -> Reservation:
        """Reserve and generate."""
        asked = request(uid, **changes)
        reservation = await self.engine.reserve(asked)
        for choice in asked.choices:
            self.heard[uid, choice] = Heard()
        await self.engine.generate(reservation)
        return reservation

    async def complete(self, uid: str, **changes: Any) -> Heard:
        """All that one choice gives."""
        reservation = await self.submit(uid, **changes)
        heard = self.heard[uid, 0]
        async with asyncio.timeout(HANG_S):
            await heard.done.wait()
        await reservation.release()
        return heard

    async def failure(self, uid: str = "r", **changes: Any) -> BatonError:
        heard = await self.complete(uid, **changes)
        assert heard.error is not None, heard
        assert "127.0.0.1" not in heard.error.message, "clients are told where the upstream is"
        return heard.error

    async def close(self) -> None:
        await until(lambda: not self.engine._live)
        assert await self.engine.check_integrity() == []
        stats = self.engine.stats()
        assert (stats.running, stats.waiting, stats.queued_prefill_tokens) == (0, 0, 0)
        await self.engine.close()
        if self._task is not None:
            await self._task


def request(
    uid: str,
    *,
    choices: tuple[int, ...] = (0,),
    emitted: tuple[int, ...] = (),
    root: bytes = bytes(16),
    parted: bool = False,
    **sampling: Any,
) -> Request:
    params = SamplingParams(**{"max_tokens": 16, "seed": 3, "temperature": 0.0} | sampling)
    return Request(uid, 1, PROMPT, params, root, time.time() + HANG_S, choices, emitted, parted=parted)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(HANG_S):
        while not condition():  # noqa: ASYNC110 - another's state has no event
            await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def running(model: Model, script: Script = hello, **options: Any) -> AsyncIterator[Client]:
    """The server is well until the engine has joined, then it does as `script` says."""
    async with ScriptedUpstream() as upstream:
        one = Client(upstream, model, **options)
        await one.start()
        upstream.asked.clear()
        upstream.script = script
        try:
            yield one
        finally:
            await one.close()


# ---- what comes


@pytest.mark.parametrize("dialect", ["vllm", "llama.cpp"])
async def test_what_one_asked_is_not_told_to_another(model: Model, dialect: str) -> None:
    """The server's cache is everybody's. One that can part it is told how; nobody is told of its hits."""

    async def script(asked: Asked) -> None:
        await asked.begin()
        await asked.text("a", "stop")
        await asked.usage(1, prompt=40, cached=32)
        await asked.event("[DONE]")

    root = b"a digest of both"
    async with running(model, script, dialect=dialect) as one:
        assert (await one.complete("nobody's")).cached == 32
        assert (await one.complete("a tenant's", parted=True, root=root)).cached == 0
        assert (await one.complete("nobody's, later")).cached == 0, "what it finds may be the tenant's"
        salts = [asked.body.get("cache_salt") for asked in one.upstream.asked]
        assert salts == [None, root.hex() if dialect == "vllm" else None, None]


async def test_text_comes_as_it_is_sent_and_is_counted_by_the_server(model: Model) -> None:
    async def script(asked: Asked) -> None:
        await asked.begin()
        for piece in ("He", "", "llo ", "🙂\n"):
            await asked.text(piece)
        await asked.text("!", "stop")
        await asked.usage(9, prompt=40, cached=32)
        await asked.event("[DONE]")

    async with running(model, script) as one:
        heard = await one.complete("r")
        assert (heard.text, heard.finish, heard.tokens, heard.cached) == ("Hello 🙂\n!", FinishReason.STOP, 9, 32)
        stats = one.engine.stats()
        assert (stats.prompt_tokens, stats.cached_prompt_tokens, stats.output_tokens) == (40, 32, 9)
        body = one.upstream.asked[0].body
        assert (body["prompt"], body["model"], body["max_tokens"]) == (PROMPT, MODEL, 16)


@pytest.mark.parametrize("told", [-1, 0, 1.5, 2**40, "7", True], ids=str)
async def test_counts_that_cannot_be_are_not_taken(model: Model, told: Any) -> None:
    async def script(asked: Asked) -> None:
        await asked.begin()
        await asked.text("a")
        await asked.text("b", "length")
        usage = {"completion_tokens": told, "prompt_tokens": told, "prompt_tokens_details": {"cached_tokens": told}}
        await asked.event({"choices": [], "usage": usage})

    async with running(model, script) as one:
        heard = await one.complete("r")
        assert (heard.text, heard.tokens in (1, 2), heard.cached in (0, 1)) == ("ab", True, True)


@pytest.mark.parametrize("last", ["usage", "DONE", "nothing", "endless", "malformed", "silence", "garbage"])
async def test_an_end_is_an_end_whatever_follows(model: Model, last: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "TRAILER_S", 0.2)

    async def script(asked: Asked) -> None:
        await asked.begin()
        await asked.text("a")
        await asked.text("b", "length")
        if last == "usage":
            await asked.usage(7)
        elif last == "DONE":
            await asked.event("[DONE]")
        elif last == "garbage":
            await asked.event("{]")
        elif last == "malformed":
            await asked.event({"choices": "?", "usage": []})
        elif last == "endless":
            while not asked.gone.is_set():
                await asked.event({"choices": []})
                await asyncio.sleep(0.05)
        elif last == "silence":
            await asked.gone.wait()

    async with running(model, script) as one:
        heard = await one.complete("r", max_tokens=7)
        assert (heard.text, heard.finish) == ("ab", FinishReason.LENGTH)
        assert heard.tokens == (7 if last == "usage" else 2)


@pytest.mark.parametrize("told", [True, False])
async def test_an_end_before_what_was_asked_for_is_that_of_its_context(model: Model, told: bool) -> None:
    """By its own count; without one nobody knows."""

    async def script(asked: Asked) -> None:
        await asked.begin()
        await asked.text("a")
        await asked.text("b", "length")
        if told:
            await asked.usage(2)

    async with running(model, script) as one:
        heard = await one.complete("r", max_tokens=3)
        assert (heard.text, heard.finish) == ("ab", FinishReason.CONTEXT if told else FinishReason.LENGTH)


async def test_choices_are_requests_of_their_own(model: Model) -> None:
    async def script(asked: Asked) -> None:
        await asked.play([f"s{asked.body['seed']}"])

    async with running(model, script) as one:
        reservation = await one.submit("r", choices=(0, 1, 2), temperature=1.0)
        await until(lambda: all(one.heard["r", c].done.is_set() for c in range(3)))
        assert len({one.heard["r", c].text for c in range(3)}) == 3
        await reservation.release()


async def test_a_resume_goes_on_within_the_budget(model: Model) -> None:
    emitted = tuple(model.tokenizer.encode(" and so on", add_special=False))
    async with running(model) as one:
        await one.complete("r", emitted=emitted, max_tokens=len(emitted) + 2)
        body = one.upstream.asked[0].body
        assert body["prompt"] == [*PROMPT, *emitted]
        assert body["max_tokens"] == 2
        heard = await one.complete("s", emitted=emitted, max_tokens=len(emitted))
        assert (heard.text, heard.finish) == ("", FinishReason.LENGTH)
        assert len(one.upstream.asked) == 1, "nothing is left to ask for"


async def test_a_server_that_takes_no_ids_gets_text(model: Model) -> None:
    async def script(asked: Asked) -> None:
        if not isinstance(asked.body["prompt"], str):
            await asked.fail(422, {"detail": "prompt: expected a string"})
        else:
            await hello(asked)

    async with ScriptedUpstream(script) as upstream:
        one = Client(upstream, model)
        await one.start()
        await one.complete("r")
        assert upstream.asked[-1].body["prompt"] == model.tokenizer.decode(PROMPT, skip_special=False)
        await one.close()


async def test_a_server_that_never_stops_is_cut_off(model: Model) -> None:
    async def script(asked: Asked) -> None:
        await asked.begin()
        while not asked.gone.is_set():
            await asked.text("x")
            await asyncio.sleep(0)

    async with running(model, script) as one:
        heard = await one.complete("r", max_tokens=4)
        assert heard.finish is FinishReason.LENGTH
        assert 4 <= len(heard.text) <= stream.OVERRUN * 4 + stream.OVERRUN
        await until(lambda: one.upstream.asked[0].gone.is_set())


# ---- what breaks


async def _stall(asked: Asked) -> None:
    await asked.begin()
    await asked.text("a")
    await asked.gone.wait()


async def _never(asked: Asked) -> None:
    await asked.gone.wait()


async def _pings(asked: Asked) -> None:
    await asked.begin()
    while not asked.gone.is_set():
        await asked.send(b": ping\n\n")
        await asyncio.sleep(0.02)


async def _half_closed(asked: Asked) -> None:
    await asked.begin()
    await asked.text("a")


async def _reset(asked: Asked) -> None:
    await _half_closed(asked)
    asked.reset()


async def _cut_chunked(asked: Asked) -> None:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    await asked.send(head + b'30\r\ndata: {"choices": [{"te')


async def _half_an_event(asked: Asked) -> None:
    await asked.begin()
    await asked.send(b'data: {"choices": [{"text": "a", "finish_reason": "stop"}]}')


async def _garbage(asked: Asked) -> None:
    await asked.begin()
    await asked.event("<html>")


async def _no_chunk(asked: Asked) -> None:
    await asked.begin()
    await asked.event("[1, 2]")


async def _bad_choices(asked: Asked) -> None:
    await asked.begin()
    await asked.event({"choices": ["a"]})


async def _bad_text(asked: Asked) -> None:
    await asked.begin()
    await asked.event({"choices": [{"text": 7}]})


async def _not_utf8(asked: Asked) -> None:
    await asked.begin()
    await asked.send(b'data: {"choices": [{"text": "\xff"}]}\n\n')


async def _huge_line(asked: Asked) -> None:
    await asked.begin()
    await asked.send(b"data: ")
    for _ in range(40):
        await asked.send(b"x" * (1 << 16))


async def _error_event(asked: Asked) -> None:
    await asked.begin()
    await asked.text("a")
    await asked.event({"error": {"message": "out of memory", "code": 500}})


async def _gave_up(asked: Asked) -> None:
    await asked.begin()
    await asked.text("a", "abort")


async def _no_http(asked: Asked) -> None:
    await asked.send(b"NOT HTTP AT ALL\r\n\r\n")


@pytest.mark.parametrize(
    ("script", "reason", "words"),
    [
        (_never, Reason.DECODE_UNAVAILABLE, "did not answer in"),
        (_stall, Reason.ENGINE_FAILED, "was silent for"),
        (_pings, Reason.ENGINE_FAILED, "was silent for"),
        (_half_closed, Reason.ENGINE_FAILED, "without a word why"),
        (_reset, Reason.ENGINE_FAILED, "broke off"),
        (_cut_chunked, Reason.ENGINE_FAILED, "broke off"),
        (_half_an_event, Reason.ENGINE_FAILED, "without a word why"),
        (_garbage, Reason.ENGINE_FAILED, "no JSON"),
        (_no_chunk, Reason.ENGINE_FAILED, "no chunk"),
        (_bad_choices, Reason.ENGINE_FAILED, "choices"),
        (_bad_text, Reason.ENGINE_FAILED, "text"),
        (_not_utf8, Reason.ENGINE_FAILED, "no JSON"),
        (_huge_line, Reason.ENGINE_FAILED, "more than"),
        (_error_event, Reason.ENGINE_FAILED, "out of memory"),
        (_gave_up, Reason.ENGINE_FAILED, "'abort'"),
        (_no_http, Reason.DECODE_UNAVAILABLE, "RemoteProtocolError"),
    ],
    ids=lambda value: value.__name__[1:] if callable(value) else "",
)
async def test_a_broken_answer_is_a_failure_that_can_be_tried_elsewhere(
    model: Model, script: Script, reason: Reason, words: str
) -> None:
    async with running(model, script, first_s=0.4, stall_s=0.3) as one:
        error = await one.failure()
        assert (error.reason, error.reason.retryable) == (reason, True)
        assert words in error.message
        one.upstream.script = hello
        heard = await one.complete("after")
        assert heard.text == " one two", "the next request is not hurt"


async def test_one_failing_request_does_not_hurt_another(model: Model) -> None:
    async def script(asked: Asked) -> None:
        if asked.body["max_tokens"] == 5:
            await asked.fail(500, {"error": {"message": "boom"}})
        else:
            await asked.begin()
            for _ in range(20):
                await asked.text("x")
                await asyncio.sleep(0.01)
            await asked.text("", "length")

    async with running(model, script) as one:
        good = [await one.submit(f"good{n}", max_tokens=20) for n in range(3)]
        bad = [await one.failure(f"bad{n}", max_tokens=5) for n in range(5)]
        assert {error.reason for error in bad} == {Reason.ENGINE_FAILED}
        await until(lambda: all(one.heard[f"good{n}", 0].done.is_set() for n in range(3)))
        assert {one.heard[f"good{n}", 0].text for n in range(3)} == {"x" * 20}
        for reservation in good:
            await reservation.release()


async def test_a_fault_of_ours_is_a_failure_too(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not a request that waits for its deadline."""

    def broken(*_: object, **__: object) -> dict[str, Any]:
        raise RuntimeError("boom")

    async with running(model) as one:
        monkeypatch.setattr("baton.engine.openai.runs.completion", broken)
        error = await one.failure()
        assert (error.reason, "RuntimeError" in error.message) == (Reason.ENGINE_FAILED, True)


# ---- giving up


@pytest.mark.parametrize("script", [_stall, _never, _pings], ids=lambda f: f.__name__[1:])
async def test_release_closes_the_connection_at_once(model: Model, script: Script) -> None:
    async with running(model, script) as one:
        reservation = await one.submit("r", choices=(0, 1))
        await until(lambda: len(one.upstream.asked) == 2)
        if script is _stall:
            await asyncio.gather(*(one.heard["r", c].some.wait() for c in (0, 1)))
        async with asyncio.timeout(1.0):
            await reservation.release()
            await reservation.release()
            await asyncio.gather(*(asked.gone.wait() for asked in one.upstream.asked))
        assert await one.engine.check_integrity() == []


async def test_release_of_what_waits_in_line(model: Model) -> None:
    async with running(model, _stall, max_streams=1) as one:
        first = await one.submit("a")
        second = await one.submit("b")
        await until(lambda: (one.engine.stats().running, one.engine.stats().waiting) == (1, 1))
        await second.release()
        assert (one.engine.stats().running, one.engine.stats().waiting) == (1, 0)
        await first.release()
        one.upstream.script = hello
        assert (await one.complete("c")).text == " one two"
        assert len(one.upstream.asked) == 2


async def test_who_does_not_take_events_holds_the_server_back(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "EVENTS", 8)
    sent = 0

    async def script(asked: Asked) -> None:
        nonlocal sent
        await asked.begin()
        for _ in range(5_000):
            await asked.text("x" * 4000)
            sent += 1
        await asked.text("", "length")

    async with ScriptedUpstream() as upstream:
        one = Client(upstream, model)
        await one.engine.start()
        upstream.script = script
        reservation = await one.submit("r", max_tokens=5_000)
        before = -1
        while sent != before:
            before = sent
            await asyncio.sleep(0.3)
        assert 0 < sent < 5_000, "it was not held back"
        one._task = asyncio.create_task(one._listen())
        async with asyncio.timeout(HANG_S):
            await one.heard["r", 0].done.wait()
        assert one.heard["r", 0].length == 5_000 * 4000
        await reservation.release()
        await one.close()


# ---- what is refused before it starts


@pytest.mark.parametrize(
    ("changes", "reason", "param"),
    [
        ({"emitted": (10**9,)}, Reason.INVALID_REQUEST, "emitted_ids"),
        ({"logprobs": 1}, Reason.INVALID_REQUEST, "logprobs"),
        ({"emitted": (1,) * 10_000}, Reason.CONTEXT_LENGTH_EXCEEDED, "prompt_ids"),
    ],
)
async def test_refusals(model: Model, changes: dict[str, Any], reason: Reason, param: str) -> None:
    async with running(model) as one:
        with pytest.raises(BatonError) as refused:
            await one.engine.reserve(request("r", **changes))
        assert (refused.value.reason, refused.value.param) == (reason, param)
        assert one.upstream.asked == []


async def test_one_attempt_once_and_not_too_many(model: Model) -> None:
    async with running(model, _stall, max_streams=1) as one:
        held = [await one.engine.reserve(request(f"r{n}")) for n in range(engine.WAITING_TIMES)]
        for uid, reason in (("r0", Reason.DUPLICATE_REQUEST), ("more", Reason.NO_CAPACITY)):
            with pytest.raises(BatonError) as refused:
                await one.engine.reserve(request(uid))
            assert refused.value.reason is reason
        for reservation in held:
            await reservation.release()


async def test_nothing_is_handed_over(model: Model) -> None:
    async with running(model) as one:
        reservation = await one.engine.reserve(request("r"))
        with pytest.raises(BatonError):
            one.engine.prefill(reservation)
        async with one.engine.hold([bytes(16)]) as handles:
            assert list(handles) == []
        assert (reservation.hit_tokens, reservation.cached_tokens) == (0, 0)
        await reservation.release()


# ---- is it there, and well


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"key": "secret"}, "refuses our key"),
        ({"models": [{"id": "another"}]}, "has no model 'their-model', but another"),
        ({"script": lambda asked: asked.fail(404, {"error": "no such path"})}, "it needs /v1/completions"),
        ({"script": lambda asked: asked.fail(500, {"error": "boom"})}, "boom"),
    ],
)
async def test_what_an_operator_has_to_mend_is_told_at_start(model: Model, change: dict[str, Any], words: str) -> None:
    async with ScriptedUpstream() as upstream:
        for name, value in change.items():
            setattr(upstream, name, value)
        one = Client(upstream, model, start_s=0.1)
        with pytest.raises(BatonError) as failed:
            await one.engine.start()
        assert failed.value.reason is Reason.ENGINE_FAILED
        assert words in failed.value.message
        await one.engine.close()


async def test_it_waits_for_a_server_that_is_still_loading(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.engine.openai.join.RETRY_S", 0.02)
    upstream = ScriptedUpstream(max_model_len=777)
    await upstream.start()
    upstream.key = "secret"
    await upstream.stop()
    one = Client(upstream, model, api_key="secret")
    starting = asyncio.create_task(one.engine.start())
    await asyncio.sleep(0.1)
    upstream.models_status = 503
    await upstream.start()
    await asyncio.sleep(0.1)
    upstream.models_status = 200
    spec = await asyncio.wait_for(starting, HANG_S)
    assert (spec.max_context, spec.fingerprint, spec.resume.value) == (777, None, "text")
    await one.engine.close()
    await upstream.stop()


async def test_it_waits_for_a_server_that_names_its_model_before_it_has_it(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """llama.cpp's does so."""
    monkeypatch.setattr("baton.engine.openai.join.RETRY_S", 0.02)

    tried = asyncio.Event()

    async def loading(asked: Asked) -> None:
        await asked.fail(503, {"error": {"message": "Loading model"}})
        tried.set()

    async with ScriptedUpstream(loading) as upstream:
        one = Client(upstream, model)
        starting = asyncio.create_task(one.engine.start())
        await asyncio.wait_for(tried.wait(), HANG_S)
        upstream.script = hello
        await asyncio.wait_for(starting, HANG_S)
        await one.engine.close()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "PROBE_EACH_S", 0.05)
    monkeypatch.setattr(health, "PROBE_S", 0.2)


async def _gone(upstream: ScriptedUpstream) -> None:
    await upstream.stop()


async def _hung(upstream: ScriptedUpstream) -> None:
    upstream.models = None


async def _sick(upstream: ScriptedUpstream) -> None:
    upstream.models_status = 500


async def _other_model(upstream: ScriptedUpstream) -> None:
    upstream.models = []


@pytest.mark.parametrize("what", [_gone, _hung, _sick, _other_model], ids=lambda f: f.__name__[1:])
@pytest.mark.usefixtures("quick")
async def test_a_server_that_is_not_well_is_told_and_comes_back(
    model: Model, what: Callable[[ScriptedUpstream], Any]
) -> None:
    async with running(model) as one:
        upstream = one.upstream
        models = upstream.models
        assert one.engine.unwell == ""
        await what(upstream)
        await until(lambda: one.engine.unwell)
        # Frontends and routers tell it by what they know: a step that does not end.
        stats = one.engine.stats()
        assert stuck(stats.step_started, stats.step_predicted_s, time.time() + 2)
        upstream.models, upstream.models_status = models, 200
        if what is _gone:
            await upstream.start()
        await until(lambda: not one.engine.unwell)
        assert one.engine.stats().step_started == 0
        assert (await one.complete("r")).text == " one two"


@pytest.mark.usefixtures("quick")
async def test_a_busy_server_that_streams_is_well(model: Model) -> None:
    async def script(asked: Asked) -> None:
        await asked.begin()
        for _ in range(40):
            await asked.text("x")
            await asyncio.sleep(0.025)
        await asked.text("", "length")

    async with running(model, script) as one:
        one.upstream.models = None
        reservation = await one.submit("r", max_tokens=40)
        while not one.heard["r", 0].done.is_set():
            assert one.engine.unwell == ""
            await asyncio.sleep(0.02)
        await reservation.release()
        await until(lambda: one.engine.unwell)


async def test_rates_are_learnt(model: Model) -> None:
    async def script(asked: Asked) -> None:
        await asyncio.sleep(0.04)
        await asked.begin()
        for _ in range(5):
            await asked.text("x")
            await asyncio.sleep(0.02)
        await asked.text("", "length")
        await asked.event("[DONE]")

    async with running(model, script) as one:
        assert (one.engine.stats().prefill_tok_s, one.engine.stats().decode_step_s) == (0.0, 0.0)
        await one.complete("r")
        stats = one.engine.stats()
        assert 0 < stats.prefill_tok_s <= len(PROMPT) / 0.04
        assert stats.decode_step_s >= 0.02


@pytest.mark.parametrize("url", ["ftp://x/v1", "nonsense", "http://", "http://[::1", "http://me:secret@h/v1"])
def test_a_url_that_is_none(url: str) -> None:
    with pytest.raises(BatonError) as refused:
        client.base_url(url)
    assert (refused.value.reason, refused.value.param) == (Reason.INVALID_REQUEST, "upstream")


def test_v1_is_added_to_a_bare_host() -> None:
    assert client.base_url("http://h:1/") == "http://h:1/v1"
    assert client.base_url("https://h/v1/") == "https://h/v1"
    assert client.base_url("http://h:1/openai/v2") == "http://h:1/openai/v2"
