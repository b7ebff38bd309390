"""Embeddings, vLLM's and SGLang's own endpoints in the reference: every endpoint and field of them, once."""

from __future__ import annotations

from typing import Any

from services.frontend.embeddings import PATH as EMBEDDINGS
from services.frontend.embeddings.body import FORMATS, MAX_INPUTS, MAX_TOKENS
from services.frontend.listing import HUGE, Endpoint, Field, Json, Status
from services.frontend.schema import MAX_CACHE_SALT, MAX_CHOICES, MAX_STOP_CHARS, MAX_STOP_IDS, MAX_STOPS
from services.frontend.sglang import PATH as GENERATE
from services.frontend.sglang.body import DEFAULT_TOKENS, MAX_RID, MAX_TOP, NEVER, NOT_SAMPLING
from services.frontend.tokens import DETOKENIZE, TOKENIZE
from services.frontend.tools import MAX_TOOLS

PATHS = (EMBEDDINGS, TOKENIZE, DETOKENIZE, GENERATE)
NATIVE_ENDPOINTS = (
    Endpoint("POST", EMBEDDINGS, "the mean of the model's last hidden states, at unit length"),
    Endpoint("POST", TOKENIZE, "vLLM's: token ids of a text or a conversation"),
    Endpoint("POST", DETOKENIZE, "vLLM's: the text of token ids"),
    Endpoint(
        "POST", GENERATE, "SGLang's: text and token-id prompts, whole or streamed (each event has all of it again)"
    ),
    Endpoint("PUT", GENERATE, "the same"),
    Endpoint("GET", "/get_model_info", "SGLang's: the served model"),
    Endpoint("GET", "/model_info", "the same"),
    Endpoint("GET", "/get_server_info", "SGLang's: the same with version and context"),
    Endpoint("GET", "/server_info", "the same"),
    Endpoint("GET", "/health_generate", "SGLang's: 200 when the model has just said a token"),
    Endpoint("GET", "/flush_cache", "SGLang's: every worker forgets the prefixes that nobody uses; stores keep theirs"),
    Endpoint("POST", "/flush_cache", "the same"),
    Endpoint("GET", "/version", "vLLM's: Baton's version", key=False),
)


def _integer(low: int, high: int) -> Json:
    return {"type": ["integer", "null"], "minimum": low, "maximum": high}


def _number(low: float, high: float, **more: Any) -> Json:
    return {"type": ["number", "null"], "minimum": low, "maximum": high, **more}


def _works(name: str, note: str, schema: Json, where: tuple[str, ...], *, required: bool = False) -> Field:
    return Field(name, "works", note, schema, where, required)


def _rest(status: Status, note: str, *names: str, where: tuple[str, ...]) -> tuple[Field, ...]:
    return tuple(Field(name, status, note, None, where) for name in names)


_BOOLEAN: Json = {"type": ["boolean", "null"]}
_IDS: Json = {"type": "array", "items": {"type": "integer", "minimum": 0}}
_SALT: Json = {"type": "string", "minLength": 1, "maxLength": MAX_CACHE_SALT}
_SALTS: Json = {"anyOf": [{"type": "null"}, _SALT, {"type": "array", "items": {"anyOf": [{"type": "null"}, _SALT]}}]}
_STOP: Json = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS}
_TEXTS: Json = {
    "anyOf": [
        {"type": "string", "minLength": 1},
        {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1, "maxItems": 8},
    ]
}
_INPUTS: Json = {
    "anyOf": [
        {"type": "string", "minLength": 1},
        {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1, "maxItems": MAX_INPUTS},
        _IDS | {"minItems": 1},
        {"type": "array", "items": _IDS | {"minItems": 1}, "minItems": 1, "maxItems": MAX_INPUTS},
    ]
}
_SAMPLING: dict[str, tuple[str, Json]] = {
    "max_new_tokens": (f"{DEFAULT_TOKENS} without; 0: none, log probabilities of the prompt alone", _integer(0, HUGE)),
    "min_new_tokens": ("", _integer(0, (1 << 31) - 1)),
    "temperature": ("0: greedy; 1 without, whatever the model's own default is", _number(0, 2)),
    "top_p": ("", _number(0, 1, exclusiveMinimum=0)),
    "top_k": ("0 or -1: all", _integer(-1, (1 << 31) - 1)),
    "min_p": ("", _number(0, 1)),
    "frequency_penalty": ("", _number(-2, 2)),
    "presence_penalty": ("", _number(-2, 2)),
    "repetition_penalty": ("", _number(0.01, 10)),
    "logit_bias": ("as OpenAI's", {"type": ["object", "null"]}),
    "n": ("the same for all prompts", _integer(1, MAX_CHOICES)),
    "stop": (
        "as OpenAI's",
        {"anyOf": [{"type": "null"}, _STOP, {"type": "array", "items": _STOP, "maxItems": MAX_STOPS}]},
    ),
    "stop_token_ids": ("", {"anyOf": [{"type": "null"}, _IDS | {"maxItems": MAX_STOP_IDS}]}),
    "no_stop_trim": ("the stop string is shown", _BOOLEAN),
    "ignore_eos": ("", _BOOLEAN),
    "skip_special_tokens": ("false: control tokens are shown", _BOOLEAN),
    "sampling_seed": ("", _integer(-HUGE - 1, HUGE)),
    "regex": ("one of these three", {"type": ["string", "null"], "minLength": 1}),
    "json_schema": ("the text of a schema", {"type": ["object", "string", "null"]}),
    "ebnf": ("Lark or GBNF", {"type": ["string", "null"], "minLength": 1}),
}
_SAMPLING_PARAMS: Json = {
    "type": "object",
    "properties": {name: schema for name, (_, schema) in _SAMPLING.items()},
}

