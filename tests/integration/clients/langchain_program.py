"""LangChain against a running Baton, as its users write it: `python langchain_program.py URL MODEL`."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import openai
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field
from server import Server, check, refusal

ASKED = [SystemMessage("Be brief."), HumanMessage("What is a lighthouse?")]
TOKENS = 16


@tool
def weather(city: Literal["Paris", "Rome"], days: Literal[1, 2, 3]) -> str:
    """The weather in a city."""
    return f"{days} days of sun in {city}"


class Report(BaseModel):
    """A report."""

    city: Literal["Paris", "Rome"]
    warm: bool
    days: int = Field(ge=1, le=9)


def texts(server: Server, model: Any) -> None:
    """However it is asked for, a text has the tokens that it was to have, and they are counted."""
    with check("a text in one piece"):
        whole = model.invoke(ASKED)
        assert isinstance(whole, AIMessage)
        is_complete(whole)
    with check("a text streamed"):
        chunks = list(model.stream(ASKED))
        assert server.same(whole.text, "".join(chunk.text for chunk in chunks))
        is_complete(added(chunks))
    with check("a batch of three"):
        batch = model.batch([ASKED, ASKED, ASKED])
        assert server.same(whole.text, *(one.text for one in batch))
        assert len(batch) == 3
        for one in batch:
            is_complete(one)
    with check("a text asynchronously"):
        awaited = asyncio.run(model.ainvoke(ASKED))
        assert server.same(whole.text, awaited.text)
        is_complete(awaited)
    with check("log probabilities of each token"):
        scored = model.bind(logprobs=True, top_logprobs=2).invoke(ASKED).response_metadata["logprobs"]["content"]
        assert len(scored) == TOKENS
        assert all(len(token["top_logprobs"]) == 2 for token in scored)


def is_complete(message: Any) -> None:
    """It ran to the end of its budget, and says so."""
    assert message.response_metadata["finish_reason"] == "length"
    assert message.usage_metadata["output_tokens"] == TOKENS


def added(chunks: list[Any]) -> Any:
    """The message that a stream makes, by LangChain's own addition."""
    message = chunks[0]
    for chunk in chunks[1:]:
        message += chunk
    return message


def tools(server: Server, model: Any) -> None:
    """A call, in one piece and streamed, runs the tool; its answer goes back."""
    bound = model.bind_tools([weather], tool_choice="weather")
    with check("a named tool is called, and runs"):
        whole = bound.invoke(ASKED)
        result = ran(whole)
    with check("the same, streamed"):
        streamed = added(list(bound.stream(ASKED)))
        ran(streamed)
        assert server.same(whole.tool_calls[0]["args"], streamed.tool_calls[0]["args"])
    with check("the tool's result goes back"):
        short = model.bind(max_tokens=TOKENS)
        plain, answer = short.invoke(ASKED), short.invoke([*ASKED, whole, result])
        assert answer.response_metadata["finish_reason"] in ("stop", "length")
        assert answer.usage_metadata["input_tokens"] > plain.usage_metadata["input_tokens"]
    with check("some tool is called because it must be"):
        one = {"tool_choice": "required", "parallel_tool_calls": False}
        ran(model.bind_tools([weather], **one).invoke(ASKED))


def ran(message: Any) -> ToolMessage:
    """The result of the one call in it."""
    (call,) = message.tool_calls
    assert call["name"] == "weather"
    result = weather.invoke(call)
    assert isinstance(result, ToolMessage)
    assert "days of sun in" in result.text
    return result


def structure(model: Any) -> None:
    """Every way that LangChain has to ask for a schema."""
    for method in ("json_schema", "function_calling"):
        with check(f"a schema by {method}"):
            report = model.with_structured_output(Report, method=method).invoke(ASKED)
            assert isinstance(report, Report), report
    with check("a schema, and what was said"):
        both = model.with_structured_output(Report, method="json_schema", include_raw=True).invoke(ASKED)
        assert both["parsing_error"] is None
        assert isinstance(both["parsed"], Report)


def errors(server: Server, model: Any) -> None:
    """What is refused comes as the official client's exceptions, which LangChain hands on."""
    with check("another model is refused"):
        code = refusal(openai.NotFoundError, lambda: model.bind(model=f"not-{server.model}").invoke(ASKED))
        assert code == "model_not_found"
    with check("a prompt over the context is refused"):
        assert refusal(openai.BadRequestError, lambda: model.invoke(server.too_long())) == "context_length_exceeded"


def main(server: Server) -> None:
    """Everything; raises AssertionError."""
    options: Any = {"model": server.model, "base_url": f"{server.url}/v1", "api_key": "none", "max_retries": 0}
    options |= {"temperature": 0}
    model = ChatOpenAI(**options, max_tokens=TOKENS, stream_usage=True, extra_body={"min_tokens": TOKENS})
    texts(server, model)
    errors(server, model)
    model = ChatOpenAI(**options, max_tokens=128)
    tools(server, model)
    structure(model)


if __name__ == "__main__":
    main(Server.of_command_line(__doc__))
