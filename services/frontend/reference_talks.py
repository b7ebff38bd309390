"""Endpoints and fields of the Responses API and of Anthropic's Messages API, as `reference.py` has those of chats."""

from __future__ import annotations

from services.frontend.listing import COUNT, HUGE, MESSAGES, RESPONSES, Endpoint, Field, Json, Status
from services.frontend.responses.body import EFFORTS, INCLUDABLE, MAX_KEY, MAX_METADATA, MAX_VALUE
from services.frontend.schema import MAX_CACHE_SALT
from services.frontend.tools import MAX_TOOLS

BOTH = (RESPONSES, MESSAGES)
ASKED = (MESSAGES, COUNT)

TALK_ENDPOINTS = (
    Endpoint("POST", RESPONSES, "OpenAI's Responses API: whole, streamed, or in the background"),
    Endpoint(
        "GET", f"{RESPONSES}/{{id}}", "a kept response; `stream`, `starting_after`: the events of one in the background"
    ),
    Endpoint("DELETE", f"{RESPONSES}/{{id}}", "it is forgotten, and cancelled when it runs"),
    Endpoint("POST", f"{RESPONSES}/{{id}}/cancel", "one in the background; 400 for any other"),
    Endpoint("GET", f"{RESPONSES}/{{id}}/input_items", "the conversation before it; `limit`, `order`, `after`"),
    Endpoint("POST", MESSAGES, "Anthropic's Messages API, whole or streamed"),
    Endpoint("POST", COUNT, "how many tokens the prompt of such a body has"),
)
_BOOLEAN: Json = {"type": ["boolean", "null"]}
_STRING: Json = {"type": "string"}
_OBJECT: Json = {"type": ["object", "null"]}
_SALT: Json = {"type": ["string", "null"], "minLength": 1, "maxLength": MAX_CACHE_SALT}
_IDS: Json = {
    "anyOf": [{"type": "null"}, {"type": "array", "items": {"type": "integer", "minimum": 0}, "maxItems": 64}]
}
_STOPS: Json = {"type": "array", "items": {"type": "string", "minLength": 1, "maxLength": 64}, "maxItems": 16}


def _integer(low: int, high: int) -> Json:
    return {"type": ["integer", "null"], "minimum": low, "maximum": high}


def _number(low: float, high: float, **more: float) -> Json:
    return {"type": ["number", "null"], "minimum": low, "maximum": high, **more}


def _works(name: str, note: str, schema: Json, *where: str, required: bool = False) -> Field:
    return Field(name, "works", note, schema, where, required)


def _rest(status: Status, note: str, where: str | tuple[str, ...], *names: str) -> tuple[Field, ...]:
    places = (where,) if isinstance(where, str) else where
    return tuple(Field(name, status, note, None, places) for name in names)


def _object(properties: Json, *required: str) -> Json:
    return {"type": "object", "properties": properties, "required": list(required)}


def _either(*schemas: Json) -> Json:
    return {"anyOf": list(schemas)}


def _list(schema: Json) -> Json:
    return {"type": "array", "items": schema, "minItems": 1}


_INPUT_TEXT = _object({"type": {"const": "input_text"}, "text": _STRING}, "type", "text")
_ITEM = _object(
    {
        "type": {"const": "message"},
        "role": {"enum": ["user", "assistant", "system", "developer"]},
        "content": _either(_STRING, _list(_INPUT_TEXT)),
    },
    "role",
    "content",
)
_TEXT = _object({"type": {"const": "text"}, "text": _STRING}, "type", "text")
_TEXTS = _either(_STRING, _list(_TEXT))
_MESSAGE = _object({"role": {"enum": ["user", "assistant"]}, "content": _TEXTS}, "role", "content")
_CHOICE = _object({"type": {"enum": ["auto", "none"]}}, "type")

