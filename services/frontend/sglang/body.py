"""Bodies of `/generate`: SGLang's names become ours, so every value is checked where OpenAI's are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import msgspec

from baton.errors import BatonError
from services.frontend.errors import invalid
from services.frontend.fields import Fields
from services.frontend.schema import MAX_OUTPUTS, Options, read_options, read_salt

DEFAULT_TOKENS = 128
MAX_TOP = 128
MAX_RID = 128
_ANY_JSON = "$$ANY$$"
"""SGLang's word for a schema that lets every object in."""
_NAMES: Final = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "sampling_seed": "seed",
    "no_stop_trim": "include_stop_str_in_output",
}
_SAME: Final = (
    "n", "temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty",
    "stop", "stop_token_ids", "ignore_eos", "skip_special_tokens", "logit_bias",
)  # fmt: skip
SAMPLING: Final = (*_NAMES, *_SAME, "regex", "json_schema", "ebnf")
"""Sampling parameters that work."""
NOT_SAMPLING: Final = ("stop_regex", "structural_tag", "custom_params")
NEVER: Final = (
    "input_embeds", "image_data", "video_data", "audio_data", "token_ids_logprob", "return_hidden_states",
    "session_params", "lora_path", "custom_logit_processor", "return_sampling_mask", "return_routed_experts",
    "return_flat_raw_top_logprobs", "return_flat_raw_output_top_logprobs",
)  # fmt: skip
_NEUTRAL: Final = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
"""What SGLang takes where nothing is said; a model's own defaults are not asked."""
_encode = msgspec.json.Encoder().encode


class Told(msgspec.Struct, frozen=True):
    """What the answer has to know, of each prompt: where its log probabilities begin (-1: of the output only)."""

    listed: bool
    texts: bool
    """Tokens of log probabilities are spelled out."""
    starts: list[int]
    rids: list[str]


@dataclass(frozen=True)
class GenerateBody:
    """Prompts, each with options of its own; all have the same `n` and `stream`."""

    prompts: tuple[str | tuple[int, ...], ...]
    options: tuple[Options, ...]
    told: bytes


def read_told(data: bytes) -> Told:
    """What `read_generate` told."""
    return msgspec.json.decode(data, type=Told)


def read_generate(raw: Mapping[str, Any], vocab_size: int) -> GenerateBody:
    """Check a body. Raises BatonError(INVALID_REQUEST) with the field at fault, `sampling_params.top_p` for one."""
    fields = Fields(raw, vocab_size)
    for name in NEVER:
        fields.refuse(name)
    prompts, listed = _prompts(fields)
    count = len(prompts)
    stream, texts = fields.boolean("stream"), fields.boolean("return_text_in_logprobs")
    wanted = _each(raw, "return_logprob", count, bool, False)
    tops = [_within(top, "top_logprobs_num", 0, MAX_TOP) for top in _each(raw, "top_logprobs_num", count, int, 0)]
    starts = _each(raw, "logprob_start_len", count, int, -1)
    salts = _salts(raw, count)
    options, told = [], []
    for i, given in enumerate(_each(raw, "sampling_params", count, dict, {})):
        one = _options(given, vocab_size, stream=stream, logprobs=tops[i] if wanted[i] else None)
        start = _within(starts[i], "logprob_start_len", -1, (1 << 31) - 1)
        if isinstance(prompts[i], tuple) and start > len(prompts[i]):
            raise invalid("'logprob_start_len' is behind the prompt.", "logprob_start_len")
        # Without an output there is nothing else to tell.
        start = 0 if start < 0 and one.max_tokens == 0 else start
        told.append(start if wanted[i] else -1)
        options.append(replace(one, cache_salt=salts[i]))
    if len({one.n for one in options}) > 1:
        raise invalid("'sampling_params.n' must be the same for all prompts.", "sampling_params.n")
    if count * options[0].n > MAX_OUTPUTS:
        raise invalid(
            f"{count} prompts with n={options[0].n} are more than {MAX_OUTPUTS} outputs.", "sampling_params.n"
        )
    rids = _rids(raw.get("rid"), count)
    return GenerateBody(prompts, tuple(options), _encode(Told(listed, texts, told, rids)))


