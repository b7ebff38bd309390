"""The limit for a first token: who is refused for coming too late, and who is not."""

from __future__ import annotations

import httpx
import pytest

from baton.errors import BatonError, Reason
from baton.model.card import Model
from services.frontend.settings import FrontendSettings
from tests.unit.frontend.peers import HANG_S, Attempt, ScriptedWorker, Stack, running, until
from tests.unit.frontend.test_api import HI, TEXT, client, says

SLO_S = 0.75
LATE = BatonError(Reason.NO_CAPACITY, "first token in 9.00 s at the soonest, 0.75 s asked")

pytestmark = pytest.mark.timeout(60)


def told(stack: Stack) -> list[tuple[int, float]]:
    """Each question to the router: the attempt, and the limit."""
    return [(request.attempt, request.ttft_slo_s) for request in stack.router.requests]


def test_there_is_none_unless_it_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    assert FrontendSettings.parse(["--model", "m"]).ttft_slo_s == 0
    assert FrontendSettings.parse(["--model", "m", "--ttft-slo-s", "1.5"]).ttft_slo_s == 1.5
    monkeypatch.setenv("BATON_TTFT_SLO_S", "2")
    assert FrontendSettings.parse(["--model", "m"]).ttft_slo_s == 2


@pytest.mark.parametrize("stream", [False, True])
async def test_who_would_come_too_late_is_refused_at_once(model: Model, stream: bool) -> None:
    async with running(model, ScriptedWorker("merged-1", says(model)), ttft_slo_s=SLO_S) as stack:
        stack.router.refusal = LATE
        async with httpx.AsyncClient(base_url=stack.url, timeout=HANG_S, trust_env=False) as http:
            body = {"model": model.name, "messages": HI, "stream": stream}
            answer = await http.post("/v1/chat/completions", json=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (429, "no_capacity")
        assert float(answer.headers["retry-after"]) >= 1
        assert told(stack) == [(0, SLO_S)]
        assert not stack.workers[0].attempts


async def test_what_has_begun_goes_on_however_late(model: Model) -> None:
    async def cut(attempt: Attempt) -> None:
        await attempt.tokens(model.tokenizer.encode(TEXT, add_special=False)[:2], offset=0)
        attempt.worker.cut()

    async with running(model, ScriptedWorker("a", cut), ScriptedWorker("b", says(model)), ttft_slo_s=SLO_S) as stack:
        answer = await client(stack).chat.completions.create(model=model.name, messages=HI)
        assert answer.choices[0].message.content == TEXT
        assert told(stack) == [(0, SLO_S), (1, 0.0)]


async def test_what_was_refused_by_a_worker_is_not_refused_for_that(model: Model) -> None:
    first = ScriptedWorker("a", says(model))
    first.refusal = BatonError(Reason.NO_CAPACITY, "full")
    async with running(model, first, ScriptedWorker("b", says(model)), ttft_slo_s=SLO_S) as stack:
        await client(stack).chat.completions.create(model=model.name, messages=HI)
        assert told(stack) == [(0, SLO_S), (1, 0.0)]


async def test_what_was_promised_has_no_limit(model: Model) -> None:
    async with running(model, ScriptedWorker("merged-1", says(model)), ttft_slo_s=SLO_S) as stack:
        made = await client(stack).responses.create(model=model.name, input="hi", background=True)
        await until(lambda: stack.frontend.responses.get(made.id, "").status == "completed")
        assert told(stack) == [(0, 0.0)]


async def test_an_explanation_says_who_would_be_refused(model: Model) -> None:
    async with running(model, ScriptedWorker("merged-1", says(model)), ttft_slo_s=SLO_S) as stack:
        async with httpx.AsyncClient(base_url=stack.url, timeout=HANG_S, trust_env=False) as http:
            answer = await http.post("/v1/baton/explain", json={"model": model.name, "prompt": "hi"})
        assert answer.status_code == 200
        assert [request.ttft_slo_s for request in stack.router.explained] == [SLO_S]


@pytest.mark.parametrize("url", ["/v1/completions", "/generate"])
async def test_of_several_prompts_the_first_decides(model: Model, url: str) -> None:
    """The others see what the first has been promised: on an idle fleet, too, one of them would come too late."""
    bodies = {"/v1/completions": {"prompt": [TEXT] * 9, "n": 2}, "/generate": {"text": [TEXT] * 9}}
    async with running(model, ScriptedWorker("merged-1", says(model)), ttft_slo_s=SLO_S) as stack:
        async with httpx.AsyncClient(base_url=stack.url, timeout=HANG_S, trust_env=False) as http:
            answer = await http.post(url, json={"model": model.name, **bodies[url]})
            assert answer.status_code == 200
            assert told(stack) == [(0, SLO_S)] + 8 * [(0, 0.0)]
            stack.router.refusal = LATE
            answer = await http.post(url, json={"model": model.name, **bodies[url]})
        assert answer.status_code == 429
        assert told(stack)[9:] == [(0, SLO_S)]
