"""Every endpoint and every field of the API, once: whether it works, is ignored, or is refused.

`docs/api.md` and the OpenAPI description are made of it; a test holds it against what `schema.py` reads.
"""

from __future__ import annotations

from typing import Any

from services.frontend.batches.answer import ENDPOINTS as BATCH_ENDPOINTS
from services.frontend.batches.expiry import LEAST_S, MOST_S
from services.frontend.listing import BATCHES, BOTH, CHAT, COMPLETIONS, FILES, HUGE, Endpoint, Field, Json, Status
from services.frontend.reference_native import NATIVE_ENDPOINTS, NATIVE_FIELDS, native_tables
from services.frontend.reference_talks import TALK_ENDPOINTS, TALK_FIELDS, talk_tables
from services.frontend.schema import MAX_CACHE_SALT, MAX_CHOICES, MAX_STOP_CHARS, MAX_STOP_IDS, MAX_STOPS
from services.frontend.tools import MAX_TOOLS

ENDPOINTS = (
    Endpoint("POST", CHAT, "chat, whole or streamed"),
    Endpoint("POST", COMPLETIONS, "text and token-id prompts, whole or streamed"),
    *TALK_ENDPOINTS,
    Endpoint("GET", "/v1/models", "the served model"),
    Endpoint("GET", "/v1/models/{model}", "the same, by name; 404 for any other"),
    Endpoint("POST", "/v1/baton/explain", "a chat or completions body: where it would run and why; nothing is started"),
    Endpoint("POST", FILES, "upload a batch's input, as `multipart/form-data`"),
    Endpoint("GET", FILES, "the files: `purpose`, `order`, `limit`, `after`"),
    Endpoint("GET", "/v1/files/{id}", "one file: size, name, purpose, and of ours `baton.sha256`, `baton.lines`"),
    Endpoint("DELETE", "/v1/files/{id}", "remove it; 409 `file_in_use` while a batch needs it"),
    Endpoint("GET", "/v1/files/{id}/content", "its bytes"),
    Endpoint("POST", BATCHES, "run every line of a file in idle time"),
    Endpoint("GET", BATCHES, "the batches, newest first: `limit`, `after`"),
    Endpoint("GET", "/v1/batches/{id}", "one batch: status, counts, errors by line, result files"),
    Endpoint("POST", "/v1/batches/{id}/cancel", "end it; what is done is kept"),
    *NATIVE_ENDPOINTS,
    Endpoint("GET", "/openapi.json", "this API as OpenAPI 3.1", key=False),
    Endpoint("GET", "/health", "200 while the process lives", key=False),
    Endpoint("GET", "/ready", "200 when a completion can be served, else 503 and what is missing", key=False),
    Endpoint("GET", "/metrics", "Prometheus", key=False),
)


def _integer(low: int, high: int) -> Json:
    return {"type": ["integer", "null"], "minimum": low, "maximum": high}


def _number(low: float, high: float, **more: Any) -> Json:
    return {"type": ["number", "null"], "minimum": low, "maximum": high, **more}


def _works(name: str, note: str, schema: Json, where: tuple[str, ...] = BOTH, *, required: bool = False) -> Field:
    return Field(name, "works", note, schema, where, required)


def _rest(status: Status, note: str, *names: str, where: tuple[str, ...] = BOTH) -> tuple[Field, ...]:
    return tuple(Field(name, status, note, None, where) for name in names)


