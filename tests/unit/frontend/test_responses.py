"""`/v1/responses` by the official client: what a worker is asked, and what a client is told."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pydantic
import pytest

from baton.errors import BatonError, Reason
from baton.model.card import Model
from baton.v1 import worker_pb2
from services.frontend.responses.refer import stored
from tests.response_stream import ResponseStream, read_response_stream
from tests.unit.frontend.peers import Attempt, ScriptedWorker, Stack, running, until
from tests.unit.frontend.talks import PARAMETERS, RESPONSE_TOOLS, SAID, dies, fails, http_to, openai_client, stalls
from tests.unit.frontend.test_api import TEXT, budget, says
from tests.unit.frontend.test_losses import failed

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
async def stack(model: Model) -> AsyncIterator[Stack]:
    async with running(model, ScriptedWorker("merged-1", says(model)), reasoning="think") as stack:
        yield stack


async def create(stack: Stack, **asked: Any) -> Any:
    return await openai_client(stack).responses.create(**{"model": stack.model.name, "input": "hi"} | asked)


async def streamed(stack: Stack, **asked: Any) -> ResponseStream:
    body = {"model": stack.model.name, "input": "hi", "stream": True} | asked
    async with http_to(stack) as http:
        answer = await http.post("/v1/responses", json=body)
    assert answer.status_code == 200, answer.text
    stream = read_response_stream(answer.content, "queued" if asked.get("background") else "in_progress")
    assert stream.faults == []
    return stream


async def refused(stack: Stack, **asked: Any) -> Any:
    async with http_to(stack) as http:
        answer = await http.post("/v1/responses", json={"model": stack.model.name, "input": "hi"} | asked)
    return answer.status_code, answer.json()


def asked_of(stack: Stack) -> worker_pb2.Attempt:
    return stack.workers[0].attempts[-1].message


def prompt_of(stack: Stack) -> str:
    return stack.model.tokenizer.decode(asked_of(stack).prompt_ids, skip_special=False)


# ---- made


async def test_whole(stack: Stack, model: Model) -> None:
    response = await create(
        stack, instructions="Be brief.", max_output_tokens=99, temperature=0.5, top_p=0.9, metadata={"a": "b"}, user="u"
    )
    assert response.output_text == TEXT
    assert (response.object, response.status, response.model) == ("response", "completed", model.name)
    assert response.id.startswith("resp_")
    (message,) = response.output
    assert (message.type, message.role, message.status) == ("message", "assistant", "completed")
    assert (response.instructions, response.max_output_tokens, response.metadata) == ("Be brief.", 99, {"a": "b"})
    assert (response.temperature, response.top_p, response.user) == (0.5, 0.9, "u")
    assert (response.tools, response.tool_choice, response.parallel_tool_calls) == ([], "auto", True)
    assert (response.error, response.incomplete_details, response.previous_response_id) == (None, None, None)
    usage = response.usage
    assert usage.output_tokens == len(model.tokenizer.encode(TEXT, add_special=False)) + 1
    assert usage.input_tokens == len(asked_of(stack).prompt_ids)
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert (usage.input_tokens_details.cached_tokens, usage.output_tokens_details.reasoning_tokens) == (0, 0)
    assert "Be brief." in prompt_of(stack)
    sampling = asked_of(stack).sampling
    assert (sampling.max_tokens, sampling.temperature) == (99, 0.5)
    assert response.model_extra["baton"]["mode"] == "merged"


async def test_the_official_client_reads_a_stream(stack: Stack, model: Model) -> None:
    async with openai_client(stack).responses.stream(model=model.name, input="hi") as stream:
        events = [event async for event in stream]
        final = await stream.get_final_response()
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == TEXT
    assert [event.type for event in events[-4:]] == [
        "response.output_text.done", "response.content_part.done", "response.output_item.done", "response.completed",
    ]  # fmt: skip
    assert final.output_text == TEXT
    assert (await openai_client(stack).responses.retrieve(final.id)).output_text == TEXT


async def test_thoughts_text_and_calls(stack: Stack) -> None:
    stack.workers[0].script = says(stack.model, SAID)
    response = await create(stack, tools=RESPONSE_TOOLS)
    thought, message, weather, now = response.output
    assert thought.content[0].text == "She asks."
    assert message.content[0].text == "Let me see 😀."
    assert (weather.name, json.loads(weather.arguments), now.name, now.arguments) == (
        "get_weather", {"city": "Zürich 🙂"}, "now", "{}",
    )  # fmt: skip
    assert len({weather.call_id, now.call_id, weather.id, now.id}) == 4
    marks = len(stack.model.tokenizer.encode("<think>\nShe asks.\n</think>", add_special=False))
    assert abs(response.usage.output_tokens_details.reasoning_tokens - marks) <= 1
    stream = await streamed(stack, tools=RESPONSE_TOOLS)
    assert [item["type"] for item in stream.items] == [item.type for item in response.output]
    assert stream.response["usage"] == {**response.usage.to_dict()} | {
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0}
    }


async def test_a_call_and_its_result_go_back(stack: Stack) -> None:
    stack.workers[0].script = says(stack.model, SAID)
    first = await create(stack, tools=RESPONSE_TOOLS)
    call = next(item for item in first.output if item.type == "function_call")
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "Snow ❄"}
    # By hand, as items that the client itself has written down, and by the id of the response before.
    await create(stack, tools=RESPONSE_TOOLS, input=[{"role": "user", "content": "hi"}, *first.output, result])
    by_hand = prompt_of(stack)
    await create(stack, tools=RESPONSE_TOOLS, input=[result], previous_response_id=first.id)
    assert prompt_of(stack) == by_hand
    assert "Snow ❄" in by_hand
    assert "Zürich" in by_hand
    assert "She asks." not in by_hand


async def test_forced_tools_and_formats_are_grammars(stack: Stack) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    for form, text in (
        ({"type": "json_object"}, '{"type":"object"}'),
        ({"type": "json_schema", "name": "x", "schema": schema, "strict": True}, json.dumps(schema)),
    ):
        await create(stack, text={"format": form})
        assert (asked_of(stack).sampling.grammar.kind, asked_of(stack).sampling.grammar.text) == ("json", text)
    await create(stack, text={"format": {"type": "text"}, "verbosity": "low"})
    assert not asked_of(stack).sampling.HasField("grammar")
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "now"}]}
    for choice, names in (
        ("required", ("get_weather", "now")),
        ({"type": "function", "name": "get_weather"}, ("get_weather",)),
        (allowed, ("now",)),
    ):
        await create(stack, tools=RESPONSE_TOOLS, tool_choice=choice)
        grammar = asked_of(stack).sampling.grammar.text
        assert [name for name in ("get_weather", "now") if f'"{name}' in grammar.replace("\\", "")] == list(names)


async def test_parse_gives_an_object(stack: Stack, model: Model) -> None:
    class Weather(pydantic.BaseModel):
        city: str

    stack.workers[0].script = says(model, '{"city": "Bern"}')
    response = await openai_client(stack).responses.parse(model=model.name, input="hi", text_format=Weather)
    assert response.output_parsed == Weather(city="Bern")


async def test_cut_by_the_budget(stack: Stack, model: Model) -> None:
    for said, tools in ((TEXT, []), ('<tool_call>\n{"name": "get_weather", "arguments": {"ci', RESPONSE_TOOLS)):
        stack.workers[0].script = says(model, said, eos=False)
        most = budget(model, said)
        response = await create(stack, tools=tools, max_output_tokens=most)
        assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        assert response.output[-1].status == "incomplete"
        stream = await streamed(stack, tools=tools, max_output_tokens=most)
        assert stream.events[-1] == "response.incomplete"
    stack.workers[0].script = says(model, "<think>\nShe as", eos=False)
    stream = await streamed(stack, max_output_tokens=budget(model, "<think>\nShe as"))
    assert [item["type"] for item in stream.items] == ["reasoning"]
    usage = stream.response["usage"]
    assert usage["output_tokens_details"]["reasoning_tokens"] == usage["output_tokens"]


async def test_an_answer_of_nothing_is_an_empty_message(stack: Stack, model: Model) -> None:
    stack.workers[0].script = says(model, "")
    response = await create(stack)
    assert (response.output_text, response.output[0].content[0].text) == ("", "")
    assert (await streamed(stack)).items[0]["content"][0]["text"] == ""


async def test_log_probabilities(stack: Stack, model: Model) -> None:
    ids = model.tokenizer.encode("Hello", add_special=False)

    async def script(attempt: Attempt) -> None:
        for offset, token_id in enumerate(ids):
            logprob = worker_pb2.Logprob(logprob=-0.5, top_ids=[token_id, 7], top_logprobs=[-0.5, -2.0])
            tokens = worker_pb2.Tokens(ids=[token_id], logprobs=[logprob])
            finish = "stop" if offset == len(ids) - 1 else ""
            await attempt.send(attempt.event(choice=0, offset=offset, tokens=tokens, finish=finish))

    stack.workers[0].script = script
    response = await create(stack, include=["message.output_text.logprobs"], top_logprobs=2)
    told = response.output[0].content[0].logprobs
    assert [entry.logprob for entry in told] == [-0.5] * len(ids)
    assert [len(entry.top_logprobs) for entry in told] == [2] * len(ids)
    assert asked_of(stack).sampling.logprobs == 2
    stream = await streamed(stack, top_logprobs=2)
    assert [entry["token"] for entry in stream.logprobs] == [entry.token for entry in told]
    assert not (await create(stack)).output[0].content[0].logprobs


async def test_truncation_drops_the_oldest_turns(stack: Stack) -> None:
    long = [
        part
        for n in range(90)
        for part in (
            {"role": "user", "content": f"question {n} " + "word " * 100},
            {"role": "assistant", "content": f"answer {n}"},
        )
    ]
    asked: dict[str, Any] = {"instructions": "Be kind.", "input": [*long, {"role": "user", "content": "the last"}]}
    status, body = await refused(stack, **asked)
    assert (status, body["error"]["code"], body["error"]["param"]) == (400, "context_length_exceeded", "input")
    response = await create(stack, **asked, truncation="auto", max_output_tokens=100)
    assert response.truncation == "auto"
    prompt, limit = prompt_of(stack), stack.frontend.context_length()
    assert "Be kind." in prompt
    assert "the last" in prompt
    assert "question 89 " in prompt
    assert "question 0 " not in prompt
    assert limit - 300 < response.usage.input_tokens <= limit - 100
    assert prompt.index("question") < prompt.index("answer")
    await create(stack, **asked, truncation="auto")
    status, body = await refused(stack, input="word " * 20_000, truncation="auto")
    assert (status, body["error"]["code"]) == (400, "context_length_exceeded")


# ---- kept


async def test_conversations_go_on(stack: Stack) -> None:
    client = openai_client(stack)
    first = await create(stack, input="one", instructions="Be brief.")
    second = await create(stack, input="two", previous_response_id=first.id)
    assert prompt_of(stack).index("one") < prompt_of(stack).index(TEXT) < prompt_of(stack).index("two")
    assert "Be brief." not in prompt_of(stack)
    # What the next turn needs outlives the response that it came with.
    await client.responses.delete(first.id)
    await create(stack, input="three", previous_response_id=second.id)
    for text in ("one", "two", "three"):
        assert text in prompt_of(stack)
    assert second.previous_response_id == first.id
    items = await client.responses.input_items.list(second.id, order="asc")
    assert [(item.type, item.role) for item in items.data] == [  # type: ignore[union-attr]
        ("message", "user"), ("message", "assistant"), ("message", "user"),
    ]  # fmt: skip
    kept = await client.responses.retrieve(second.id)
    assert kept.to_dict() == second.to_dict()
    with pytest.raises(openai.NotFoundError) as caught:
        await client.responses.retrieve(first.id)
    assert caught.value.code == "not_found"
    status, body = await refused(stack, previous_response_id=first.id)
    assert (status, body["error"]["code"], body["error"]["param"]) == (
        400, "previous_response_not_found", "previous_response_id",
    )  # fmt: skip


def refers(*ids: str) -> list[Any]:
    return [{"type": "item_reference", "id": id} for id in ids]


async def test_items_of_kept_responses_are_referred_to(stack: Stack) -> None:
    client = openai_client(stack)
    first = await create(stack, input=[{"role": "user", "content": "one"}, {"role": "user", "content": "not this"}])
    other = await create(stack, input="other")
    asked = [item.id async for item in client.responses.input_items.list(first.id, order="asc")]
    (answer,) = first.output
    items = [*refers(asked[0], answer.id), {"id": other.output[0].id}, {"role": "user", "content": "two"}]
    second = await create(stack, input=items)
    prompt = prompt_of(stack)
    assert prompt.index("one") < prompt.index(TEXT) < prompt.rindex(TEXT) < prompt.index("two")
    assert "not this" not in prompt
    assert "other" not in prompt
    # They are the items of the new response too, whatever becomes of those that they came with.
    await client.responses.delete(first.id)
    kept = [item async for item in client.responses.input_items.list(second.id, order="asc")]
    assert [item.id for item in kept][:3] == [asked[0], answer.id, other.output[0].id]
    assert kept[1].content[0].text == TEXT  # type: ignore[union-attr]
    await create(stack, input="three", previous_response_id=second.id)
    assert "one" in prompt_of(stack)
    calls = [{"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}]
    called = await create(stack, input=[{"role": "user", "content": "x"}, *calls], tools=RESPONSE_TOOLS)
    asked = [item.id async for item in client.responses.input_items.list(called.id, order="asc")]
    done = {"type": "function_call_output", "call_id": "c1", "output": "found it"}
    await create(stack, input=[*refers(*asked), done], tools=RESPONSE_TOOLS)
    assert "found it" in prompt_of(stack)
    await create(stack, input=refers(other.output[0].id), previous_response_id=called.id)
    assert TEXT in prompt_of(stack)


async def test_items_that_are_not_there_are_told(stack: Stack) -> None:
    first, forgotten = await create(stack), await create(stack, store=False)
    gone = await create(stack)
    await openai_client(stack).responses.delete(gone.id)
    known = first.output[0].id
    nobodys = [gone.output[0].id, forgotten.output[0].id, "msg_1", known + "0", "resp_" + known, "x" * 5000, "msg_\n"]
    for id in nobodys:
        for asked in ({}, {"previous_response_id": first.id}):
            status, body = await refused(stack, input=refers(id), **asked)
            assert (status, body["error"]["code"], body["error"]["param"]) == (404, "not_found", "input")
    for asked in ({"input": refers(known, known)}, {"input": refers(known), "previous_response_id": first.id}):
        status, body = await refused(stack, **asked)
        assert (status, body["error"]["code"], body["error"]["param"]) == (400, "invalid_value", "input[0]")
        assert "already" in body["error"]["message"]


async def test_items_referred_to_are_bounded(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    first = await create(stack, input=[{"role": "user", "content": "word " * 100} for _ in range(2)])
    items = [item.id async for item in openai_client(stack).responses.input_items.list(first.id)]
    monkeypatch.setattr("services.frontend.responses.prepare.stored", lambda *asked: stored(*asked[:3], 900))
    await create(stack, input=refers(items[0]))
    status, body = await refused(stack, input=refers(*items))
    assert (status, body["error"]["code"], body["error"]["param"]) == (413, "request_too_large", "input")


async def test_input_items_page_by_page(stack: Stack) -> None:
    client = openai_client(stack)
    response = await create(stack, input=[{"role": "user", "content": f"m{n}"} for n in range(7)])
    pages = client.responses.input_items.list(response.id, limit=3)
    found = [item.content[0].text async for item in pages]  # type: ignore[union-attr]
    assert found == [f"m{n}" for n in reversed(range(7))]
    async with http_to(stack) as http:
        path = f"/v1/responses/{response.id}/input_items"
        page = (await http.get(path, params={"limit": 3, "order": "asc"})).json()
        assert (page["has_more"], page["first_id"]) == (True, page["data"][0]["id"])
        for query, param in (({"limit": "0"}, "limit"), ({"limit": "x"}, "limit"), ({"limit": "9" * 5000}, "limit"),
                             ({"order": "up"}, "order"), ({"after": "nobody"}, "after")):  # fmt: skip
            answer = await http.get(path, params=query)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


async def test_what_is_not_stored_is_not_found(stack: Stack) -> None:
    response = await create(stack, store=False)
    client = openai_client(stack)
    for ask in (client.responses.retrieve, client.responses.cancel, client.responses.delete):
        with pytest.raises(openai.NotFoundError):
            await ask(response.id)


async def test_only_the_background_can_be_cancelled_or_streamed_again(stack: Stack) -> None:
    response = await create(stack)
    with pytest.raises(openai.BadRequestError) as caught:
        await openai_client(stack).responses.cancel(response.id)
    assert "background" in caught.value.message
    async with http_to(stack) as http:
        answer = await http.get(f"/v1/responses/{response.id}", params={"stream": "true"})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "stream")
        assert (await http.delete(f"/v1/responses/{response.id}")).json()["deleted"] is True
        assert (await http.delete(f"/v1/responses/{response.id}")).status_code == 404
        assert (await http.put("/v1/responses")).headers["allow"] == "POST"


# ---- in the background


async def finished(stack: Stack, id: str) -> Any:
    response = await openai_client(stack).responses.retrieve(id)
    while response.status in ("queued", "in_progress"):
        await asyncio.sleep(0.01)
        response = await openai_client(stack).responses.retrieve(id)
    return response


async def test_the_background_goes_on_without_its_client(stack: Stack) -> None:
    response = await create(stack, background=True)
    assert (response.status, response.output, response.background) == ("queued", [], True)
    done = await finished(stack, response.id)
    assert (done.status, done.output_text, done.id) == ("completed", TEXT, response.id)
    await create(stack, previous_response_id=response.id, input="and?")
    await until(lambda: stack.frontend.gate.held == (0, 0))
    assert stack.count("requests", endpoint="responses_background", outcome="ok") == 1


async def test_the_background_waits_for_room(stack: Stack) -> None:
    """Its client has been told that it goes on, and will not come again."""
    stack.router.refusal = BatonError(Reason.NO_CAPACITY, "full")
    response = await create(stack, background=True)
    await until(lambda: len(stack.router.requests) > 3)
    stack.router.refusal = None
    await until(lambda: stack.count("requests", endpoint="responses_background", outcome="ok") == 1)
    async with http_to(stack) as http:
        assert (await http.get(f"/v1/responses/{response.id}")).json()["status"] == "completed"


async def test_the_background_waits_for_an_engine_that_is_away(model: Model) -> None:
    """Its worker takes it and fails it at once, until it knows."""
    back = asyncio.Event()

    async def script(attempt: Attempt) -> None:
        if back.is_set():
            await says(model)(attempt)
        else:
            await attempt.send(failed(attempt, Reason.DECODE_UNAVAILABLE))

    worker = ScriptedWorker("merged-1", script)
    async with running(model, worker) as stack:
        response = await create(stack, background=True)
        await until(lambda: len(worker.attempts) > 10 or stack.frontend.gate.held == (0, 0))
        back.set()
        assert (await finished(stack, response.id)).status == "completed"


async def test_the_background_is_followed_from_any_event_on(model: Model) -> None:
    worker = ScriptedWorker("merged-1", says(model, pause_s=0.01))
    async with running(model, worker) as stack:
        client = openai_client(stack)
        seen: list[Any] = []
        stream = await client.responses.create(model=model.name, input="hi", background=True, stream=True)
        async for event in stream:
            seen.append(event)
            if len(seen) == 8:
                break
        await stream.close()
        id = seen[0].response.id
        again = await client.responses.retrieve(id, stream=True, starting_after=seen[-1].sequence_number)
        seen += [event async for event in again]
        assert [event.sequence_number for event in seen] == list(range(len(seen)))
        assert "".join(event.delta for event in seen if event.type == "response.output_text.delta") == TEXT
        assert seen[-1].type == "response.completed"
        async with http_to(stack) as http:
            whole = await http.get(f"/v1/responses/{id}", params={"stream": "true"})
        assert read_response_stream(whole.content, "queued").faults == []
        # The client that went away was that of the stream, not of the generation.
        assert not worker.attempts[0].aborted.is_set()
        assert len(worker.attempts) == 1


async def test_the_background_is_cancelled(model: Model) -> None:
    async with running(model, ScriptedWorker("merged-1", stalls)) as stack:
        client = openai_client(stack)
        response = await client.responses.create(model=model.name, input="hi", background=True)
        await until(lambda: bool(stack.workers[0].attempts))
        with pytest.raises(openai.BadRequestError) as caught:
            await client.responses.create(model=model.name, input="x", previous_response_id=response.id)
        assert caught.value.param == "previous_response_id"
        await asyncio.sleep(0.1)
        for _ in range(2):  # what has ended stays as it is
            cancelled = await client.responses.cancel(response.id)
            assert (cancelled.status, cancelled.error) == ("cancelled", None)
        await until(stack.workers[0].attempts[0].aborted.is_set)
        assert cancelled.output[0].status == "incomplete"
        assert (await client.responses.retrieve(response.id)).status == "cancelled"
        await until(lambda: stack.frontend.gate.held == (0, 0))
        # Deleting one that runs ends it as well.
        other = await client.responses.create(model=model.name, input="hi", background=True)
        await until(lambda: len(stack.workers[0].attempts) == 2)
        await client.responses.delete(other.id)
        await until(stack.workers[0].attempts[1].aborted.is_set)


async def test_the_background_fails(stack: Stack) -> None:
    stack.router.refusal = BatonError(Reason.INTERNAL, "broken")
    response = await create(stack, background=True)
    failed = await finished(stack, response.id)
    assert (failed.status, failed.error.code) == ("failed", "server_error")
    status, body = await refused(stack, background=True, store=False)
    assert (status, body["error"]["param"]) == (400, "background")


async def test_so_many_run_in_the_background(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.frontend.responses.background.MAX_RUNS", 1)
    async with running(model, ScriptedWorker("merged-1", stalls)) as stack:
        first = await create(stack, background=True)
        status, body = await refused(stack, background=True)
        assert (status, body["error"]["code"]) == (429, "no_capacity")
        assert stack.count("refused", bound="background") == 1
        await openai_client(stack).responses.cancel(first.id)
        assert (await create(stack, background=True)).status == "queued"


# ---- failing


async def test_a_client_that_goes_away_ends_the_generation(model: Model) -> None:
    async with running(model, ScriptedWorker("merged-1", stalls)) as stack:
        stream = await openai_client(stack).responses.create(model=model.name, input="hi", stream=True)
        async for _ in stream:
            break
        await stream.close()
        await until(stack.workers[0].attempts[0].aborted.is_set)
        assert stack.count("disconnects") == 1


async def test_a_lost_worker_is_not_seen(model: Model) -> None:
    script, said = dies(model)
    first, second = ScriptedWorker("a", script), ScriptedWorker("b", says(model))
    async with running(model, first, second) as stack:
        stream = await streamed(stack)
    assert stream.text == TEXT
    assert stream.response["baton"]["attempts"] == 2
    assert list(second.attempts[0].message.emitted_ids) == said


async def test_a_stream_that_cannot_go_on_fails(model: Model) -> None:
    async with running(model, ScriptedWorker("merged-1", fails(model))) as stack:
        stream = await streamed(stack)
        assert stream.events[-1] == "response.failed"
        assert stream.response["error"]["code"] == "server_error"
        assert stream.text == "Hello"
        kept = await openai_client(stack).responses.retrieve(stream.response["id"])
        assert kept.status == "failed"


IMAGE = {"type": "input_image", "image_url": "x"}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"input": None}, "input"),
    ({"input": []}, "input"),
    ({"input": 5}, "input"),
    ({"input": [5]}, "input[0]"),
    ({"input": [{"role": "wizard", "content": "x"}]}, "input[0].role"),
    ({"input": [{"role": "user"}]}, "input[0].content"),
    ({"input": [{"role": "user", "content": [IMAGE]}]}, "input[0].content[0]"),
    ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input[0].content[0]"),
    ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
    ({"input": [{"type": "item_reference"}]}, "input[0].id"),
    ({"input": [{"type": "item_reference", "id": 5}]}, "input[0].id"),
    ({"input": [{"type": "web_search_call"}]}, "input[0].type"),
    ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id"),
    ({"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]}, "input[0].call_id"),
    ({"input": [{"type": "function_call_output", "call_id": "c", "output": 5}]}, "input[0].output"),
    ({"input": "word " * 20_000}, "input"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"max_output_tokens": 10**9}, "max_output_tokens"),
    ({"temperature": 3}, "temperature"),
    ({"top_logprobs": 21}, "top_logprobs"),
    ({"include": ["everything"]}, "include[0]"),
    ({"include": "x"}, "include"),
    ({"instructions": 5}, "instructions"),
    ({"previous_response_id": 5}, "previous_response_id"),
    ({"metadata": {"a": 5}}, "metadata"),
    ({"metadata": {str(n): "x" for n in range(17)}}, "metadata"),
    ({"truncation": "some"}, "truncation"),
    ({"reasoning": {"effort": "some"}}, "reasoning.effort"),
    ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
    ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format.name"),
    ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
    ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "objekt"}}}}, "text.format.schema"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"type": "function", "name": "bad name"}]}, "tools[0].name"),
    ({"tools": [{"type": "function", "name": "f", "parameters": 5}]}, "tools[0].parameters"),
    ({"tools": [RESPONSE_TOOLS[0], RESPONSE_TOOLS[0]]}, "tools[1].name"),
    ({"tools": [{"type": "function", "name": "f", "parameters": PARAMETERS | {"not": {}}}], "tool_choice": "required"},
     "tools[0].parameters"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": RESPONSE_TOOLS, "tool_choice": {"type": "function", "name": "x"}}, "tool_choice"),
    ({"tools": RESPONSE_TOOLS, "tool_choice": {"type": "web_search_preview"}}, "tool_choice"),
    ({"tools": RESPONSE_TOOLS, "tool_choice": {"type": "allowed_tools", "mode": "x"}}, "tool_choice.mode"),
    ({"tools": RESPONSE_TOOLS, "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"name": "x"}]}},
     "tool_choice.tools"),
    ({"prompt": {"id": "x"}}, "prompt"),
    ({"conversation": "conv_x"}, "conversation"),
    ({"stream": 1}, "stream"),
    ({"background": 1}, "background"),
]  # fmt: skip


async def test_refusals_name_their_field(stack: Stack) -> None:
    for fields, param in REFUSED:
        status, body = await refused(stack, **fields)
        assert (status, body["error"]["param"], body["error"]["type"]) == (400, param, "invalid_request_error"), fields
    assert (await refused(stack, model="gpt"))[1]["error"]["code"] == "model_not_found"
    assert stack.workers[0].attempts == []
