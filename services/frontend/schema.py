"""Requests as clients send them: checked by hand, field by field, so that each refusal names its field.

Unknown fields are ignored. What would change the answer and is not done here is refused rather than ignored.
`docs/api.md` has every field; a test holds it against what is read here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from services.frontend.errors import invalid
from services.frontend.fields import Fields
from services.frontend.messages import read_messages
from services.frontend.structure import Structure, read_structure
from services.frontend.tools import Tools, read_tools

MAX_CHOICES = 128
MAX_OUTPUTS = 256
MAX_STOPS = 16
MAX_STOP_CHARS = 1024
MAX_STOP_IDS = 1024
MAX_CACHE_SALT = 512
"""Characters."""
USE_SALT = "is not supported here; 'cache_salt' is the same"
"""Why SGLang's `extra_key` is refused outside its own endpoint."""
_NOT_IN_CHAT = ("audio", "web_search_options", "echo", "documents", "chat_template")
_NEVER = (
    "use_beam_search", "prompt_logprobs", "allowed_token_ids", "bad_words", "logits_processors",
    "truncate_prompt_tokens", "return_tokens_as_token_ids",
)  # fmt: skip


@dataclass(frozen=True)
class Options:
    """What chat and completions have in common. None: the client did not say."""

    model: str
    stream: bool
    include_usage: bool
    n: int
    max_tokens: int | None
    seed: int | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    min_tokens: int
    ignore_eos: bool
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    logprobs: int | None
    """Most likely tokens to tell beside each sampled one; None: no log probabilities at all."""
    continuous_usage: bool = False
    """Every chunk tells the usage so far."""
    include_stop: bool = False
    """The stop string that ended an output is part of its text."""
    show_special: bool = False
    """Control tokens are text."""
    token_ids: bool = False
    """Token ids of the prompt and of what is generated are told."""
    structure: Structure | None = None
    budget: str = "max_tokens"
    """The field that `max_tokens` came from."""
    given: str = ""
    """The field that the prompt came from; "": as its endpoint says."""
    cache_salt: str = ""
    """KV is shared only with requests of the same tenant that have the same one."""


UNASKED = Options(
    model="",
    stream=False,
    include_usage=False,
    n=1,
    max_tokens=None,
    seed=None,
    temperature=None,
    top_p=None,
    top_k=None,
    min_p=None,
    repetition_penalty=None,
    presence_penalty=0.0,
    frequency_penalty=0.0,
    logit_bias={},
    min_tokens=0,
    ignore_eos=False,
    stop=(),
    stop_token_ids=(),
    logprobs=None,
)
"""Of a body that asks for no output."""


@dataclass(frozen=True)
class ChatBody:
    """A chat request. Message contents are text; `variables` go to the chat template."""

    options: Options
    messages: tuple[Mapping[str, Any], ...]
    variables: Mapping[str, Any]
    generation_prompt: bool = True
    """The template opens the assistant's answer."""
    continue_final: bool = False
    """The answer goes on where the last message stops."""
    add_special: bool = False
    tools: Tools | None = None
    asked_to_continue: bool = True
    """`continue_final` is what a field of the body says, not what the last message's role means."""


@dataclass(frozen=True)
class CompletionBody:
    """A completions request: each prompt is text or token ids."""

    options: Options
    prompts: tuple[str | tuple[int, ...], ...]
    echo: bool
    add_special: bool = True
    """Raw text gets what the model expects around it (a BOS)."""


