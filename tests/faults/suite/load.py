"""Clients under faults: a closed loop of streams, each judged against its reference."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import orjson

from tests.faults.suite.requests import Ask, Judgement, Reference, Step, Verdict, is_prefix, judge

ANSWER_S = 120.0
"""A client gives up after so long: far beyond any failover."""
REFUSED = (429, 503)


@dataclass
class Answer:
    """What one try at one frontend gave. `times` are `time.monotonic()` of each piece."""

    choices: int
    texts: list[str] = field(default_factory=list)
    finishes: list[str] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    usage: dict[str, Any] = field(default_factory=dict)
    story: dict[str, Any] = field(default_factory=dict)
    uid: str = ""
    status: int = 0
    error: str = ""
    whole: bool = False
    """It ended as it should: a body, or [DONE]."""

    def __post_init__(self) -> None:
        self.texts = [""] * self.choices
        self.finishes = [""] * self.choices


@dataclass(frozen=True)
class Stream:
    """One request to its end. `uid`: its name in the logs of the frontend that answered; `times` of its pieces."""

    ask: Ask
    started: float
    judgement: Judgement | None
    failure: str
    refused: int
    retried: int
    resumed: bool
    uid: str
    prompt_tokens: int
    times: Sequence[float]


async def send(client: httpx.AsyncClient, url: str, ask: Ask) -> Answer:
    """One try. Never raises for what the far side does."""
    answer = Answer(ask.choices)
    body = dict(ask.body)
    if ask.stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    try:
        async with client.stream("POST", f"{url}/v1/completions", content=orjson.dumps(body)) as reply:
            answer.status = reply.status_code
            if reply.status_code != 200 or not ask.stream:
                _body(answer, orjson.loads(await reply.aread()))
                return answer
            async for line in reply.aiter_lines():
                if line == "data: [DONE]":
                    answer.whole = not answer.error
                elif line.startswith("data: "):
                    _chunk(answer, orjson.loads(line[6:]))
    except (httpx.HTTPError, orjson.JSONDecodeError) as error:
        answer.error = answer.error or repr(error)
        answer.status = answer.status or -1
    return answer


def _body(answer: Answer, body: dict[str, Any]) -> None:
    if "error" in body:
        answer.error = str(body["error"])
        return
    for choice in body["choices"]:
        answer.texts[choice["index"]] = choice["text"]
        answer.finishes[choice["index"]] = choice["finish_reason"]
    answer.usage, answer.story, answer.whole = body["usage"], body["baton"], True


def _chunk(answer: Answer, chunk: dict[str, Any]) -> None:
    if "error" in chunk:
        answer.error = str(chunk["error"])
        return
    answer.uid = chunk["id"].partition("-")[2]
    answer.usage = chunk.get("usage") or answer.usage
    answer.story = chunk.get("baton") or answer.story
    for choice in chunk["choices"]:
        if choice["text"]:
            answer.texts[choice["index"]] += choice["text"]
            answer.times.append(time.monotonic())
        answer.finishes[choice["index"]] = choice["finish_reason"] or answer.finishes[choice["index"]]


async def reference(client: httpx.AsyncClient, url: str, ask: Ask) -> Reference:
    """The undisturbed answer, with the margins of its tokens where they mean something. Raises AssertionError."""
    plain_greedy = ask.body["temperature"] == 0 and not any("penalty" in name for name in ask.body)
    body = ask.body | ({"logprobs": 2} if plain_greedy else {})
    answer = Answer(ask.choices)
    reply = await client.post(f"{url}/v1/completions", content=orjson.dumps(body))
    parsed = orjson.loads(reply.content)
    _body(answer, parsed)
    assert answer.whole, f"{ask.name} failed undisturbed: {answer.error}"
    steps = []
    if plain_greedy and ask.choices == 1:
        logprobs = parsed["choices"][0]["logprobs"]
        for at, top in zip(logprobs["text_offset"], logprobs["top_logprobs"], strict=True):
            best = sorted(top.values(), reverse=True)
            steps.append(Step(at, best[0] - best[1] if len(best) > 1 else 0.0))
    usage = answer.usage
    return Reference(answer.texts, answer.finishes, usage["completion_tokens"], usage["prompt_tokens"], steps)


class Load:
    """`clients` closed loops over the catalogue. `broken(url, since)` says whether a frontend was ill after that time:
    only then may a connection to it break, and the client tries the next in its list, as one that has a list does."""

    def __init__(
        self,
        frontends: Sequence[str],
        work: Sequence[tuple[Ask, Reference]],
        broken: Callable[[str, float], bool],
        seed: int,
    ) -> None:
        self.streams: list[Stream] = []
        self.cut_texts_wrong = 0
        self._frontends = list(frontends)
        self._work = list(work)
        self._broken = broken
        self._chance = random.Random(seed)
        self._stop = asyncio.Event()
        self._go = asyncio.Event()
        self._go.set()
        self._busy = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._news = asyncio.Event()

    async def run(self, clients: int) -> None:
        """Ask until `finish`; returns when the last answers have come."""
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=clients)
        async with httpx.AsyncClient(trust_env=False, limits=limits, timeout=ANSWER_S) as client:
            await asyncio.gather(*(self._loop(client) for _ in range(clients)))

    def finish(self) -> None:
        """Start nothing more."""
        self._stop.set()
        self._go.set()

    async def at_least(self, count: int) -> None:
        """Wait until so many streams have ended."""
        while len(self.streams) < count:
            self._news.clear()
            await self._news.wait()

    @property
    def paused(self) -> bool:
        """Whether nothing new is started for now."""
        return not self._go.is_set()

    async def pause(self) -> None:
        """Start nothing more for now; returns when nothing runs."""
        self._go.clear()
        await self._idle.wait()

    def go_on(self) -> None:
        """After `pause`."""
        self._go.set()

    async def _loop(self, client: httpx.AsyncClient) -> None:
        while True:
            await self._go.wait()
            if self._stop.is_set():
                return
            ask, wanted = self._chance.choice(self._work)
            self._busy += 1
            self._idle.clear()
            try:
                self.streams.append(await self._one(client, ask, wanted))
                self._news.set()
            finally:
                self._busy -= 1
                if not self._busy:
                    self._idle.set()

    async def _one(self, client: httpx.AsyncClient, ask: Ask, wanted: Reference) -> Stream:
        started = time.monotonic()
        refused = retried = 0
        order = self._chance.sample(self._frontends, len(self._frontends))
        failure, judgement, answer = "no frontend answered", None, Answer(ask.choices)
        while time.monotonic() < started + ANSWER_S:
            url = order[(refused + retried) % len(order)]
            began = time.monotonic()
            answer = await send(client, url, ask)
            if answer.whole:
                failure = ""
                tokens = answer.usage["completion_tokens"]
                judgement = judge(wanted, answer.texts, answer.finishes, tokens)
                if answer.usage["prompt_tokens"] != wanted.prompt_tokens:
                    judgement = Judgement(Verdict.WRONG, detail=f"usage {answer.usage}")
                break
            if answer.status in REFUSED:
                refused += 1
            elif self._broken(url, began):
                retried += 1
                self.cut_texts_wrong += not is_prefix(wanted, answer.texts)
            else:
                failure = f"status {answer.status}: {answer.error or 'the stream broke off'}"
                break
            await asyncio.sleep(0.1)
        return Stream(
            ask=ask,
            started=started,
            judgement=judgement,
            failure=failure,
            refused=refused,
            retried=retried,
            resumed=answer.story.get("attempts", 1) > 1,
            uid=answer.uid,
            prompt_tokens=wanted.prompt_tokens,
            times=answer.times,
        )
