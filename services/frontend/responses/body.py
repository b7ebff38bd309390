"""The body of `POST /v1/responses`, made into a chat. Each refusal names the field as it stands in the body."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from baton.engine.port import Grammar, GrammarKind
from services.frontend.errors import invalid
from services.frontend.fields import Fields
from services.frontend.responses.items import messages_of, read_input
from services.frontend.responses.refer import Earlier, check_once, read_earlier, references
from services.frontend.responses.tools import read_response_tools, told_tools
from services.frontend.schema import USE_SALT, ChatBody, Options, model_of, read_options
from services.frontend.structure import ANY_OBJECT, NAME, Structure

SAMPLING = (
    "stream", "temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "logit_bias", "min_tokens", "ignore_eos", "stop", "stop_token_ids",
    "include_stop_str_in_output", "skip_special_tokens", "cache_salt",
)  # fmt: skip
"""Fields that are what they are in a chat; OpenAI itself has the first three."""
LOGPROBS = "message.output_text.logprobs"
INCLUDABLE = (
    LOGPROBS, "reasoning.encrypted_content", "file_search_call.results", "web_search_call.results",
    "web_search_call.action.sources", "message.input_image.image_url", "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
)  # fmt: skip
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
MAX_METADATA, MAX_KEY, MAX_VALUE = 16, 64, 512
_NEVER = ("prompt", "conversation", "context_management", "moderation")


class Told(msgspec.Struct):
    """What the answer repeats of the body, and what is kept with it."""

    head: dict[str, Any]
    items: list[dict[str, Any]]
    """The input, as items."""
    store: bool
    background: bool
    logprobs: bool


_encode = msgspec.json.Encoder().encode
read_told = msgspec.json.Decoder(Told).decode


@dataclass(frozen=True)
class ResponseBody:
    """A checked body. `told` is a Told as JSON; `truncate`: a conversation that is too long loses its oldest turns."""

    chat: ChatBody
    told: bytes
    truncate: bool


@dataclass(frozen=True)
class GoesOn:
    """A body that cannot be read without the conversation of the response `previous` (empty: none), and the items that
    `refers` names (ids, as a JSON list)."""

    options: Options
    previous: str
    refers: bytes


def read_response(raw: Mapping[str, Any], vocab_size: int, earlier: bytes | None) -> ResponseBody | GoesOn:
    """Check a body. `earlier`: an Earlier as JSON.

    Raises BatonError(INVALID_REQUEST) with the field at fault.
    """
    fields = Fields(raw, vocab_size)
    for name in _NEVER:
        fields.refuse(name)
    fields.refuse("extra_key", why=USE_SALT)
    wanted, top = _logprobs(fields)
    options = _options(fields, top if wanted else None)
    previous = _string(raw, "previous_response_id")
    given = raw.get("input")
    refers = references(given)
    if earlier is None and (previous or refers):
        return GoesOn(options, previous, _encode(refers))
    instructions = _string(raw, "instructions")
    known = Earlier() if earlier is None else read_earlier(earlier)
    items = [] if given is None and previous else read_input(given, known.items)
    check_once(given, known.before, items)
    messages = messages_of(known.before, items)
    if instructions:
        messages.insert(0, {"role": "system", "content": instructions})
    parallel = fields.boolean("parallel_tool_calls", default=True)
    store, background = fields.boolean("store", default=True), fields.boolean("background")
    if background and not store:
        raise invalid("'background' needs 'store': nobody could fetch the answer.", "background")
    text, structure = _text(fields)
    effort, reasoning = _reasoning(fields)
    variables = fields.object("chat_template_kwargs")
    if effort == "none":
        variables = {"enable_thinking": False, **variables}
    truncation = raw.get("truncation")
    if truncation not in (None, "auto", "disabled"):
        raise invalid("'truncation' must be auto or disabled.", "truncation")
    chat = ChatBody(
        dataclasses.replace(options, structure=structure),
        tuple(messages),
        variables,
        tools=read_response_tools(raw, parallel),
    )
    head = {
        "background": background,
        "instructions": instructions or None,
        "max_output_tokens": options.max_tokens,
        "max_tool_calls": fields.integer("max_tool_calls", 1, (1 << 31) - 1),
        "metadata": _metadata(fields),
        "parallel_tool_calls": parallel,
        "previous_response_id": previous or None,
        "reasoning": reasoning,
        "service_tier": "default",
        "store": store,
        "temperature": options.temperature,
        "text": text,
        "tool_choice": raw.get("tool_choice") or "auto",
        "tools": told_tools(raw),
        "top_logprobs": top,
        "top_p": options.top_p,
        "truncation": truncation or "disabled",
        "user": _string(raw, "user") or None,
    }
    return ResponseBody(chat, _encode(Told(head, items, store, background, wanted)), truncation == "auto")


def _options(fields: Fields, logprobs: int | None) -> Options:
    given = {name: fields.raw.get(name) for name in SAMPLING}
    options = read_options(
        Fields({"model": model_of(fields.raw), **given}, fields.vocab_size), logprobs=logprobs, least_tokens=1
    )
    budget = fields.integer("max_output_tokens", 1, (1 << 63) - 1)
    return dataclasses.replace(
        options, max_tokens=budget, budget="max_output_tokens", given="input", include_usage=True
    )


def _logprobs(fields: Fields) -> tuple[bool, int]:
    """Whether log probabilities are wanted, and of how many likely tokens beside each one."""
    include = fields.raw.get("include")
    if include is not None and not isinstance(include, list):
        raise invalid("'include' must be a list.", "include")
    for i, name in enumerate(include or ()):
        if name not in INCLUDABLE:
            raise invalid(f"'include[{i}]' must be one of {', '.join(INCLUDABLE)}.", f"include[{i}]")
    top = fields.integer("top_logprobs", 0, 20) or 0
    return LOGPROBS in (include or ()) or top > 0, top


def _text(fields: Fields) -> tuple[dict[str, Any], Structure | None]:
    """`text` as the answer repeats it, and what its format asks for."""
    text = fields.object("text")
    form = text.get("format")
    if form is None:
        return {"format": {"type": "text"}, **{k: v for k, v in text.items() if k == "verbosity"}}, None
    where = "text.format"
    if not isinstance(form, dict):
        raise invalid(f"'{where}' must be an object.", where)
    kind = form.get("type")
    if kind == "text":
        return dict(text), None
    if kind == "json_object":
        return dict(text), Structure(ANY_OBJECT, where)
    if kind != "json_schema":
        raise invalid(f"'{where}.type' must be text, json_object or json_schema.", f"{where}.type")
    name, schema, strict = form.get("name"), form.get("schema"), form.get("strict")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise invalid(f"'{where}.name' must be up to 64 letters, digits, dashes and underscores.", f"{where}.name")
    if strict is not None and not isinstance(strict, bool):
        raise invalid(f"'{where}.strict' must be true or false.", f"{where}.strict")
    if not isinstance(schema, dict):
        raise invalid(f"'{where}.schema' must be an object.", f"{where}.schema")
    return dict(text), Structure(Grammar(GrammarKind.JSON, json.dumps(schema)), f"{where}.schema")


def _reasoning(fields: Fields) -> tuple[str | None, dict[str, Any]]:
    """How hard to think, and `reasoning` as the answer repeats it."""
    reasoning = fields.object("reasoning")
    effort = reasoning.get("effort")
    if effort is not None and effort not in EFFORTS:
        raise invalid(f"'reasoning.effort' must be one of {', '.join(EFFORTS)}.", "reasoning.effort")
    return effort, {"effort": effort, "summary": None}


def _metadata(fields: Fields) -> dict[str, str]:
    metadata = fields.object("metadata")
    if len(metadata) > MAX_METADATA:
        raise invalid(f"'metadata' takes up to {MAX_METADATA} pairs.", "metadata")
    for key, value in metadata.items():
        if not isinstance(value, str) or len(key) > MAX_KEY or len(value) > MAX_VALUE:
            text = f"'metadata' takes keys of up to {MAX_KEY} and strings of up to {MAX_VALUE} characters."
            raise invalid(text, "metadata")
    return dict(metadata)


def _string(raw: Mapping[str, Any], name: str) -> str:
    value = raw.get(name)
    if value is not None and not isinstance(value, str):
        raise invalid(f"'{name}' must be a string.", name)
    return value or ""
