"""Requests as clients send them: checked by hand, field by field, so that each refusal names its field.

Unknown fields are ignored. What would change the answer and is not built yet (suffix, images) is refused rather than
ignored.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from services.frontend.errors import invalid
from services.frontend.structure import Structure, read_structure
from services.frontend.toolmessages import read_calls
from services.frontend.tools import Tools, read_tools

MAX_CHOICES = 128
MAX_OUTPUTS = 256
MAX_STOPS = 16
MAX_STOP_CHARS = 1024
MAX_STOP_IDS = 1024
_ROLES = ("system", "developer", "user", "assistant", "tool")


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
    structure: Structure | None = None


@dataclass(frozen=True)
class ChatBody:
    """A chat request. Message contents are text; `variables` go to the chat template."""

    options: Options
    messages: tuple[Mapping[str, Any], ...]
    variables: Mapping[str, Any]
    tools: Tools | None = None


@dataclass(frozen=True)
class CompletionBody:
    """A completions request: each prompt is text or token ids."""

    options: Options
    prompts: tuple[str | tuple[int, ...], ...]
    echo: bool


class _Fields:
    """Typed reading of a JSON object. A null counts as absent. Raises BatonError naming the field."""

    def __init__(self, raw: Mapping[str, Any], vocab_size: int) -> None:
        self.raw = raw
        self.vocab_size = vocab_size

    def number(self, name: str, low: float, high: float, *, above: bool = False) -> float | None:
        value = self.raw.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise invalid(f"'{name}' must be a number.", name)
        if not low <= value <= high or (above and value == low):
            raise invalid(f"'{name}' must be {'above' if above else 'at least'} {low:g} and at most {high:g}.", name)
        return float(value)

    def integer(self, name: str, low: int, high: int) -> int | None:
        value = self.raw.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int):
            raise invalid(f"'{name}' must be an integer.", name)
        if not low <= value <= high:
            raise invalid(f"'{name}' must be at least {low} and at most {high}.", name)
        return value

    def boolean(self, name: str) -> bool:
        value = self.raw.get(name)
        if value is not None and not isinstance(value, bool):
            raise invalid(f"'{name}' must be true or false.", name)
        return bool(value)

    def object(self, name: str) -> Mapping[str, Any]:
        value = self.raw.get(name)
        if value is not None and not isinstance(value, dict):
            raise invalid(f"'{name}' must be an object.", name)
        return value or {}

    def token_ids(self, name: str) -> tuple[int, ...]:
        value = self.raw.get(name)
        if value is None:
            return ()
        if not isinstance(value, list):
            raise invalid(f"'{name}' must be a list of token ids.", name)
        return tuple(self.token_id(item, name) for item in value)

    def token_id(self, value: Any, name: str) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < self.vocab_size:
            raise invalid(f"'{name}' has a token id that is not between 0 and {self.vocab_size - 1}.", name)
        return value

    def refuse(self, name: str, harmless: Sequence[Any] = ()) -> None:
        value = self.raw.get(name)
        if value is not None and value not in ([], {}, "", False) and value not in harmless:
            raise invalid(f"'{name}' is not supported by this server yet.", name)


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
    fields = _Fields(raw, vocab_size)
    for name in ("functions", "audio"):
        fields.refuse(name)
    fields.refuse("function_call", ("none", "auto"))
    fields.refuse("modalities", (["text"],))
    top = fields.integer("top_logprobs", 0, 20)
    wanted = fields.boolean("logprobs")
    if top is not None and not wanted:
        raise invalid("'top_logprobs' needs 'logprobs' to be true.", "top_logprobs")
    options = _options(fields, logprobs=(top or 0) if wanted else None, least_tokens=1)
    return ChatBody(options, _messages(raw.get("messages")), fields.object("chat_template_kwargs"), read_tools(raw))


def parse_completion(raw: Mapping[str, Any], vocab_size: int) -> CompletionBody:
    """Check a completions request. Raises BatonError(INVALID_REQUEST) with the field at fault."""
    fields = _Fields(raw, vocab_size)
    fields.refuse("suffix")
    options = _options(fields, logprobs=fields.integer("logprobs", 0, 20), least_tokens=0)
    best_of = fields.integer("best_of", 1, MAX_CHOICES)
    if best_of is not None and best_of != options.n:
        raise invalid("'best_of' other than 'n' is not supported by this server yet.", "best_of")
    echo = fields.boolean("echo")
    if options.max_tokens == 0 and not echo:
        raise invalid("'max_tokens' must be at least 1 without 'echo'.", "max_tokens")
    prompts = _prompts(fields)
    if len(prompts) * options.n > MAX_OUTPUTS:
        raise invalid(f"{len(prompts)} prompts with n={options.n} are more than {MAX_OUTPUTS} outputs.", "prompt")
    return CompletionBody(options, prompts, echo)


def _options(fields: _Fields, *, logprobs: int | None, least_tokens: int) -> Options:
    fields.refuse("use_beam_search")
    huge = (1 << 63) - 1
    stream = fields.boolean("stream")
    usage = fields.object("stream_options")
    if usage and not stream:
        raise invalid("'stream_options' needs 'stream' to be true.", "stream_options")
    include_usage = usage.get("include_usage")
    if include_usage is not None and not isinstance(include_usage, bool):
        raise invalid("'stream_options.include_usage' must be true or false.", "stream_options.include_usage")
    max_tokens = fields.integer("max_tokens", least_tokens, huge)
    max_completion = fields.integer("max_completion_tokens", least_tokens, huge)
    if max_completion is not None:
        max_tokens = max_completion
    min_tokens = fields.integer("min_tokens", 0, (1 << 31) - 1) or 0
    if max_tokens is not None and min_tokens > max_tokens:
        raise invalid("'min_tokens' must not be more than 'max_tokens'.", "min_tokens")
    top_k = fields.integer("top_k", -1, (1 << 31) - 1)
    return Options(
        model=model_of(fields.raw),
        stream=stream,
        include_usage=bool(include_usage),
        n=fields.integer("n", 1, MAX_CHOICES) or 1,
        max_tokens=max_tokens,
        seed=fields.integer("seed", -(1 << 63), huge),
        temperature=fields.number("temperature", 0, 2),
        top_p=fields.number("top_p", 0, 1, above=True),
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
        structure=read_structure(fields.raw),
    )


def _stop(value: Any) -> tuple[str, ...]:
    stops = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise invalid("'stop' must be a string or a list of strings.", "stop")
    if len(stops) > MAX_STOPS or any(not 0 < len(stop) <= MAX_STOP_CHARS for stop in stops):
        raise invalid(f"'stop' takes up to {MAX_STOPS} strings of 1 to {MAX_STOP_CHARS} characters.", "stop")
    return tuple(dict.fromkeys(stops))


def _stop_ids(fields: _Fields) -> tuple[int, ...]:
    ids = fields.token_ids("stop_token_ids")
    if len(ids) > MAX_STOP_IDS:
        raise invalid(f"'stop_token_ids' takes up to {MAX_STOP_IDS} ids.", "stop_token_ids")
    return ids


def _logit_bias(fields: _Fields) -> dict[int, float]:
    out: dict[int, float] = {}
    for key, value in fields.object("logit_bias").items():
        digits = key.isascii() and key.isdigit() and len(key) <= 10
        token_id = fields.token_id(int(key) if digits else -1, "logit_bias")
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not -100 <= value <= 100:
            raise invalid("'logit_bias' values must be numbers between -100 and 100.", "logit_bias")
        out[token_id] = float(value)
    return out


def _messages(value: Any) -> tuple[Mapping[str, Any], ...]:
    if not isinstance(value, list) or not value:
        raise invalid("'messages' must be a list with at least one message.", "messages")
    return tuple(_message(message, f"messages[{i}]") for i, message in enumerate(value))


def _message(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise invalid(f"'{where}' must be an object.", where)
    role = value.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise invalid(f"'{where}.role' must be one of {', '.join(_ROLES)}.", f"{where}.role")
    if "content" not in value and role != "assistant":
        raise invalid(f"'{where}.content' is missing.", f"{where}.content")
    message = {"role": "system" if role == "developer" else role, "content": _content(value.get("content"), where)}
    if isinstance(value.get("name"), str):
        message["name"] = value["name"]
    return message | read_calls(value, where)


def _content(value: Any, where: str) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    if not isinstance(value, list):
        raise invalid(f"'{where}.content' must be a string or a list of parts.", f"{where}.content")
    return "".join(_part(part, f"{where}.content[{i}]") for i, part in enumerate(value))


def _part(part: Any, where: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str):
        raise invalid(f"'{where}' must be an object with a 'type'.", where)
    if kind not in ("text", "refusal"):
        raise invalid(f"Content of type '{kind[:40]}' is not supported by this model.", where)
    text = part.get(kind)
    if not isinstance(text, str):
        raise invalid(f"'{where}.{kind}' must be a string.", f"{where}.{kind}")
    return text


def _prompts(fields: _Fields) -> tuple[str | tuple[int, ...], ...]:
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
