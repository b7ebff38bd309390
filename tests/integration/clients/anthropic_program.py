"""Anthropic's client against a running Baton, as its users write it: `python anthropic_program.py URL MODEL`."""

from __future__ import annotations

import asyncio
from typing import Any

import anthropic
from anthropic import Anthropic, AsyncAnthropic
from server import Server, check

CITIES, DAYS = ["Paris", "Rome"], [1, 2, 3]
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": CITIES}, "days": {"enum": DAYS}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [{"name": "weather", "description": "A city.", "input_schema": PARAMETERS}]
ASKED: list[Any] = [{"role": "user", "content": "What is a lighthouse?"}]
TOKENS = 16


def texts(server: Server, client: Anthropic, options: dict[str, Any]) -> None:
    """However it is asked for, a text has the tokens that it was to have, and they are counted."""
    plain: dict[str, Any] = {"model": server.model, "system": "Be brief.", "messages": ASKED, "max_tokens": TOKENS}
    plain |= {"extra_body": {"temperature": 0, "min_tokens": TOKENS}}
    with check("a message in one piece"):
        whole = client.messages.create(**plain)
        is_complete(whole)
    with check("a message streamed"), client.messages.stream(**plain) as stream:
        pieces = list(stream.text_stream)
        final = stream.get_final_message()
        is_complete(final)
        assert text_of(final) == "".join(pieces)
        assert server.same(text_of(whole), text_of(final))
    with check("a message asynchronously"):
        awaited = asyncio.run(AsyncAnthropic(**options).messages.create(**plain))
        is_complete(awaited)
        assert server.same(text_of(whole), text_of(awaited))
    with check("its tokens are counted"):
        counted = client.messages.count_tokens(model=server.model, system="Be brief.", messages=ASKED).input_tokens
        assert counted == whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0)


def text_of(message: Any) -> str:
    """All text in it."""
    return "".join(block.text for block in message.content if block.type == "text")


def is_complete(message: Any) -> None:
    """It ran to the end of its budget, and says so."""
    assert message.stop_reason == "max_tokens"
    assert message.usage.output_tokens == TOKENS


def tools(server: Server, client: Anthropic) -> None:
    """A call, in one piece and streamed; its result goes back."""
    asked: dict[str, Any] = {"model": server.model, "messages": ASKED, "tools": TOOLS, "max_tokens": 128}
    asked |= {"extra_body": {"temperature": 0}}
    named = {**asked, "tool_choice": {"type": "tool", "name": "weather"}}
    with check("a named tool is called"):
        whole = client.messages.create(**named)
        call = call_of(whole)
    with check("the same, streamed"), client.messages.stream(**named) as stream:
        assert server.same(call.input, call_of(stream.get_final_message()).input)
    with check("the tool's result goes back"):
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "sun"}
        turns = [*ASKED, {"role": "assistant", "content": whole.content}, {"role": "user", "content": [result]}]
        more = {"messages": turns, "tool_choice": {"type": "none"}, "max_tokens": TOKENS}
        assert client.messages.create(**{**asked, **more}).stop_reason in ("end_turn", "max_tokens")
    with check("some tool is called because it must be"):
        must = {"type": "any", "disable_parallel_tool_use": True}
        required = client.messages.create(**asked, tool_choice=must)
        assert required.stop_reason == "tool_use"
        call_of(required)


def call_of(message: Any) -> Any:
    """The one call in it, with arguments as PARAMETERS describes them."""
    (call,) = [block for block in message.content if block.type == "tool_use"]
    assert call.name == "weather"
    assert call.input.keys() == {"city", "days"}
    assert call.input["city"] in CITIES
    assert call.input["days"] in DAYS
    return call


def errors(server: Server, client: Anthropic) -> None:
    """What is refused comes as the client's own classes."""
    long = [{"role": "user", "content": server.too_long()}]
    for what, wrong, kind in (
        ("a prompt over the context", {"messages": long}, anthropic.BadRequestError),
        ("no messages", {"messages": []}, anthropic.BadRequestError),
        ("another model", {"model": f"not-{server.model}"}, anthropic.NotFoundError),
    ):
        with check(f"{what}: {kind.__name__}"):
            asked: Any = {"model": server.model, "messages": ASKED, "max_tokens": TOKENS, **wrong}
            try:
                client.messages.create(**asked)
            except kind:
                continue
            raise AssertionError(f"no {kind.__name__}")


def main(server: Server) -> None:
    """Everything; raises AssertionError."""
    options: dict[str, Any] = {"base_url": server.url, "api_key": "none", "max_retries": 0}
    client = Anthropic(**options)
    texts(server, client, options)
    tools(server, client)
    errors(server, client)


if __name__ == "__main__":
    main(Server.of_command_line(__doc__))
