"""The body of `POST /v1/messages`, made into a chat. Each refusal names the field as it stands in the body."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from baton.engine.port import Grammar, GrammarKind
from baton.errors import BatonError
from services.frontend.anthropic.messages import read_chat, read_system
from services.frontend.anthropic.tools import read_message_tools
from services.frontend.errors import invalid
from services.frontend.fields import Fields
from services.frontend.schema import USE_SALT, ChatBody, Options, model_of, read_options
from services.frontend.structure import Structure

SAMPLING = (
    "stream", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "logit_bias", "min_tokens", "ignore_eos", "stop_token_ids", "cache_salt",
)  # fmt: skip
"""Fields that are what they are in a chat; Anthropic itself has the first three."""
LEAST_THOUGHT = 1024
_NEVER = ("mcp_servers", "container", "context_management", "output_format")
_HUGE = (1 << 63) - 1


class Told(msgspec.Struct):
    """What the answer's format has to know. `omit`: a thought is told without its text."""

    omit: bool = False


@dataclass(frozen=True)
class MessageBody:
    """A checked body; `told` is a Told as JSON."""

    chat: ChatBody
    told: bytes


_encode = msgspec.json.Encoder().encode
read_told = msgspec.json.Decoder(Told).decode


def read_message(raw: Mapping[str, Any], vocab_size: int, *, count: bool = False) -> MessageBody:
    """Check a body; `count`: its tokens are counted, so it need not say how many may be answered.

    Raises BatonError(INVALID_REQUEST) with the field at fault.
    """
    fields = Fields(raw, vocab_size)
    for name in _NEVER:
        fields.refuse(name)
    fields.refuse("extra_key", why=USE_SALT)
    options = _options(fields, count)
    messages = read_chat(raw.get("messages"))
    continued = messages[-1]["role"] == "assistant" and not messages[-1].get("tool_calls")
    if system := read_system(raw.get("system")):
        messages.insert(0, {"role": "system", "content": system})
    thinks, omit = _thinking(fields, options)
    chat = ChatBody(
        dataclasses.replace(options, structure=_structure(fields)),
        tuple(messages),
        {"enable_thinking": thinks, **fields.object("chat_template_kwargs")},
        generation_prompt=not continued,
        continue_final=continued,
        tools=read_message_tools(raw),
        asked_to_continue=False,
    )
    return MessageBody(chat, _encode(Told(omit)))


def _options(fields: Fields, count: bool) -> Options:
    raw = fields.raw
    budget = fields.integer("max_tokens", 1, _HUGE)
    if budget is None and not count:
        raise invalid("'max_tokens' is missing.", "max_tokens")
    given = {name: raw.get(name) for name in SAMPLING}
    given |= {"model": model_of(raw), "max_tokens": budget, "temperature": fields.number("temperature", 0, 1)}
    stops = raw.get("stop_sequences")
    if stops is not None and not isinstance(stops, list):
        raise invalid("'stop_sequences' must be a list of strings.", "stop_sequences")
    try:
        options = read_options(Fields(given | {"stop": stops}, fields.vocab_size), logprobs=None, least_tokens=1)
    except BatonError as error:
        if error.param != "stop":
            raise
        raise invalid(error.message.replace("'stop'", "'stop_sequences'"), "stop_sequences") from None
    return dataclasses.replace(options, include_usage=True)


def _thinking(fields: Fields, options: Options) -> tuple[bool, bool]:
    """Whether the model is told that it may think, and whether its thoughts are kept back. Without a word it is not."""
    thinking = fields.object("thinking")
    kind, display = thinking.get("type", "disabled"), thinking.get("display")
    if kind not in ("enabled", "disabled", "adaptive"):
        raise invalid("'thinking.type' must be enabled, disabled or adaptive.", "thinking.type")
    if display not in (None, "summarized", "omitted"):
        raise invalid("'thinking.display' must be summarized or omitted.", "thinking.display")
    if kind == "enabled":
        name = "thinking.budget_tokens"
        budget = thinking.get("budget_tokens")
        if isinstance(budget, bool) or not isinstance(budget, int) or budget < LEAST_THOUGHT:
            raise invalid(f"'{name}' must be an integer of at least {LEAST_THOUGHT}.", name)
        if options.max_tokens is not None and budget >= options.max_tokens:
            raise invalid(f"'{name}' must be less than 'max_tokens'.", name)
    return kind != "disabled", display == "omitted"


def _structure(fields: Fields) -> Structure | None:
    form = fields.object("output_config").get("format")
    if form is None:
        return None
    where = "output_config.format"
    if not isinstance(form, dict) or form.get("type") != "json_schema":
        raise invalid(f"'{where}.type' must be json_schema.", f"{where}.type")
    if not isinstance(form.get("schema"), dict):
        raise invalid(f"'{where}.schema' must be an object.", f"{where}.schema")
    return Structure(Grammar(GrammarKind.JSON, json.dumps(form["schema"])), f"{where}.schema")