_BOOLEAN: Json = {"type": ["boolean", "null"]}
_STRING: Json = {"type": "string"}
_SECONDS: Json = {"type": "integer", "minimum": LEAST_S, "maximum": MOST_S}
_IDS: Json = {"type": "array", "items": {"type": "integer", "minimum": 0}}
_TEXT_PART: Json = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": _STRING},
    "required": ["type", "text"],
}
_MESSAGE: Json = {
    "type": "object",
    "properties": {
        "role": {"enum": ["system", "developer", "user"]},
        "content": {"anyOf": [_STRING, {"type": "array", "items": _TEXT_PART, "minItems": 1}]},
        "name": _STRING,
    },
    "required": ["role", "content"],
}
_FUNCTION: Json = {
    "type": "object",
    "properties": {"name": _STRING, "arguments": _STRING},
    "required": ["name", "arguments"],
}
_CALL: Json = {
    "type": "object",
    "properties": {"id": _STRING, "type": {"const": "function"}, "function": _FUNCTION},
    "required": ["id", "type", "function"],
}
_ANSWER: Json = {
    "type": "object",
    "properties": {
        "role": {"const": "assistant"},
        "content": {"type": ["string", "null"]},
        "name": _STRING,
        "tool_calls": {"type": "array", "items": _CALL},
        "function_call": {"anyOf": [{"type": "null"}, _FUNCTION]},
    },
    "required": ["role"],
}
_RESULT: Json = {
    "type": "object",
    "properties": {"role": {"const": "tool"}, "content": _STRING, "tool_call_id": _STRING, "name": _STRING},
    "required": ["role", "content", "tool_call_id"],
}
_PROMPT: Json = {
    "anyOf": [
        {"type": "string", "minLength": 1},
        {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1},
        _IDS | {"minItems": 1},
        {"type": "array", "items": _IDS | {"minItems": 1}, "minItems": 1},
    ]
}
_STOP: Json = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS}