def _options(given: Mapping[str, Any], vocab_size: int, *, stream: bool, logprobs: int | None) -> Options:
    """Sampling parameters as ours. Refusals name SGLang's."""
    ours: dict[str, Any] = {"model": "-", "stream": stream}
    ours |= {name: given[name] for name in _SAME if given.get(name) is not None}
    ours |= {name: given[theirs] for theirs, name in _NAMES.items() if given.get(theirs) is not None}
    ours = _NEUTRAL | ours
    asked = {
        kind: given[name]
        for name, kind in (("regex", "regex"), ("json_schema", "json"), ("ebnf", "grammar"))
        if given.get(name) is not None
    }
    if asked.get("json") == _ANY_JSON:
        asked["json"] = {"type": "object"}
    if asked:
        ours["structured_outputs"] = asked
    try:
        fields = Fields(given, vocab_size)
        for name in NOT_SAMPLING:
            fields.refuse(name)
        return read_options(Fields(ours, vocab_size), logprobs=logprobs, least_tokens=0)
    except BatonError as error:
        name = error.param or ""
        theirs = _theirs(name)
        message = error.message.replace(f"'{name}'", f"'{theirs}'")
        raise BatonError(error.reason, message, param=f"sampling_params.{theirs}".rstrip(".")) from error


def _theirs(name: str) -> str:
    """SGLang's name of one of our fields."""
    kinds = {"json": "json_schema", "regex": "regex", "grammar": "ebnf"}
    if name.startswith("structured_outputs."):
        return kinds.get(name.partition(".")[2], name)
    return next((theirs for theirs, ours in _NAMES.items() if ours == name), name)


def blamed(error: BatonError) -> BatonError:
    """A refusal that came later, with the field that SGLang's clients know."""
    name = error.param or ""
    if name in (*_NAMES.values(), *_SAME) or name.startswith("structured_outputs"):
        return BatonError(error.reason, error.message, param=f"sampling_params.{_theirs(name)}")
    return error


def _prompts(fields: Fields) -> tuple[tuple[str | tuple[int, ...], ...], bool]:
    text, ids = fields.raw.get("text"), fields.raw.get("input_ids")
    if (text is None) == (ids is None):
        raise invalid("Give either 'text' or 'input_ids'.", "text" if ids is None else "input_ids")
    given, param = (text, "text") if ids is None else (ids, "input_ids")
    if isinstance(given, list) and len(given) > MAX_OUTPUTS and not isinstance(given[0], int):
        raise invalid(f"'{param}' takes up to {MAX_OUTPUTS} prompts.", param)
    if param == "text":
        listed = isinstance(given, list)
        texts = given if isinstance(given, list) else [given]
        if not texts or not all(isinstance(one, str) and one for one in texts):
            raise invalid("'text' must be a string, or a list of strings, that are not empty.", "text")
        return tuple(texts), listed
    if not isinstance(given, list) or not given:
        raise invalid("'input_ids' must be token ids, or a list of token-id lists.", "input_ids")
    if not isinstance(given[0], list):
        return (fields.token_ids("input_ids"),), False
    if not all(isinstance(one, list) and one for one in given):
        raise invalid("Each item of 'input_ids' must be a list of token ids.", "input_ids")
    return tuple(tuple(fields.token_id(i, "input_ids") for i in one) for one in given), True


def _each(raw: Mapping[str, Any], name: str, count: int, kind: type, default: Any) -> list[Any]:
    """A value for each prompt: one for all, or a list of as many as there are prompts."""
    value = raw.get(name)
    values = value if isinstance(value, list) else [value] * count
    if len(values) != count:
        raise invalid(f"'{name}' has {len(values)} values for {count} prompts.", name)
    values = [default if one is None else one for one in values]
    if not all(isinstance(one, kind) and (kind is not int or not isinstance(one, bool)) for one in values):
        word = {bool: "true or false", int: "an integer", dict: "an object"}[kind]
        raise invalid(f"'{name}' must be {word}, or a list of such, one for each prompt.", name)
    return values


def _salts(raw: Mapping[str, Any], count: int) -> list[str]:
    """What parts each prompt's KV from others': SGLang calls it `extra_key` here, and `cache_salt` in chats."""
    key, salt = raw.get("extra_key"), raw.get("cache_salt")
    if key is not None and salt is not None:
        raise invalid("'extra_key' and 'cache_salt' are the same: give one of them.", "extra_key")
    name = "cache_salt" if key is None else "extra_key"
    return [read_salt(one, name) for one in _each(raw, name, count, object, None)]


def _within(value: int, name: str, low: int, high: int) -> int:
    if not low <= value <= high:
        raise invalid(f"'{name}' must be at least {low} and at most {high}.", name)
    return value


def _rids(value: Any, count: int) -> list[str]:
    """The client's names of its requests; without any, they are made with the answer."""
    given = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(given, list) or not all(isinstance(one, str) and len(one) <= MAX_RID for one in given):
        raise invalid(f"'rid' must be a string of up to {MAX_RID} characters, or a list of such.", "rid")
    if len(given) == 1 and count > 1:
        return [f"{given[0]}_{i}" for i in range(count)]
    if given and len(given) != count:
        raise invalid(f"'rid' has {len(given)} values for {count} prompts.", "rid")
    return given
