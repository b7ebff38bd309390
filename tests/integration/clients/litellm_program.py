"""LiteLLM against a running Baton, as its users write it: `python litellm_program.py URL MODEL`."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import litellm

ASKED = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is a lighthouse?"}]
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"enum": [1, 2, 3]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "A city.", "parameters": PARAMETERS}}]
SCHEMA = {"type": "json_schema", "json_schema": {"name": "report", "strict": True, "schema": PARAMETERS}}


def texts(asked: dict[str, Any]) -> None:
    """In one piece, streamed and asynchronously it is the same text, and it is counted."""
    plain = {**asked, "max_tokens": 16, "ignore_eos": True}
    whole = litellm.completion(messages=ASKED, **plain)
    text = whole.choices[0].message.content
    assert whole.choices[0].finish_reason in ("stop", "length")
    assert whole.usage.completion_tokens == 16
    chunks = list(litellm.completion(messages=ASKED, stream=True, stream_options={"include_usage": True}, **plain))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text
    assert chunks[-1].usage.completion_tokens == 16
    rebuilt = litellm.stream_chunk_builder(chunks, messages=ASKED)
    assert rebuilt.choices[0].message.content == text

    async def several() -> list[Any]:
        return await asyncio.gather(*(litellm.acompletion(messages=ASKED, **plain) for _ in range(3)))

    assert [one.choices[0].message.content for one in asyncio.run(several())] == [text] * 3
    drawn = litellm.completion(messages=ASKED, n=2, **plain)
    assert [choice.index for choice in drawn.choices] == [0, 1]


def tools(asked: dict[str, Any]) -> None:
    """A named call, in one piece and streamed; a schema."""
    plain = {**asked, "max_tokens": 128}
    named = {"type": "function", "function": {"name": "weather"}}
    (call,) = litellm.completion(messages=ASKED, tools=TOOLS, tool_choice=named, **plain).choices[0].message.tool_calls
    assert call.function.name == "weather"
    arguments = json.loads(call.function.arguments)
    assert arguments.keys() == {"city", "days"}
    chunks = list(litellm.completion(messages=ASKED, tools=TOOLS, tool_choice=named, stream=True, **plain))
    (again,) = litellm.stream_chunk_builder(chunks).choices[0].message.tool_calls
    assert (again.function.name, json.loads(again.function.arguments)) == ("weather", arguments)
    one = {"tool_choice": "required", "parallel_tool_calls": False}
    required = litellm.completion(messages=ASKED, tools=TOOLS, **one, **plain)
    assert required.choices[0].finish_reason == "tool_calls"
    answer = litellm.completion(messages=ASKED, response_format=SCHEMA, **plain).choices[0].message.content
    assert json.loads(answer).keys() == {"city", "days"}


def errors(asked: dict[str, Any]) -> None:
    """Its own exceptions, made of our status and words."""
    for wrong, kind in (
        ({"messages": [{"role": "user", "content": "word " * 2000}]}, litellm.ContextWindowExceededError),
        ({"messages": []}, litellm.BadRequestError),
        ({"messages": ASKED, "model": "openai/another"}, litellm.NotFoundError),
    ):
        try:
            litellm.completion(**{**asked, **wrong})
        except kind:
            continue
        raise AssertionError(f"no {kind.__name__}")


def main(url: str, name: str) -> None:
    """Everything, by both names that LiteLLM has for such a server; raises AssertionError."""
    for provider in ("openai", "hosted_vllm"):
        asked = {"model": f"{provider}/{name}", "api_base": f"{url}/v1", "api_key": "none", "temperature": 0}
        asked["num_retries"] = 0
        texts(asked)
        tools(asked)
    errors({**asked, "model": f"openai/{name}"})
    told = litellm.text_completion(
        model=f"text-completion-openai/{name}", prompt="Once", api_base=f"{url}/v1", api_key="none", max_tokens=4
    )
    assert told.choices[0].text is not None


if __name__ == "__main__":
    main(*sys.argv[1:])
