"""Bodies of `/v1/embeddings`, checked and tokenised. Nothing here is left for an engine to refuse."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from baton.errors import BatonError, Reason
from baton.model.tokenizer import Tokenizer
from services.frontend.errors import invalid
from services.frontend.fields import Fields

MAX_INPUTS = 2048
MAX_TOKENS = 300_000
"""Of all inputs together, as OpenAI's."""
FORMATS = ("float", "base64")
_encode = msgspec.msgpack.Encoder().encode


class Told(msgspec.Struct, frozen=True):
    """What the answer has to know. `dimensions` 0: all."""

    format: Literal["float", "base64"]
    dimensions: int


@dataclass(frozen=True)
class EmbeddingsBody:
    """The inputs as they came, and how they are answered."""

    inputs: tuple[str | tuple[int, ...], ...]
    listed: bool
    """They came in a list of inputs."""
    add_special: bool
    told: Told


@dataclass(frozen=True)
class Inputs:
    """What is to be embedded, checked and tokenised; `told` is what `read_told` reads."""

    ids: Sequence[Sequence[int]]
    told: bytes

    @property
    def tokens(self) -> int:
        """Of all inputs."""
        return sum(map(len, self.ids))


def parse_embeddings(raw: Mapping[str, Any], vocab_size: int, size: int) -> EmbeddingsBody:
    """Check a body; `size`: numbers of the model's own embedding (0: not known). Raises BatonError(INVALID_REQUEST)."""
    fields = Fields(raw, vocab_size)
    fields.refuse("truncate_prompt_tokens", why="is not supported: an input is never cut")
    fields.refuse("messages", why="is not supported: give 'input'")
    format = raw.get("encoding_format") or "float"
    if format not in FORMATS:
        raise invalid(f"'encoding_format' must be one of {', '.join(FORMATS)}.", "encoding_format")
    dimensions = fields.integer("dimensions", 1, size or (1 << 31) - 1) or 0
    inputs, listed = _inputs(fields)
    add_special = fields.boolean("add_special_tokens", default=True)
    return EmbeddingsBody(inputs, listed, add_special, Told(format, dimensions))


def read_embeddings(
    raw: Mapping[str, Any], tokenizer: Tokenizer, limit: int, size: int
) -> tuple[list[array[int]], bytes]:
    """Token ids of every input, and what `read_told` reads. Raises BatonError with the input at fault."""
    body = parse_embeddings(raw, tokenizer.vocab_size, size)
    out: list[array[int]] = []
    total = 0
    for i, given in enumerate(body.inputs):
        where = f"input[{i}]" if body.listed else "input"
        # No text is tokenised that must be too long: a token of 256 bytes would be an odd one.
        if isinstance(given, str) and len(given.encode()) > 256 * limit:
            raise _too_long(limit, f"at least {limit + 1}", where)
        ids = tokenizer.encode(given, add_special=body.add_special) if isinstance(given, str) else given
        if not ids:
            raise invalid(f"'{where}' is empty.", where)
        if len(ids) > limit:
            raise _too_long(limit, str(len(ids)), where)
        total += len(ids)
        if total > MAX_TOKENS:
            raise BatonError(
                Reason.CONTEXT_LENGTH_EXCEEDED,
                f"The inputs have more than {MAX_TOKENS} tokens together.",
                param="input",
            )
        out.append(array("I", ids))
    return out, _encode(body.told)


def read_told(data: bytes) -> Told:
    """The reverse of what `read_embeddings` tells."""
    return msgspec.msgpack.decode(data, type=Told)


def _too_long(limit: int, tokens: str, where: str) -> BatonError:
    return BatonError(
        Reason.CONTEXT_LENGTH_EXCEEDED,
        f"This model's maximum context length is {limit} tokens. However, '{where}' has {tokens} tokens.",
        param=where,
    )


def _inputs(fields: Fields) -> tuple[tuple[str | tuple[int, ...], ...], bool]:
    value = fields.raw.get("input")
    if value is None:
        raise invalid("You must provide 'input'.", "input")
    if isinstance(value, str):
        if not value:
            raise invalid("'input' is empty.", "input")
        return (value,), False
    if not isinstance(value, list) or not value:
        raise invalid("'input' must be text, a list of texts, token ids, or a list of token-id lists.", "input")
    if isinstance(value[0], (int, float)):
        return (fields.token_ids("input"),), False
    if len(value) > MAX_INPUTS:
        raise invalid(f"'input' has {len(value)} inputs; at most {MAX_INPUTS} are taken.", "input")
    inputs: list[str | tuple[int, ...]] = []
    for i, item in enumerate(value):
        where = f"input[{i}]"
        if not isinstance(item, (str, list)):
            raise invalid(f"'{where}' must be text or a list of token ids.", where)
        if not item:
            raise invalid(f"'{where}' is empty.", where)
        inputs.append(item if isinstance(item, str) else tuple(fields.token_id(one, where) for one in item))
    return tuple(inputs), True
