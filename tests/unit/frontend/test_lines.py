"""Whatever a model says, an event is whole lines to whoever reads lines as Unicode has them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.model.card import Model
from services.frontend.lines import one_line
from tests.unit.frontend.peers import ScriptedWorker, running
from tests.unit.frontend.talks import http_to
from tests.unit.frontend.test_api import HI, says

ENDS = "\n\v\f\r\x1c\x1d\x1e\x85\u2028\u2029"
"""What `str.splitlines` ends a line at."""


@given(st.text(alphabet=st.one_of(st.characters(codec="utf-8"), st.sampled_from(ENDS))))
def test_the_value_stays_and_is_one_line(text: str) -> None:
    line = one_line(json.dumps({"text": text}, ensure_ascii=False).encode())
    assert json.loads(line) == {"text": text}
    assert len(line.decode().splitlines()) == 1


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/v1/chat/completions", {"messages": HI}),
        ("/v1/completions", {"prompt": "hi"}),
        ("/v1/responses", {"input": "hi"}),
        ("/v1/messages", {"messages": HI, "max_tokens": 50}),
        ("/generate", {"text": "hi"}),
    ],
)
async def test_every_stream(model: Model, path: str, asked: dict[str, Any]) -> None:
    ends = "\n\x85\u2028\u2029"  # of them, what this tokenizer has
    text = "one".join(ends)
    async with running(model, ScriptedWorker("merged-1", says(model, text))) as stack, http_to(stack) as http:
        answer = await http.post(path, json={"model": model.name, "stream": True, **asked})
    lines = [line for line in answer.content.decode().splitlines() if line]
    assert all(line.startswith(("data: ", "event: ")) for line in lines)
    said = json.dumps([json.loads(line[6:]) for line in lines if line.startswith("data: {")])
    for end in ends:
        assert json.dumps(end)[1:-1] in said
