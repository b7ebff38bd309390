"""The official Python client against a running Baton, as its users write it: `python openai_program.py URL MODEL`."""

from __future__ import annotations

import json
import time
from typing import Any, Literal

import openai
from openai import OpenAI
from pydantic import BaseModel
from server import WAIT_S, Server, check, refusal

ASKED: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is a lighthouse?"}]
TOKENS = 16


class Weather(BaseModel):
    """The weather in a city."""

    city: Literal["Paris", "Rome"]
    days: Literal[1, 2, 3]


def texts(server: Server, client: OpenAI) -> None:
    """However it is asked for, a text has the tokens that it was to have, and they are counted."""
    plain: dict[str, Any] = {"model": server.model, "messages": ASKED, "temperature": 0, "max_tokens": TOKENS}
    plain |= {"extra_body": {"min_tokens": TOKENS}}
    with check("a text in one piece"):
        whole = client.chat.completions.create(**plain)
        text = whole.choices[0].message.content
        assert whole.choices[0].finish_reason == "length"
        assert whole.usage
        assert whole.usage.completion_tokens == TOKENS
    with check("a text streamed"):
        chunks = list(client.chat.completions.create(stream=True, stream_options={"include_usage": True}, **plain))
        said = [chunk.choices[0] for chunk in chunks if chunk.choices]
        assert server.same(text, "".join(choice.delta.content or "" for choice in said))
        assert [choice.delta.role for choice in said if choice.delta.role] == ["assistant"]
        assert [choice.finish_reason for choice in said if choice.finish_reason] == ["length"]
        assert chunks[-1].choices == []
        assert chunks[-1].usage.completion_tokens == TOKENS
    with check("a text by the client's own helper for streams"), client.chat.completions.stream(**plain) as stream:
        events = list(stream)
        streamed = "".join(event.delta for event in events if event.type == "content.delta")
        assert [event.content for event in events if event.type == "content.done"] == [streamed]
        assert server.same(text, streamed)
    with check("the head of an answer"):
        raw = client.chat.completions.with_raw_response.create(**plain)
        assert raw.headers["x-request-id"]
        assert server.same(text, raw.parse().choices[0].message.content)
    with check("a completion with two choices, streamed"):
        asked: Any = {"prompt": "Once", "max_tokens": 4, "n": 2, "seed": 1, "stream": True}
        told = [chunk.choices[0] for chunk in client.completions.create(model=server.model, **asked)]
        assert sorted(choice.index for choice in told if choice.finish_reason) == [0, 1]
    with check("the model is listed"):
        assert server.model in [model.id for model in client.models.list()]
    with check("embeddings"):
        vectors = client.embeddings.create(model=server.model, input=["A lighthouse.", "A ship."]).data
        assert [vector.index for vector in vectors] == [0, 1]
        assert all(abs(sum(x * x for x in vector.embedding) - 1) < 1e-3 for vector in vectors)


def structure(server: Server, client: OpenAI) -> None:
    """Tools and schemas as classes of Pydantic, by the client's own helpers."""
    asked: dict[str, Any] = {"model": server.model, "messages": ASKED, "temperature": 0, "max_tokens": 128}
    tools: Any = {"tools": [openai.pydantic_function_tool(Weather)]}
    named = {**asked, **tools, "tool_choice": {"type": "function", "function": {"name": "Weather"}}}
    with check("a named tool is called"):
        whole = called(client.chat.completions.parse(**named))
    with check("the same, streamed"), client.chat.completions.stream(**named) as stream:
        assert server.same(whole, called(stream.get_final_completion()))
    with check("some tool is called because it must be"):
        required = client.chat.completions.parse(tool_choice="required", parallel_tool_calls=False, **asked, **tools)
        assert required.choices[0].finish_reason == "tool_calls"
        called(required)
    with check("a schema"):
        report = client.chat.completions.parse(response_format=Weather, **asked).choices[0].message.parsed
        assert isinstance(report, Weather)


def called(completion: Any) -> Weather:
    """The arguments of the one call in it."""
    (call,) = completion.choices[0].message.tool_calls
    assert call.function.name == "Weather"
    found = call.function.parsed_arguments
    assert isinstance(found, Weather)
    return found