def parse_json(raw: bytes | bytearray) -> dict[str, Any]:
    """The request's JSON object. Raises BatonError: not JSON (NaN, lone surrogates and endless nesting included)."""
    try:
        value = orjson.loads(raw)
    except (orjson.JSONDecodeError, RecursionError) as error:
        raise invalid(f"The body is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise invalid("The body must be a JSON object.")
    return value


def model_of(raw: Mapping[str, Any]) -> str:
    """The model that is asked for. Raises BatonError."""
    model = raw.get("model")
    if not isinstance(model, str) or not model:
        raise invalid("You must provide a model.", "model")
    return model


def parse_chat(raw: Mapping[str, Any], vocab_size: int) -> ChatBody:
    """Check a chat request. Raises BatonError(INVALID_REQUEST) with the field at fault."""
    fields = Fields(raw, vocab_size)
    for name in ("functions", *_NOT_IN_CHAT):
        fields.refuse(name)
    fields.refuse("function_call", ("none", "auto"))
    fields.refuse("modalities", (["text"],))
    top = fields.integer("top_logprobs", 0, 20)
    wanted = fields.boolean("logprobs")
    if top is not None and not wanted:
        raise invalid("'top_logprobs' needs 'logprobs' to be true.", "top_logprobs")
    messages = read_messages(raw.get("messages"))
    continue_final = fields.boolean("continue_final_message")
    generation_prompt = fields.boolean("add_generation_prompt", default=not continue_final)
    if continue_final and generation_prompt:
        raise invalid("'continue_final_message' excludes 'add_generation_prompt'.", "continue_final_message")
    if continue_final and messages[-1]["role"] != "assistant":
        raise invalid("'continue_final_message' needs a last message of the assistant.", "continue_final_message")
    return ChatBody(
        read_options(fields, logprobs=(top or 0) if wanted else None, least_tokens=1),
        messages,
        fields.object("chat_template_kwargs"),
        generation_prompt,
        continue_final,
        fields.boolean("add_special_tokens"),
        read_tools(raw),
    )


def parse_completion(raw: Mapping[str, Any], vocab_size: int) -> CompletionBody:
    """Check a completions request. Raises BatonError(INVALID_REQUEST) with the field at fault."""
    fields = Fields(raw, vocab_size)
    fields.refuse("suffix", why="is not supported: the model continues a text and cannot fill a gap in it")
    fields.refuse("prompt_embeds")
    options = read_options(fields, logprobs=fields.integer("logprobs", 0, 20), least_tokens=0)
    best_of = fields.integer("best_of", 1, MAX_CHOICES)
    if best_of is not None and best_of != options.n:
        raise invalid("'best_of' other than 'n' is not supported; ask for 'n' outputs and choose.", "best_of")
    echo = fields.boolean("echo")
    if options.max_tokens == 0 and not echo:
        raise invalid("'max_tokens' must be at least 1 without 'echo'.", "max_tokens")
    prompts = _prompts(fields)
    if len(prompts) * options.n > MAX_OUTPUTS:
        raise invalid(f"{len(prompts)} prompts with n={options.n} are more than {MAX_OUTPUTS} outputs.", "prompt")
    return CompletionBody(options, prompts, echo, fields.boolean("add_special_tokens", default=True))


def read_options(fields: Fields, *, logprobs: int | None, least_tokens: int) -> Options:
    """What chat and completions have in common. Raises BatonError(INVALID_REQUEST) with the field at fault."""
    for name in _NEVER:
        fields.refuse(name)
    fields.refuse("extra_key", why=USE_SALT)
    huge = (1 << 63) - 1
    stream = fields.boolean("stream")
    usage = fields.object("stream_options")
    if usage and not stream:
        raise invalid("'stream_options' needs 'stream' to be true.", "stream_options")
    include_usage = _usage_wish(usage, "include_usage")
    continuous_usage = _usage_wish(usage, "continuous_usage_stats") and include_usage
    max_tokens = fields.integer("max_tokens", least_tokens, huge)
    max_completion = fields.integer("max_completion_tokens", least_tokens, huge)
    budget = "max_tokens"
    if max_completion is not None:
        max_tokens, budget = max_completion, "max_completion_tokens"
    min_tokens = fields.integer("min_tokens", 0, (1 << 31) - 1) or 0
    if max_tokens is not None and min_tokens > max_tokens:
        raise invalid(f"'min_tokens' must not be more than '{budget}'.", "min_tokens")
    top_k = fields.integer("top_k", -1, (1 << 31) - 1)
    return Options(
        model=model_of(fields.raw),
        stream=stream,
        include_usage=include_usage,
        n=fields.integer("n", 1, MAX_CHOICES) or 1,
        max_tokens=max_tokens,
        seed=fields.integer("seed", -(1 << 63), huge),
        temperature=fields.number("temperature", 0, 2),
        top_p=fields.number("top_p", 0, 1),
        top_k=None if top_k is None else max(0, top_k),
        min_p=fields.number("min_p", 0, 1),
        repetition_penalty=fields.number("repetition_penalty", 0.01, 10),
        presence_penalty=fields.number("presence_penalty", -2, 2) or 0.0,
        frequency_penalty=fields.number("frequency_penalty", -2, 2) or 0.0,
        logit_bias=_logit_bias(fields),
        min_tokens=min_tokens,
        ignore_eos=fields.boolean("ignore_eos"),
        stop=_stop(fields.raw.get("stop")),
        stop_token_ids=_stop_ids(fields),
        logprobs=logprobs,
        continuous_usage=continuous_usage,
        include_stop=fields.boolean("include_stop_str_in_output"),
        show_special=not fields.boolean("skip_special_tokens", default=True),
        token_ids=fields.boolean("return_token_ids"),
        structure=read_structure(fields.raw),
        budget=budget,
        cache_salt=read_salt(fields.raw.get("cache_salt")),
    )


def read_salt(value: Any, name: str = "cache_salt") -> str:
    """What parts a request's KV from others'; "": nothing. Raises BatonError(INVALID_REQUEST) with the field `name`."""
    if value is not None and (not isinstance(value, str) or not 0 < len(value) <= MAX_CACHE_SALT):
        raise invalid(f"'{name}' must be a string of 1 to {MAX_CACHE_SALT} characters.", name)
    return value or ""


def _usage_wish(options: Mapping[str, Any], name: str) -> bool:
    value = options.get(name)
    if value is not None and not isinstance(value, bool):
        raise invalid(f"'stream_options.{name}' must be true or false.", f"stream_options.{name}")
    return bool(value)


def _stop(value: Any) -> tuple[str, ...]:
    stops = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise invalid("'stop' must be a string or a list of strings.", "stop")
    if len(stops) > MAX_STOPS or any(not 0 < len(stop) <= MAX_STOP_CHARS for stop in stops):
        raise invalid(f"'stop' takes up to {MAX_STOPS} strings of 1 to {MAX_STOP_CHARS} characters.", "stop")
    return tuple(dict.fromkeys(stops))


def _stop_ids(fields: Fields) -> tuple[int, ...]:
    ids = fields.token_ids("stop_token_ids")
    if len(ids) > MAX_STOP_IDS:
        raise invalid(f"'stop_token_ids' takes up to {MAX_STOP_IDS} ids.", "stop_token_ids")
    return ids


def _logit_bias(fields: Fields) -> dict[int, float]:
    out: dict[int, float] = {}
    for key, value in fields.object("logit_bias").items():
        digits = key.isascii() and key.isdigit() and len(key) <= 10
        token_id = fields.token_id(int(key) if digits else -1, "logit_bias")
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not -100 <= value <= 100:
            raise invalid("'logit_bias' values must be numbers between -100 and 100.", "logit_bias")
        out[token_id] = float(value)
    return out


def _prompts(fields: Fields) -> tuple[str | tuple[int, ...], ...]:
    value = fields.raw.get("prompt")
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list) or not value:
        raise invalid("'prompt' must be text, a list of texts, token ids, or a list of token-id lists.", "prompt")
    if isinstance(value[0], int):
        return (fields.token_ids("prompt"),)
    prompts: list[str | tuple[int, ...]] = []
    for item in value:
        if isinstance(item, str):
            prompts.append(item)
        elif isinstance(item, list) and item:
            prompts.append(tuple(fields.token_id(i, "prompt") for i in item))
        else:
            raise invalid("Each item of 'prompt' must be text or a list of token ids.", "prompt")
    return tuple(prompts)
