"""Prompts: what clients send as text, messages or ids becomes token ids and block keys. Pure."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from baton.errors import BatonError, Reason
from baton.kv.keys import block_keys
from baton.model.card import Model


@dataclass(frozen=True)
class Prompt:
    """A prompt's tokens and the keys of its full blocks. `text` is the client's, or what its ids say."""

    ids: Sequence[int]
    keys: tuple[bytes, ...]
    text: str


class Prompts:
    """Makes prompts of one model. Thread-safe. `limit`: tokens that prompt and output may have together."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._root = model.key_root()
        vocabulary = range(model.tokenizer.vocab_size)
        self._longest_token = max((len(model.tokenizer.token_bytes(i)) for i in vocabulary), default=1)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any],
        limit: int,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> Prompt:
        """The prompt of a conversation. Raises BatonError (template's refusal, too long)."""
        text = self._model.template.render(messages, variables=variables, tools=tools)
        return self._text(text, False, "messages", limit)

    def text(self, text: str, limit: int) -> Prompt:
        """The prompt of raw text, with the BOS the model expects. Raises BatonError (too long, empty)."""
        return self._text(text, True, "prompt", limit)

    def ids(self, ids: Sequence[int], limit: int) -> Prompt:
        """A prompt that came as ids of the vocabulary. Raises BatonError (too long)."""
        if len(ids) >= limit:
            raise too_long(limit, len(ids), "prompt")
        return self._made(ids, self._model.tokenizer.decode(ids, skip_special=False))

    def extended(self, prompt: Prompt, emitted: Sequence[int]) -> tuple[bytes, ...]:
        """Block keys of the prompt together with output that a resume counts as prompt."""
        return tuple(block_keys(self._root, [*prompt.ids, *emitted])) if emitted else prompt.keys

    def _text(self, text: str, add_special: bool, param: str, limit: int) -> Prompt:
        # No token is longer than the longest: a text of more bytes needs no tokenising to be refused.
        least = len(text.encode()) // self._longest_token
        if least > limit:
            raise too_long(limit, least, param, at_least=True)
        ids = self._model.tokenizer.encode(text, add_special=add_special)
        if not ids:
            raise BatonError(Reason.INVALID_REQUEST, "The prompt is empty.", param=param)
        if len(ids) >= limit:
            raise too_long(limit, len(ids), param)
        return self._made(ids, text)

    def _made(self, ids: Sequence[int], text: str) -> Prompt:
        return Prompt(array("I", ids), tuple(block_keys(self._root, ids)), text)


def too_long(limit: int, tokens: int, param: str, *, completion: int = 0, at_least: bool = False) -> BatonError:
    """CONTEXT_LENGTH_EXCEEDED in the words that OpenAI's clients know."""
    about = "at least " if at_least else ""
    asked = f"{about}{tokens + completion} tokens ({about}{tokens} in the {param}, {completion} in the completion)"
    if not completion:
        asked = f"{about}{tokens} tokens in the {param}, and at least 1 for the completion"
    return BatonError(
        Reason.CONTEXT_LENGTH_EXCEEDED,
        f"This model's maximum context length is {limit} tokens. However, you requested {asked}. "
        f"Please reduce the length of the {param}.",
        param=param,
    )