FIELDS = (
    _works("model", "the served name; another one is 404 `model_not_found`", _STRING, required=True),
    _works(
        "messages",
        "roles system, developer (read as system), user, assistant, tool, function; `content` is a string or text "
        "parts, which are joined; an assistant's may be null; `tool_calls` reach the template; images, audio and files "
        "are refused by name",
        {"type": "array", "items": {"anyOf": [_MESSAGE, _ANSWER, _RESULT]}, "minItems": 1},
        (CHAT,),
        required=True,
    ),
    _works(
        "prompt",
        "text, token ids, or a list of either: an output each, in order, all `n` of a prompt together",
        _PROMPT,
        (COMPLETIONS,),
        required=True,
    ),
    _works("max_tokens", "0 only in completions with `echo`", _integer(1, HUGE)),
    _works("max_completion_tokens", "wins over `max_tokens`", _integer(1, HUGE)),
    _works("min_tokens", "no end and no stop string before", _integer(0, (1 << 31) - 1)),
    _works("n", "each choice draws its own noise from one seed", _integer(1, MAX_CHOICES)),
    _works("best_of", "only as much as `n`", _integer(1, MAX_CHOICES), (COMPLETIONS,)),
    _works("seed", "one is drawn without; the same seed gives the same text", _integer(-HUGE - 1, HUGE)),
    _works("temperature", "0: greedy", _number(0, 2)),
    _works("top_p", "0: the likeliest token alone", _number(0, 1)),
    _works("top_k", "0 or -1: all", _integer(-1, (1 << 31) - 1)),
    _works("min_p", "", _number(0, 1)),
    _works("presence_penalty", "", _number(-2, 2)),
    _works("frequency_penalty", "", _number(-2, 2)),
    _works("repetition_penalty", "above 0; prompt and output count", _number(0.01, 10)),
    _works(
        "logit_bias",
        "-100 to 100 for each token id of the vocabulary",
        {"type": ["object", "null"], "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100}},
    ),
    _works(
        "stop",
        f"up to {MAX_STOPS} strings, found over token edges; not shown",
        {"anyOf": [{"type": "null"}, _STOP, {"type": "array", "items": _STOP, "maxItems": MAX_STOPS}]},
    ),
    _works("stop_token_ids", f"up to {MAX_STOP_IDS}", {"anyOf": [{"type": "null"}, _IDS | {"maxItems": MAX_STOP_IDS}]}),
    _works("include_stop_str_in_output", "the stop string is shown", _BOOLEAN),
    _works("ignore_eos", "", _BOOLEAN),
    _works("skip_special_tokens", "false: control tokens are shown", _BOOLEAN),
    _works("stream", "server-sent events", _BOOLEAN),
    _works(
        "stream_options",
        "`include_usage`; `continuous_usage_stats` with it; only with `stream`",
        {"type": ["object", "null"], "properties": {"include_usage": _BOOLEAN, "continuous_usage_stats": _BOOLEAN}},
    ),
    _works("return_token_ids", "`prompt_token_ids` and `token_ids` beside the text", _BOOLEAN),
    Field("logprobs", "works", "true: of each token", _BOOLEAN, (CHAT,)),
    _works("top_logprobs", "needs `logprobs`", _integer(0, 20), (CHAT,)),
    Field("logprobs", "works", "how many of the most likely tokens beside each one", _integer(0, 20), (COMPLETIONS,)),
    _works("echo", "the prompt before each output, with `logprobs` scored too", _BOOLEAN, (COMPLETIONS,)),
    _works("add_special_tokens", "what the model expects around raw text (a BOS); not in a chat unless true", _BOOLEAN),
    _works("add_generation_prompt", "false: the template does not open the answer", _BOOLEAN, (CHAT,)),
    _works("continue_final_message", "go on where the last message, an assistant's, stops", _BOOLEAN, (CHAT,)),
    _works("chat_template_kwargs", "variables of the model's template", {"type": ["object", "null"]}, (CHAT,)),
    _works(
        "response_format",
        "`text`, `json_object` and `json_schema`, enforced; `strict` or not",
        {
            "type": ["object", "null"],
            "properties": {"type": {"enum": ["text", "json_object", "json_schema"]}, "json_schema": {"type": "object"}},
            "required": ["type"],
        },
    ),
    _works(
        "structured_outputs",
        "one of `json`, `regex`, `choice`, `grammar` (Lark or GBNF), `json_object`; not beside `response_format`",
        {"type": ["object", "null"]},
    ),
    _works(
        "guided_json", "as `structured_outputs.json`: a schema, or its text", {"type": ["object", "string", "null"]}
    ),
    *(
        _works(f"guided_{name}", f"as `structured_outputs.{name}`", {"type": ["string", "null"], "minLength": 1})
        for name in ("regex", "grammar")
    ),
    _works(
        "guided_choice",
        "as `structured_outputs.choice`",
        {"type": ["array", "null"], "items": {"type": "string", "minLength": 1}, "minItems": 1},
    ),
    _works("modalities", "`text` only", {"enum": [None, ["text"]]}, (CHAT,)),
    _works(
        "tools",
        f"up to {MAX_TOOLS} functions; `strict` has no effect while the model is free to call",
        {"type": ["array", "null"], "items": {"type": "object"}, "maxItems": MAX_TOOLS},
        (CHAT,),
    ),
    _works(
        "tool_choice",
        "`none`, `auto`, `required`, or a function; the last two are enforced and need `tools`",
        {"anyOf": [{"enum": [None, "none", "auto", "required"]}, {"type": "object"}]},
        (CHAT,),
    ),
    _works("parallel_tool_calls", "false: one call where calls are enforced", _BOOLEAN, (CHAT,)),
    _works("function_call", "`none` and `auto` without functions", {"enum": [None, "none", "auto"]}, (CHAT,)),
    *_rest("refused", "use `tools`", "functions", where=(CHAT,)),
    *_rest("refused", "the model continues text and fills no gap", "suffix", where=(COMPLETIONS,)),
    *_rest("refused", "", "prompt_embeds", where=(COMPLETIONS,)),
    *_rest("refused", "the model speaks text", "audio", where=(CHAT,)),
    *_rest("refused", "", "web_search_options", "documents", where=(CHAT,)),
    *_rest("refused", "the model's own template is used", "chat_template", where=(CHAT,)),
    *_rest("refused", "of a chat", "echo", where=(CHAT,)),
    *_rest("refused", "", "use_beam_search", "allowed_token_ids", "bad_words", "logits_processors"),
    *_rest("refused", "use `echo` and `logprobs` of completions", "prompt_logprobs"),
    *_rest("refused", "a prompt is never cut", "truncate_prompt_tokens"),
    *_rest("refused", "use `return_token_ids`", "return_tokens_as_token_ids"),
    _works(
        "cache_salt",
        f"1 to {MAX_CACHE_SALT} characters: KV is shared only with requests of the same tenant that have the same one",
        {"type": ["string", "null"], "minLength": 1, "maxLength": MAX_CACHE_SALT},
    ),
    *_rest("refused", "use `cache_salt`", "extra_key"),
    *_rest("ignored", "", "user", "safety_identifier", "metadata", "store", "service_tier"),
    *_rest("ignored", "prefixes are always cached", "prompt_cache_key", "prompt_cache_retention"),
    *_rest("ignored", "", "reasoning_effort", "verbosity", "prediction", where=(CHAT,)),
    *_rest("ignored", "requests are served by age", "priority"),
    *_rest("ignored", "of beam search", "length_penalty", "early_stopping"),
    _works("file", "JSON lines, each `{custom_id, method, url, body}`", {"type": "string"}, (FILES,), required=True),
    _works("purpose", "`batch` only", {"enum": ["batch"]}, (FILES,), required=True),
    _works("expires_after[anchor]", "without both: 30 days", {"enum": ["created_at"]}, (FILES,)),
    _works("expires_after[seconds]", "3600 to 2592000", _SECONDS, (FILES,)),
    _works("input_file_id", "a file of purpose `batch`", {"type": "string"}, (BATCHES,), required=True),
    _works(
        "endpoint",
        f"every `url` of its lines: one of {', '.join(BATCH_ENDPOINTS)}",
        {"enum": list(BATCH_ENDPOINTS)},
        (BATCHES,),
        required=True,
    ),
    _works("completion_window", "`24h` only", {"enum": ["24h"]}, (BATCHES,), required=True),
    _works(
        "metadata",
        "16 pairs: names of 64 characters, texts of 512",
        {
            "type": ["object", "null"],
            "maxProperties": 16,
            "propertyNames": {"maxLength": 64},
            "additionalProperties": {"type": "string", "maxLength": 512},
        },
        (BATCHES,),
    ),
    _works(
        "output_expires_after",
        "of its output and error files, from when these are made: `{anchor: created_at, seconds}`; 30 days without it",
        {
            "type": ["object", "null"],
            "properties": {"anchor": {"enum": ["created_at"]}, "seconds": _SECONDS},
            "required": ["anchor", "seconds"],
        },
        (BATCHES,),
    ),
    *_rest("ignored", "", "spaces_between_special_tokens", "request_id", "kv_transfer_params", "vllm_xargs"),
)


def fields(path: str) -> list[Field]:
    """Fields of an endpoint's body."""
    return [field for field in (*FIELDS, *TALK_FIELDS, *NATIVE_FIELDS) if path in field.where]


def tables() -> str:
    """The tables of `docs/api.md`."""
    lines = ["| method | path | | key |", "|---|---|---|---|"]
    lines += [f"| {e.method} | `{e.path}` | {e.note} | {'yes' if e.key else 'no'} |" for e in ENDPOINTS]
    lines += ["", "| field | chat | completions | |", "|---|---|---|---|"]
    of_both = [field for field in FIELDS if set(field.where) & set(BOTH)]
    for name in dict.fromkeys(field.name for field in of_both):
        ours = [field for field in of_both if field.name == name]
        status = {path: field.status for field in ours for path in field.where}
        notes = "; ".join(dict.fromkeys(field.note for field in ours if field.note))
        lines.append(f"| `{name}` | {status.get(CHAT, '-')} | {status.get(COMPLETIONS, '-')} | {notes} |")
    lines += ["", "| endpoint | field | | |", "|---|---|---|---|"]
    lines += [f"| `{path}` | `{f.name}` | {f.status} | {f.note} |" for path in (FILES, BATCHES) for f in fields(path)]
    return "\n".join([*lines, *native_tables(), *talk_tables()]) + "\n"


if __name__ == "__main__":
    print(tables(), end="")
