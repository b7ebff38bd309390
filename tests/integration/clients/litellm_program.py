"""LiteLLM against a running Baton, as its users write it: `python litellm_program.py URL MODEL`."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import litellm
from server import Server, check

ASKED = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is a lighthouse?"}]
CITIES, DAYS = ["Paris", "Rome"], [1, 2, 3]
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"enum": CITIES}, "days": {"enum": DAYS}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "A city.", "parameters": PARAMETERS}}]
SCHEMA = {"type": "json_schema", "json_schema": {"name": "report", "strict": True, "schema": PARAMETERS}}
TOKENS = 16


def texts(server: Server, asked: dict[str, Any]) -> None:
    """However it is asked for, a text has the tokens that it was to have, and they are counted."""
    plain = {**asked, "messages": ASKED, "max_tokens": TOKENS, "min_tokens": TOKENS}
    with check("a text in one piece"):
        whole = litellm.completion(**plain)
        text = whole.choices[0].message.content
        is_complete(whole)
    with check("a text streamed, and LiteLLM's own sum of the chunks"):
        chunks = list(litellm.completion(stream=True, stream_options={"include_usage": True}, **plain))
        streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        rebuilt = litellm.stream_chunk_builder(chunks, messages=ASKED)
        assert rebuilt.choices[0].message.content == streamed
        assert server.same(text, streamed)
        assert chunks[-1].usage.completion_tokens == TOKENS
        is_complete(rebuilt)
    with check("three texts at once, asynchronously"):
        several = asyncio.run(at_once(plain))
        assert server.same(text, *(one.choices[0].message.content for one in several))
        for one in several:
            is_complete(one)
    with check("two choices of one request"):
        drawn = litellm.completion(n=2, **plain)
        assert [choice.index for choice in drawn.choices] == [0, 1]
        assert server.same(text, *(choice.message.content for choice in drawn.choices))
        assert drawn.usage.completion_tokens == 2 * TOKENS


async def at_once(plain: dict[str, Any]) -> list[Any]:
    """Three of the same."""
    return await asyncio.gather(*(litellm.acompletion(**plain) for _ in range(3)))


def is_complete(answer: Any) -> None:
    """It ran to the end of its budget, and says so."""
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == TOKENS


def tools(server: Server, asked: dict[str, Any]) -> None:
    """A named call, in one piece and streamed; one that must be; a schema."""
    plain = {**asked, "messages": ASKED, "max_tokens": 128}
    named = {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "weather"}}}
    with check("a named tool is called"):
        whole = call(litellm.completion(**named, **plain))
    with check("the same, streamed"):
        streamed = call(litellm.stream_chunk_builder(list(litellm.completion(stream=True, **named, **plain))))
        assert server.same(whole, streamed)
    with check("some tool is called because it must be"):
        required = litellm.completion(tools=TOOLS, tool_choice="required", parallel_tool_calls=False, **plain)
        assert required.choices[0].finish_reason == "tool_calls"
        call(required)
    with check("a schema"):
        as_asked(litellm.completion(response_format=SCHEMA, **plain).choices[0].message.content)


def call(answer: Any) -> dict[str, Any]:
    """The arguments of the one call in it."""
    (one,) = answer.choices[0].message.tool_calls
    assert one.function.name == "weather"
    return as_asked(one.function.arguments)


def as_asked(text: str) -> dict[str, Any]:
    """JSON as PARAMETERS describes it."""
    found: dict[str, Any] = json.loads(text)
    assert found.keys() == {"city", "days"}
    assert found["city"] in CITIES
    assert found["days"] in DAYS
    return found


def errors(server: Server, asked: dict[str, Any]) -> None:
    """Its own exceptions, made of our status and words."""
    long = [{"role": "user", "content": server.too_long()}]
    for what, wrong, kind in (
        ("a prompt over the context", {"messages": long}, litellm.ContextWindowExceededError),
        ("no messages", {"messages": []}, litellm.BadRequestError),
        ("another model", {"model": f"openai/not-{server.model}"}, litellm.NotFoundError),
    ):
        with check(f"{what}: {kind.__name__}"):
            try:
                litellm.completion(**{**asked, "messages": ASKED, "max_tokens": TOKENS, **wrong})
            except kind:
                continue
            raise AssertionError(f"no {kind.__name__}")


def main(server: Server) -> None:
    """Everything, by both names that LiteLLM has for such a server; raises AssertionError."""
    litellm.suppress_debug_info = True  # it prints where to get help beside each refusal that we want
    reached = {"api_base": f"{server.url}/v1", "api_key": "none", "num_retries": 0}
    for provider in ("openai", "hosted_vllm"):
        print(f"as {provider}", flush=True)
        asked = {**reached, "model": f"{provider}/{server.model}", "temperature": 0}
        texts(server, asked)
        tools(server, asked)
    errors(server, {**asked, "model": f"openai/{server.model}"})
    with check("a completion"):
        name = f"text-completion-openai/{server.model}"
        told = litellm.text_completion(model=name, prompt="Once", max_tokens=4, min_tokens=4, **reached)
        assert isinstance(told.choices[0].text, str)
        assert told.usage.completion_tokens == 4


if __name__ == "__main__":
    main(Server.of_command_line(__doc__))