def responses(server: Server, client: OpenAI) -> None:
    """The Responses API: whole, streamed, gone on with, in the background."""
    asked: dict[str, Any] = {"model": server.model, "temperature": 0, "max_output_tokens": TOKENS}
    asked |= {"extra_body": {"min_tokens": TOKENS}}
    with check("a response, kept"):
        whole = client.responses.create(input="What is a lighthouse?", **asked)
        assert whole.status == "incomplete"
        assert whole.incomplete_details
        assert whole.incomplete_details.reason == "max_output_tokens"
        assert whole.usage
        assert whole.usage.output_tokens == TOKENS
        assert client.responses.retrieve(whole.id).output_text == whole.output_text
    with check("a response streamed"), client.responses.stream(input="What is a lighthouse?", **asked) as stream:
        events = list(stream)
        streamed = "".join(event.delta for event in events if event.type == "response.output_text.delta")
        assert events[-1].type == "response.incomplete"
        assert events[-1].response.output_text == streamed
        assert server.same(whole.output_text, streamed)
    with check("a response that goes on from another"):
        more = client.responses.create(input="And a ship?", previous_response_id=whole.id, **asked)
        assert more.usage
        assert more.usage.input_tokens > whole.usage.input_tokens
    with check("a schema"):
        parsed = client.responses.parse(
            model=server.model, input="The weather?", text_format=Weather, temperature=0, max_output_tokens=128
        )
        assert isinstance(parsed.output_parsed, Weather)
    with check("a response in the background, cancelled"):
        long: Any = {**asked, "max_output_tokens": min(1000, server.context // 2)}
        begun = client.responses.create(input="Tell a story.", background=True, **long)
        assert begun.status in ("queued", "in_progress")
        assert client.responses.cancel(begun.id).status in ("cancelled", "incomplete", "completed")  # it may have ended
    for kept in (whole, more, parsed, begun):
        client.responses.delete(kept.id)


def batches(server: Server, client: OpenAI) -> None:
    """A file of requests, run in idle time."""
    body = {"model": server.model, "messages": ASKED, "max_tokens": 4}
    url: Any = "/v1/chat/completions"
    lines = [{"custom_id": str(n), "method": "POST", "url": url, "body": body} for n in range(2)]
    text = "".join(f"{json.dumps(line)}\n" for line in lines)
    with check("a batch of two requests"):
        file = client.files.create(file=("lines.jsonl", text.encode()), purpose="batch")
        batch = client.batches.create(input_file_id=file.id, endpoint=url, completion_window="24h")
        hang = time.monotonic() + WAIT_S
        while (batch := client.batches.retrieve(batch.id)).status not in ("completed", "failed"):
            assert time.monotonic() < hang, batch
            time.sleep(0.1)
        assert batch.status == "completed", batch
        assert batch.output_file_id
        results = [json.loads(line) for line in client.files.content(batch.output_file_id).text.splitlines()]
        assert sorted(result["custom_id"] for result in results) == ["0", "1"]
        assert all(result["response"]["status_code"] == 200 for result in results)
        for id in (file.id, batch.output_file_id):
            assert client.files.delete(id).deleted


def errors(server: Server, client: OpenAI) -> None:
    """What is refused comes as the client's own classes."""
    long = [{"role": "user", "content": server.too_long()}]
    for what, wrong, kind, code in (
        ("another model", {"model": f"not-{server.model}"}, openai.NotFoundError, "model_not_found"),
        ("a prompt over the context", {"messages": long}, openai.BadRequestError, "context_length_exceeded"),
        ("no messages", {"messages": []}, openai.BadRequestError, "invalid_value"),
    ):
        with check(f"{what}: {kind.__name__}"):
            asked: Any = {"model": server.model, "messages": ASKED, "max_tokens": TOKENS, **wrong}
            assert refusal(kind, lambda asked=asked: client.chat.completions.create(**asked)) == code


def main(server: Server) -> None:
    """Everything; raises AssertionError."""
    client = OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    texts(server, client)
    structure(server, client)
    responses(server, client)
    batches(server, client)
    errors(server, client)


if __name__ == "__main__":
    main(Server.of_command_line(__doc__))