NATIVE_FIELDS = (
    _works("model", "as in chat", {"type": "string"}, (EMBEDDINGS,), required=True),
    _works(
        "input",
        f"text, token ids, or a list of either: up to {MAX_INPUTS}, each within the context, {MAX_TOKENS} tokens "
        "in all; none may be empty",
        _INPUTS,
        (EMBEDDINGS,),
        required=True,
    ),
    _works("encoding_format", "base64: little-endian f32", {"enum": [None, *FORMATS]}, (EMBEDDINGS,)),
    _works(
        "dimensions",
        "the first so many numbers, again at unit length; no more than there are",
        _integer(1, (1 << 31) - 1),
        (EMBEDDINGS,),
    ),
    _works("add_special_tokens", "false: no BOS before a text", _BOOLEAN, (EMBEDDINGS,)),
    *_rest("refused", "an input is never cut", "truncate_prompt_tokens", where=(EMBEDDINGS,)),
    *_rest("refused", "give `input`", "messages", where=(EMBEDDINGS,)),
    *_rest("ignored", "", "user", "priority", where=(EMBEDDINGS,)),
    Field("model", "works", "need not be given", {"type": ["string", "null"]}, (TOKENIZE, DETOKENIZE)),
    Field("prompt", "works", "a text; this or `messages`", {"type": ["string", "null"]}, (TOKENIZE,)),
    Field("messages", "works", "as in chat", {"type": ["array", "null"], "items": {"type": "object"}}, (TOKENIZE,)),
    Field("add_special_tokens", "works", "true without for a text, false for a chat", _BOOLEAN, (TOKENIZE,)),
    *(
        Field(name, "works", "of a chat", schema, (TOKENIZE,))
        for name, schema in (
            ("add_generation_prompt", _BOOLEAN),
            ("continue_final_message", _BOOLEAN),
            ("chat_template_kwargs", {"type": ["object", "null"]}),
            ("tools", {"type": ["array", "null"], "items": {"type": "object"}, "maxItems": MAX_TOOLS}),
            ("tool_choice", {"anyOf": [{"enum": [None, "none", "auto", "required"]}, {"type": "object"}]}),
            ("parallel_tool_calls", _BOOLEAN),
        )
    ),
    _works("return_token_strs", "each token's piece of the vocabulary", _BOOLEAN, (TOKENIZE,)),
    _works("tokens", "ids; control tokens are shown", _IDS, (DETOKENIZE,), required=True),
    Field("model", "works", "need not be given", {"type": ["string", "null"]}, (GENERATE,)),
    _works("text", "a text or a list of texts; this or `input_ids`", _TEXTS, (GENERATE,)),
    _works("input_ids", "token ids or a list of such lists", _IDS | {"minItems": 1}, (GENERATE,)),
    _works(
        "sampling_params",
        "an object, or a list of one for each prompt",
        _SAMPLING_PARAMS,
        (GENERATE,),
    ),
    *(_works(f"sampling_params.{name}", note, schema, (GENERATE,)) for name, (note, schema) in _SAMPLING.items()),
    *_rest("refused", "", *(f"sampling_params.{name}" for name in NOT_SAMPLING), where=(GENERATE,)),
    *_rest(
        "ignored",
        "",
        "sampling_params.spaces_between_special_tokens",
        "sampling_params.stream_interval",
        where=(GENERATE,),
    ),
    Field("stream", "works", "server-sent events", _BOOLEAN, (GENERATE,)),
    _works(
        "return_logprob",
        "or a list of one for each prompt, as the next two",
        _BOOLEAN,
        (GENERATE,),
    ),
    _works(
        "logprob_start_len",
        "from which prompt token on: -1 (without): of the output only, or of all where there is no output",
        _integer(-1, (1 << 31) - 1),
        (GENERATE,),
    ),
    _works("top_logprobs_num", f"up to {MAX_TOP}", _integer(0, MAX_TOP), (GENERATE,)),
    _works("return_text_in_logprobs", "tokens are spelled out too", _BOOLEAN, (GENERATE,)),
    _works("rid", "told again as `meta_info.id`", {"type": ["string", "null"], "maxLength": MAX_RID}, (GENERATE,)),
    _works("extra_key", "as `cache_salt` in a chat; or a list of one for each prompt", _SALTS, (GENERATE,)),
    _works("cache_salt", "the same; one of the two", _SALTS, (GENERATE,)),
    *_rest("refused", "", *NEVER, where=(GENERATE,)),
    *_rest("ignored", "", "log_metrics", "session_id", "modalities", "routing_key", where=(GENERATE,)),
)


def native_tables() -> list[str]:
    """Their table in `docs/api.md`."""
    lines = ["", "| endpoint | field | | |", "|---|---|---|---|"]
    return lines + [
        f"| `{path}` | `{field.name}` | {field.status} | {field.note} |"
        for path in PATHS
        for field in NATIVE_FIELDS
        if path in field.where
    ]
