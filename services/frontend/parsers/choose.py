"""Which parsers a model needs, by what its chat template writes."""

from __future__ import annotations

from services.frontend.parsers.events import ToolParser
from services.frontend.parsers.hermes import HermesParser
from services.frontend.parsers.llama3 import Llama3Parser
from services.frontend.parsers.mistral import MistralParser
from services.frontend.parsers.plain import PlainParser
from services.frontend.parsers.reasoning import Marks

TOOLS: dict[str, type[ToolParser]] = {
    "hermes": HermesParser,
    "llama3": Llama3Parser,
    "mistral": MistralParser,
    "json": PlainParser,
}
REASONING: dict[str, Marks] = {
    "think": Marks("<think>", "</think>"),
    "mistral": Marks("[THINK]", "[/THINK]"),
}
NONE = "none"


def tool_parser(wish: str, template: str) -> str:
    """A name of TOOLS: `wish`, or with "auto" that of the template; Hermes' when it does not say, the one that most
    models know."""
    if wish != "auto":
        return wish
    if MistralParser.opening in template:
        return "mistral"
    if "<|python_tag|>" in template or ("<|start_header_id|>" in template and '"parameters"' in template):
        return "llama3"
    return "hermes"


def reasoning_parser(wish: str, template: str) -> str:
    """A name of REASONING, or "" for none: `wish`, or with "auto" that of the template."""
    if wish != "auto":
        return "" if wish == NONE else wish
    return next((name for name, marks in REASONING.items() if marks.closing in template), "")
