"""Tokens of a batch, as OpenAI's batch object tells them: the sum of what its answers say. Pure."""

from __future__ import annotations

from typing import Any

import msgspec


class Usage(msgspec.Struct, frozen=True):
    """Tokens. `cached` are of the input, `reasoning` of the output."""

    input: int = 0
    output: int = 0
    cached: int = 0
    reasoning: int = 0

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            self.input + other.input,
            self.output + other.output,
            self.cached + other.cached,
            self.reasoning + other.reasoning,
        )

    def shown(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "input_tokens": self.input,
            "input_tokens_details": {"cached_tokens": self.cached},
            "output_tokens": self.output,
            "output_tokens_details": {"reasoning_tokens": self.reasoning},
            "total_tokens": self.input + self.output,
        }


NOTHING = Usage()


class _Cached(msgspec.Struct, frozen=True):
    cached_tokens: int = 0


class _Reasoning(msgspec.Struct, frozen=True):
    reasoning_tokens: int = 0


class _Told(msgspec.Struct, frozen=True):
    """`usage` of an answer: of a response, or of any other kind."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Cached = _Cached()
    input_tokens: int = 0
    output_tokens: int = 0
    input_tokens_details: _Cached = _Cached()
    output_tokens_details: _Reasoning = _Reasoning()


class Body(msgspec.Struct, frozen=True):
    """What is read of an answer, or of an error, which has none."""

    usage: _Told | None = None

    @property
    def tokens(self) -> Usage:
        """As the batch counts them."""
        told = self.usage or _Told()
        return Usage(
            told.prompt_tokens + told.input_tokens,
            told.completion_tokens + told.output_tokens,
            told.prompt_tokens_details.cached_tokens + told.input_tokens_details.cached_tokens,
            told.output_tokens_details.reasoning_tokens,
        )


_decode = msgspec.json.Decoder(Body).decode


def read_usage(body: bytes) -> Usage:
    """Of the body of an answer."""
    return _decode(body).tokens
