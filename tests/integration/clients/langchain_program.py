"""LangChain against a running Baton, as its users write it: `python langchain_program.py URL MODEL`."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from typing import Any, Literal

import openai
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field

ASKED = [SystemMessage("Be brief."), HumanMessage("What is a lighthouse?")]


@tool
def weather(city: Literal["Paris", "Rome"], days: Literal[1, 2, 3]) -> str:
    """The weather in a city."""
    return f"{days} days of sun in {city}"


class Report(BaseModel):
    """A report."""

    city: Literal["Paris", "Rome"]
    warm: bool
    days: int = Field(ge=1, le=9)


def texts(model: Any) -> None:
    """In one piece, streamed and in a batch it is the same text, and it is counted."""
    whole = model.invoke(ASKED)
    assert isinstance(whole, AIMessage)
    assert whole.response_metadata["finish_reason"] in ("stop", "length")
    assert whole.usage_metadata is not None
    assert whole.usage_metadata["output_tokens"] == 16
    streamed = list(model.stream(ASKED))
    assert "".join(piece.text for piece in streamed) == whole.text
    told = sum((piece.usage_metadata or {}).get("output_tokens", 0) for piece in streamed)
    assert told == 16
    assert [one.text for one in model.batch([ASKED, ASKED, ASKED])] == [whole.text] * 3
    assert asyncio.run(model.ainvoke(ASKED)).text == whole.text
    scored = model.bind(logprobs=True, top_logprobs=2).invoke(ASKED)
    assert len(scored.response_metadata["logprobs"]["content"]) == 16


def tools(model: Any) -> None:
    """A call, in one piece and streamed, runs the tool; its answer goes back."""
    bound = model.bind_tools([weather], tool_choice="weather")
    whole = bound.invoke(ASKED)
    (call,) = whole.tool_calls
    assert call["name"] == "weather"
    result = weather.invoke(call)
    assert isinstance(result, ToolMessage)
    assert "days of sun in" in result.text
    chunks = list(bound.stream(ASKED))
    streamed = chunks[0]
    for chunk in chunks[1:]:
        streamed += chunk
    assert [(c["name"], c["args"]) for c in streamed.tool_calls] == [("weather", call["args"])]
    assert model.invoke([*ASKED, whole, result]).text
    assert model.bind_tools([weather], tool_choice="required").invoke(ASKED).tool_calls


def structure(model: Any) -> None:
    """Every way that LangChain has to ask for a schema."""
    for method in ("json_schema", "function_calling"):
        report = model.with_structured_output(Report, method=method).invoke(ASKED)
        assert isinstance(report, Report), report
    both = model.with_structured_output(Report, method="json_schema", include_raw=True).invoke(ASKED)
    assert both["parsing_error"] is None
    assert isinstance(both["parsed"], Report)


def errors(model: Any) -> None:
    """What is refused comes as the official client's exceptions, which LangChain hands on."""
    assert refusal(openai.NotFoundError, lambda: model.bind(model="another").invoke(ASKED)) == "model_not_found"
    assert refusal(openai.BadRequestError, lambda: model.invoke("word " * 2000)) == "context_length_exceeded"


def refusal(kind: type[openai.APIStatusError], ask: Callable[[], object]) -> str | None:
    """The code with which it is refused."""
    try:
        ask()
    except kind as error:
        return error.code
    raise AssertionError(f"no {kind.__name__}")


def main(url: str, name: str) -> None:
    """Everything; raises AssertionError."""
    options: Any = {"model": name, "base_url": f"{url}/v1", "api_key": "none", "max_retries": 0, "temperature": 0}
    model = ChatOpenAI(**options, max_tokens=16, stream_usage=True, extra_body={"ignore_eos": True})
    texts(model)
    errors(model)
    model = ChatOpenAI(**options, max_tokens=128)
    tools(model)
    structure(model)


if __name__ == "__main__":
    main(*sys.argv[1:])
