"""Tools where the chat template knows nothing of them: told in a system message, calls and results as text.

Models of that kind have seen Hermes' wording most, if any: results stand in a user's message between `<tool_response>`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from services.frontend.parsers.events import ToolParser
from services.frontend.tools import Tools

Message = Mapping[str, Any]


def plain(messages: Sequence[Message], tools: Tools | None, parser: type[ToolParser]) -> list[dict[str, Any]]:
    """The same conversation in system, user and assistant messages of text alone."""
    out: list[dict[str, Any]] = []
    for message in messages:
        role, content = message["role"], message.get("content") or ""
        if role in ("tool", "function"):
            told = f"<tool_response>\n{content}\n</tool_response>"
            if out and out[-1].get("results"):
                out[-1]["content"] += f"\n{told}"
            else:
                out.append({"role": "user", "content": told, "results": True})
        elif calls := message.get("tool_calls"):
            written = parser.write(
                [{"name": c["function"]["name"], "arguments": c["function"]["arguments"]} for c in calls]
            )
            out.append({"role": role, "content": f"{content}\n{written}" if content else written})
        else:
            out.append(dict(message))
    for message_out in out:
        message_out.pop("results", None)
    if tools is not None and tools.callable:
        _instruct(out, instructions(tools, parser))
    return out


def instructions(tools: Tools, parser: type[ToolParser]) -> str:
    """What the model is told of its tools."""
    listed = "\n".join(json.dumps(function.raw["function"], ensure_ascii=False) for function in tools.callable)
    example = parser.write([{"name": "NAME", "arguments": {}}])
    return (
        "You can call functions. Each line between <tools> and </tools> is a function with the JSON schema of its "
        f"parameters:\n<tools>\n{listed}\n</tools>\n"
        f"To call one, answer with its name and its arguments, in this form:\n{example}"
    )


def _instruct(messages: list[dict[str, Any]], text: str) -> None:
    if messages and messages[0]["role"] == "system":
        messages[0]["content"] = f"{messages[0]['content']}\n\n{text}"
    else:
        messages.insert(0, {"role": "system", "content": text})
