"""`/v1/messages` by the official client: what a worker is asked, and what a client is told."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anthropic
import pytest

from baton.errors import BatonError, Reason
from baton.model.card import Model
from baton.v1 import worker_pb2
from services.frontend.api_keys import ApiKeys
from tests.message_stream import MessageStream, read_message_stream
from tests.unit.frontend.peers import ScriptedWorker, Stack, running, until
from tests.unit.frontend.talks import MESSAGE_TOOLS, PARAMETERS, SAID, anthropic_client, dies, fails, http_to, stalls
from tests.unit.frontend.test_api import HI, TEXT, budget, says

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
async def stack(model: Model) -> AsyncIterator[Stack]:
    async with running(model, ScriptedWorker("merged-1", says(model)), reasoning="think") as stack:
        yield stack


def body(stack: Stack, **asked: Any) -> dict[str, Any]:
    return {"model": stack.model.name, "max_tokens": 200, "messages": HI} | asked


async def create(stack: Stack, **asked: Any) -> Any:
    return await anthropic_client(stack).messages.create(**body(stack, **asked))


async def streamed(stack: Stack, **asked: Any) -> MessageStream:
    async with http_to(stack) as http:
        answer = await http.post("/v1/messages", json=body(stack, stream=True, **asked))
    assert answer.status_code == 200, answer.text
    stream = read_message_stream(answer.content)
    assert stream.faults == []
    return stream


def asked_of(stack: Stack) -> worker_pb2.Attempt:
    return stack.workers[0].attempts[-1].message


def prompt_of(stack: Stack) -> str:
    return stack.model.tokenizer.decode(asked_of(stack).prompt_ids, skip_special=False)


async def test_whole(stack: Stack, model: Model) -> None:
    system: Any = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "Be kind."}]  # fmt: skip # noqa: E501
    raw = await anthropic_client(stack).messages.with_raw_response.create(
        **body(stack, system=system, metadata={"user_id": "u"}),
        extra_body={"temperature": 0.5, "top_p": 0.9, "top_k": 4},  # this client no longer knows them
    )
    message = await raw.parse()
    assert [(block.type, block.text) for block in message.content] == [("text", TEXT)]
    assert (message.type, message.role, message.model) == ("message", "assistant", model.name)
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    assert message.id.startswith("msg_")
    usage = message.usage
    assert usage.output_tokens == len(model.tokenizer.encode(TEXT, add_special=False)) + 1
    assert (usage.input_tokens, usage.cache_read_input_tokens) == (len(asked_of(stack).prompt_ids), 0)
    assert raw.headers["request-id"] == raw.headers["x-request-id"]
    assert "Be brief.\nBe kind." in prompt_of(stack)
    sampling = asked_of(stack).sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_k) == (200, 0.5, 4)


async def test_the_official_client_reads_a_stream(stack: Stack) -> None:
    stack.workers[0].script = says(stack.model, SAID)
    async with anthropic_client(stack).messages.stream(**body(stack, tools=MESSAGE_TOOLS)) as stream:
        events = [event async for event in stream]
        final: Any = await stream.get_final_message()
    assert [block.type for block in final.content] == ["thinking", "text", "tool_use", "tool_use"]
    thought, text, weather, now = final.content
    assert (thought.thinking, text.text) == ("She asks.", "Let me see 😀.")
    assert thought.signature
    assert (weather.name, weather.input, now.name, now.input) == ("get_weather", {"city": "Zürich 🙂"}, "now", {})
    assert weather.id.startswith("toolu_")
    assert final.stop_reason == "tool_use"
    assert final.usage.output_tokens > 0
    assert "".join(event.text for event in events if event.type == "text") == text.text
    whole = await create(stack, tools=MESSAGE_TOOLS)
    assert [block.to_dict() for block in whole.content if block.type != "tool_use"] == [
        block.to_dict() for block in final.content if block.type != "tool_use"
    ]
    assert [(b.name, b.input) for b in whole.content if b.type == "tool_use"] == [
        (weather.name, weather.input), (now.name, now.input),
    ]  # fmt: skip
    assert whole.usage.output_tokens_details.thinking_tokens > 0


async def test_calls_and_their_results_go_back(stack: Stack) -> None:
    stack.workers[0].script = says(stack.model, SAID)
    first = await create(stack, tools=MESSAGE_TOOLS)
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": content}
        for block, content in zip(first.content[2:], ("Snow ❄", [{"type": "text", "text": "noon"}]), strict=True)
    ]
    messages = [*HI, {"role": "assistant", "content": first.content},
                {"role": "user", "content": [*results, {"type": "text", "text": "And now?"}]}]  # fmt: skip
    await create(stack, tools=MESSAGE_TOOLS, messages=messages)
    prompt = prompt_of(stack)
    places = [prompt.index(text) for text in ("Let me see", "Zürich", "Snow ❄", "noon", "And now?")]
    assert places == sorted(places)
    assert "She asks." not in prompt


async def test_forced_tools_and_formats_are_grammars(stack: Stack) -> None:
    for choice, names in (
        ({"type": "any"}, ["get_weather", "now"]),
        ({"type": "tool", "name": "now"}, ["now"]),
        ({"type": "any", "disable_parallel_tool_use": True}, ["get_weather", "now"]),
    ):
        await create(stack, tools=MESSAGE_TOOLS, tool_choice=choice)
        grammar = asked_of(stack).sampling.grammar.text
        assert [name for name in ("get_weather", "now") if f'"{name}' in grammar.replace("\\", "")] == names
    for choice in ({"type": "auto"}, {"type": "none"}):
        await create(stack, tools=MESSAGE_TOOLS, tool_choice=choice)
        assert not asked_of(stack).sampling.HasField("grammar")
    assert "get_weather" not in prompt_of(stack)
    form = {"type": "json_schema", "schema": PARAMETERS}
    await create(stack, output_config={"format": form})
    assert json.loads(asked_of(stack).sampling.grammar.text) == PARAMETERS
    # One that was named is a call as any other here.
    stack.workers[0].script = says(stack.model, '<tool_call>\n{"name": "now"}\n</tool_call>')
    message = await create(stack, tools=MESSAGE_TOOLS, tool_choice={"type": "tool", "name": "now"})
    assert message.stop_reason == "tool_use"


async def test_why_it_stops(stack: Stack, model: Model) -> None:
    for ask in (create, streamed):
        message = await ask(stack, stop_sequences=["zzz", "wörld"])
        reason, sequence = ("stop_reason", "stop_sequence") if ask is create else ("reason", "sequence")
        assert (getattr(message, reason), getattr(message, sequence)) == ("stop_sequence", "wörld")
        text = message.content[0].text if ask is create else message.text
        assert text == "Hello 😀 "
    cut = '<tool_call>\n{"name": "get_weather", "arguments": {"ci'
    stack.workers[0].script = says(model, cut, eos=False)
    message = await create(stack, tools=MESSAGE_TOOLS, max_tokens=budget(model, cut))
    assert (message.stop_reason, message.content[0].input) == ("max_tokens", {})
    assert message.content[0].model_extra["partial_json"] == '{"ci'
    stream = await streamed(stack, tools=MESSAGE_TOOLS, max_tokens=budget(model, cut))
    assert stream.reason == "max_tokens"
    stack.workers[0].script = says(model, "")
    assert (await create(stack)).content == []
    assert (await streamed(stack)).blocks == []


async def test_thinking_is_told_to_the_template_and_may_be_left_out(stack: Stack) -> None:
    stack.workers[0].script = says(stack.model, SAID)
    for thinking in ({"type": "enabled", "budget_tokens": 1024}, {"type": "adaptive"}, {"type": "disabled"}):
        message = await create(stack, thinking=thinking, max_tokens=2000)
        assert message.content[0].thinking == "She asks."
    message = await create(stack, thinking={"type": "adaptive", "display": "omitted"})
    assert message.content[0].thinking == ""
    assert message.content[0].signature
    assert (await streamed(stack, thinking={"type": "adaptive", "display": "omitted"})).blocks[0]["said"] == ""


async def test_the_last_message_is_continued(stack: Stack, model: Model) -> None:
    await create(stack, messages=[*HI, {"role": "assistant", "content": "It is ("}])
    assert prompt_of(stack).endswith("It is (")


async def test_tokens_are_counted(stack: Stack) -> None:
    asked: dict[str, Any] = {"system": "Be brief.", "tools": MESSAGE_TOOLS, "messages": HI}
    count = await anthropic_client(stack).messages.count_tokens(model=stack.model.name, **asked)
    message = await create(stack, **asked)
    assert count.input_tokens == message.usage.input_tokens
    long = await anthropic_client(stack).messages.count_tokens(
        model=stack.model.name, messages=[{"role": "user", "content": "word " * 20_000}]
    )
    assert long.input_tokens > 20_000
    assert len(stack.workers[0].attempts) == 1
    assert stack.frontend.gate.held == (0, 0)


async def test_keys_in_either_header(model: Model, tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("sk-good\n")
    async with running(model, ScriptedWorker("merged-1", says(model)), api_keys=ApiKeys(path)) as stack:
        for key in ({"api_key": "sk-good"}, {"api_key": None, "auth_token": "sk-good"}):
            client = anthropic_client(stack, **key)
            assert (await client.messages.create(**body(stack))).stop_reason == "end_turn"
        with pytest.raises(anthropic.AuthenticationError) as caught:
            await anthropic_client(stack, api_key="sk-bad").messages.create(**body(stack))
        assert caught.value.body["error"]["type"] == "authentication_error"  # type: ignore[index]
        async with http_to(stack) as http:
            for headers, status in (({"x-api-key": "sk-good"}, 200), ({"x-api-key": "sk-bad"}, 401), ({}, 401)):
                headers = headers | {"anthropic-version": "2023-06-01"}
                answer = await http.post("/v1/messages", json=body(stack), headers=headers)
                assert answer.status_code == status
            answer = await http.get("/v1/models", headers={"x-api-key": "sk-good"})
            assert answer.status_code == 200


# ---- failing


async def test_a_client_that_goes_away_ends_the_generation(model: Model) -> None:
    async with running(model, ScriptedWorker("merged-1", stalls)) as stack:
        async with anthropic_client(stack).messages.stream(**body(stack)) as stream:
            async for _ in stream:
                break
        await until(stack.workers[0].attempts[0].aborted.is_set)
        assert stack.count("disconnects") == 1


async def test_a_lost_worker_is_not_seen(model: Model) -> None:
    script, said = dies(model)
    first, second = ScriptedWorker("a", script), ScriptedWorker("b", says(model))
    async with running(model, first, second) as stack:
        assert (await streamed(stack)).text == TEXT
    assert list(second.attempts[0].message.emitted_ids) == said


async def test_failures_have_the_shape_of_the_api(model: Model) -> None:
    async with running(model, ScriptedWorker("merged-1", fails(model))) as stack, http_to(stack) as http:
        mine = {"x-request-id": "mine"}
        answer = await http.post("/v1/messages", json=body(stack, stream=True), headers=mine)
        last = answer.text.removesuffix("\n\n").rpartition("\n\n")[2]
        assert last.startswith("event: error\ndata: ")
        told = json.loads(last.partition("data: ")[2])
        assert (told["type"], told["request_id"]) == ("error", "mine")
        with pytest.raises(anthropic.APIStatusError):
            async with anthropic_client(stack).messages.stream(**body(stack)) as stream:
                await stream.get_final_message()
        for answer, status, kind in (
            (await http.get("/v1/messages", headers=mine), 405, "invalid_request_error"),
            (await http.post("/v1/messages/nothing", headers=mine), 404, "not_found_error"),
            (await http.post("/v1/messages", json=body(stack, model="x"), headers=mine), 404, "not_found_error"),
            (await http.post("/v1/messages", content=b"x" * (2 << 20), headers=mine), 413, "request_too_large"),
            (await http.post("/v1/messages", content=b"{}", headers=mine | {"content-type": "text/plain"}), 415,
             "invalid_request_error"),
        ):  # fmt: skip
            told = answer.json()
            assert (answer.status_code, told["error"]["type"]) == (status, kind)
            assert (told["type"], told["request_id"], answer.headers["request-id"]) == ("error", "mine", "mine")
        stack.router.refusal = BatonError(Reason.NO_CAPACITY, "all full")
        answer = await http.post("/v1/messages", json=body(stack))
        assert (answer.status_code, answer.json()["error"]["type"]) == (429, "rate_limit_error")
        assert answer.headers["retry-after"] == "1"


CALL = {"type": "tool_use", "id": "t1", "name": "f", "input": {}}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 10**9}, "max_tokens"),
    ({"messages": []}, "messages"),
    ({"messages": "x"}, "messages"),
    ({"messages": [5]}, "messages[0]"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "document"}]}]},
     "messages[0].content[1]"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    ({"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t9"}]}]},
     "messages[0].content[0].tool_use_id"),
    ({"messages": [{"role": "assistant", "content": [CALL]}, {"role": "user", "content": [
        {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "image"}]}]}]},
     "messages[1].content[0].content[0]"),
    ({"messages": [{"role": "assistant", "content": [CALL | {"input": 5}]}]}, "messages[0].content[0].input"),
    ({"messages": [{"role": "user", "content": "word " * 20_000}]}, "messages"),
    ({"system": 5}, "system"),
    ({"system": [{"type": "image"}]}, "system[0]"),
    ({"temperature": 1.5}, "temperature"),
    ({"stop_sequences": "x"}, "stop_sequences"),
    ({"stop_sequences": [""]}, "stop_sequences"),
    ({"thinking": {"type": "some"}}, "thinking.type"),
    ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
    ({"thinking": {"type": "enabled", "budget_tokens": 2000}}, "thinking.budget_tokens"),
    ({"thinking": {"type": "adaptive", "display": "x"}}, "thinking.display"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
    ({"tools": [{"name": "f", "input_schema": {"type": "string"}}]}, "tools[0].input_schema"),
    ({"tools": [{"name": "f g", "input_schema": {}}]}, "tools[0].name"),
    ({"tools": [MESSAGE_TOOLS[0], MESSAGE_TOOLS[0]]}, "tools[1].name"),
    ({"tools": [{"name": "f", "input_schema": PARAMETERS | {"not": {}}}], "tool_choice": {"type": "any"}},
     "tools[0].input_schema"),
    ({"tool_choice": "any"}, "tool_choice"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"tools": MESSAGE_TOOLS, "tool_choice": {"type": "required"}}, "tool_choice.type"),
    ({"tools": MESSAGE_TOOLS, "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice"),
    ({"tools": MESSAGE_TOOLS, "tool_choice": {"type": "auto", "disable_parallel_tool_use": 1}},
     "tool_choice.disable_parallel_tool_use"),
    ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type"),
    ({"output_config": {"format": {"type": "json_schema", "schema": {"type": "objekt"}}}},
     "output_config.format.schema"),
    ({"container": "c"}, "container"),
    ({"mcp_servers": [{}]}, "mcp_servers"),
]  # fmt: skip


async def test_refusals_name_their_field(stack: Stack) -> None:
    async with http_to(stack) as http:
        for fields, param in REFUSED:
            answer = await http.post("/v1/messages", json=body(stack, **fields))
            error = answer.json()["error"]
            assert (answer.status_code, error["param"], error["type"]) == (400, param, "invalid_request_error"), fields
    assert stack.workers[0].attempts == []