_SHARED = (
    _works("model", "the served name; another one is 404", _STRING, *BOTH, COUNT, required=True),
    _works("stream", "server-sent events, each with its name", _BOOLEAN, *BOTH),
    _works("top_p", "", _number(0, 1, exclusiveMinimum=0), *BOTH),
    _works("top_k", "0 or -1: all", _integer(-1, (1 << 31) - 1), *BOTH),
    _works("min_p", "", _number(0, 1), *BOTH),
    _works("seed", "", _integer(-HUGE - 1, HUGE), *BOTH),
    _works("presence_penalty", "", _number(-2, 2), *BOTH),
    _works("frequency_penalty", "", _number(-2, 2), *BOTH),
    _works("repetition_penalty", "", _number(0.01, 10), *BOTH),
    _works(
        "logit_bias",
        "",
        {"type": ["object", "null"], "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100}},
        *BOTH,
    ),
    _works("min_tokens", "", _integer(0, (1 << 31) - 1), *BOTH),
    _works("ignore_eos", "", _BOOLEAN, *BOTH),
    _works("stop_token_ids", "", _IDS, *BOTH),
    _works("chat_template_kwargs", "variables of the model's template", _OBJECT, *BOTH, COUNT),
    *_rest("refused", "use `cache_salt`", (*BOTH, COUNT), "extra_key"),
)
_RESPONSES = (
    _works(
        "input",
        "text, or items: `message` (text parts), `function_call`, `function_call_output`, `reasoning` (not shown to "
        "the model), `item_reference` (to an item of a kept response; 404 when there is none); may be left out after "
        "`previous_response_id`; images, audio, files and items of other kinds are refused by name",
        _either({"type": "string", "minLength": 1}, _list(_ITEM)),
        RESPONSES,
        required=True,
    ),
    _works(
        "instructions",
        "a system message before everything; not carried over to the next turn",
        {"type": ["string", "null"]},
        RESPONSES,
    ),
    _works(
        "previous_response_id",
        "a kept response that is `completed` or `incomplete`",
        {"type": ["string", "null"]},
        RESPONSES,
    ),
    _works("temperature", "0: greedy", _number(0, 2), RESPONSES),
    _works("max_output_tokens", "thoughts count", _integer(1, HUGE), RESPONSES),
    _works("stop", "", _either({"type": "null"}, _STOPS), RESPONSES),
    _works("include_stop_str_in_output", "", _BOOLEAN, RESPONSES),
    _works("skip_special_tokens", "", _BOOLEAN, RESPONSES),
    _works(
        "cache_salt",
        "as in a chat; a response that goes on with another one does not have its",
        _SALT,
        RESPONSES,
    ),
    _works(
        "tools",
        f"up to {MAX_TOOLS} of type `function`; tools that the server would run are refused by name",
        {"type": ["array", "null"], "items": {"type": "object"}, "maxItems": MAX_TOOLS},
        RESPONSES,
    ),
    _works(
        "tool_choice",
        "`none`, `auto`, `required`, a function, or `allowed_tools`",
        _either({"enum": [None, "none", "auto", "required"]}, {"type": "object"}),
        RESPONSES,
    ),
    _works("parallel_tool_calls", "false: one call where calls are enforced", _BOOLEAN, RESPONSES),
    _works(
        "max_tool_calls",
        "repeated in the answer: there are no tools of the server's own",
        _integer(1, (1 << 31) - 1),
        RESPONSES,
    ),
    _works(
        "text",
        "`format`: `text`, `json_object`, `json_schema`, enforced; `verbosity` has no effect",
        _OBJECT,
        RESPONSES,
    ),
    _works(
        "reasoning",
        f"`effort`: one of {', '.join(EFFORTS)}; `none` sets `enable_thinking` to false in the template, the others "
        "have no effect; there are no summaries",
        _either({"type": "null"}, _object({"effort": {"enum": [None, *EFFORTS]}})),
        RESPONSES,
    ),
    _works(
        "include",
        "`message.output_text.logprobs`; the others have nothing to add (thoughts are told as they are)",
        {"type": ["array", "null"], "items": {"enum": list(INCLUDABLE)}},
        RESPONSES,
    ),
    _works("top_logprobs", "more than 0 includes `message.output_text.logprobs`", _integer(0, 20), RESPONSES),
    _works(
        "metadata",
        f"up to {MAX_METADATA} pairs, keys of {MAX_KEY} and values of {MAX_VALUE} characters; repeated in the answer",
        {
            "type": ["object", "null"],
            "additionalProperties": {"type": "string", "maxLength": MAX_VALUE},
            "propertyNames": {"maxLength": MAX_KEY},
            "maxProperties": MAX_METADATA,
        },
        RESPONSES,
    ),
    _works("store", "false: the response is not kept", _BOOLEAN, RESPONSES),
    _works("background", "needs `store`; it goes on without the client", _BOOLEAN, RESPONSES),
    _works(
        "truncation",
        "`auto`: a conversation that is too long loses its oldest turns; `disabled`: it is refused",
        {"enum": [None, "auto", "disabled"]},
        RESPONSES,
    ),
    _works("user", "repeated in the answer", {"type": ["string", "null"]}, RESPONSES),
    *_rest("refused", "", RESPONSES, "prompt", "conversation", "context_management", "moderation"),
    *_rest("ignored", "", RESPONSES, "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"),
    *_rest("ignored", "no event is padded", RESPONSES, "stream_options"),
    *_rest("ignored", "", RESPONSES, "prompt_cache_options", "background_options"),
)
_MESSAGES = (
    _works("cache_salt", "as in a chat", _SALT, MESSAGES),
    _works(
        "messages",
        "roles user, assistant, system; text, or blocks: `text`, `tool_use`, `tool_result` (of text), `thinking` (not "
        "shown to the model); a last message of the assistant's is continued; images, documents and others are refused "
        "by name",
        _list(_MESSAGE),
        *ASKED,
        required=True,
    ),
    _works("max_tokens", "", {"type": "integer", "minimum": 1, "maximum": HUGE}, MESSAGES, required=True),
    _works("max_tokens", "", _integer(1, HUGE), COUNT),
    _works("system", "text or blocks of it", _either({"type": "null"}, _TEXTS), *ASKED),
    _works("temperature", "0: greedy", _number(0, 1), *ASKED),
    _works("stop_sequences", "up to 16, found over token edges; not shown", _either({"type": "null"}, _STOPS), *ASKED),
    _works(
        "tools",
        f"up to {MAX_TOOLS} with an `input_schema`; tools that the server would run are refused by name",
        {"type": ["array", "null"], "items": {"type": "object"}, "maxItems": MAX_TOOLS},
        *ASKED,
    ),
    _works(
        "tool_choice",
        "`auto`, `any`, `tool`, `none`; `disable_parallel_tool_use`: one call where calls are enforced",
        _either({"type": "null"}, _CHOICE),
        *ASKED,
    ),
    _works(
        "thinking",
        "`enabled` and `adaptive` set `enable_thinking` in the template, `disabled` and nothing unset it; "
        "`budget_tokens` is checked and not enforced; `display: omitted` leaves the text of thoughts out",
        _either({"type": "null"}, _object({"type": {"enum": ["disabled", "adaptive"]}}, "type")),
        *ASKED,
    ),
    _works("output_config", "`format` of `json_schema`, enforced; `effort` has no effect", _OBJECT, *ASKED),
    *_rest("refused", "", ASKED, "mcp_servers", "container", "context_management", "output_format"),
    *_rest(
        "ignored", "", ASKED, "metadata", "service_tier", "inference_geo", "speed", "diagnostics", "user_profile_id"
    ),
    *_rest("ignored", "prefixes are always cached", ASKED, "cache_control"),
)
TALK_FIELDS = (*_SHARED, *_RESPONSES, *_MESSAGES)


def talk_tables() -> list[str]:
    """The lines of their tables: of responses, of messages."""
    lines = []
    for title, path in (("`/v1/responses`", RESPONSES), ("`/v1/messages`", MESSAGES)):
        lines += ["", f"| field of {title} | | |", "|---|---|---|"]
        ours = [field for field in TALK_FIELDS if path in field.where]
        ours.sort(key=lambda field: ("works", "refused", "ignored").index(field.status))
        lines += [f"| `{field.name}` | {field.status} | {field.note} |" for field in ours]
    return lines
