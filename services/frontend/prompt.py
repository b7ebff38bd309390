"""Prompts: templates and tokenising in a small pool of threads, so that a long prompt never holds up a stream."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from baton.errors import BatonError, Reason
from baton.kv.keys import block_keys
from baton.model.card import Model

THREADS = 2
MAX_WAITING = 512
"""Prompts that may wait for a thread; more are refused with NO_CAPACITY."""


@dataclass(frozen=True)
class Prompt:
    """A prompt's tokens and the keys of its full blocks. `text` is the client's, or what its ids say."""

    ids: tuple[int, ...]
    keys: tuple[bytes, ...]
    text: str


class PromptPool:
    """Turns what clients send into `Prompt`s. `close` waits for the threads."""

    def __init__(self, model: Model, context_length: Callable[[], int]) -> None:
        """`context_length` gives the limit of the moment: the model's, or less when the workers hold less."""
        self._model = model
        self._context_length = context_length
        self._root = model.key_root()
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="prompt")
        self._waiting = 0
        vocabulary = range(model.tokenizer.vocab_size)
        self._longest_token = max((len(model.tokenizer.token_bytes(i)) for i in vocabulary), default=1)

    async def chat(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> Prompt:
        """The prompt of a conversation. Raises BatonError (template's refusal, too long, no capacity)."""
        return await self._run(self._chat, messages, variables)

    async def text(self, text: str) -> Prompt:
        """The prompt of raw text, with the BOS the model expects. Raises BatonError (too long, empty, no capacity)."""
        return await self._run(self._text, text, True, "prompt")

    async def ids(self, ids: Sequence[int]) -> Prompt:
        """A prompt that came as token ids. Raises BatonError (outside the vocabulary, too long, no capacity)."""
        return await self._run(self._ids, ids)

    def extended(self, prompt: Prompt, emitted: Sequence[int]) -> tuple[bytes, ...]:
        """Block keys of the prompt together with output that a resume counts as prompt."""
        return tuple(block_keys(self._root, [*prompt.ids, *emitted])) if emitted else prompt.keys

    def close(self) -> None:
        """Stop the threads; queued prompts are dropped."""
        self._threads.shutdown(wait=True, cancel_futures=True)

    async def _run(self, work: Callable[..., Prompt], *args: Any) -> Prompt:
        if self._waiting >= MAX_WAITING:
            raise BatonError(Reason.NO_CAPACITY, "Too many prompts are waiting to be tokenised.")
        self._waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work, *args)
        finally:
            self._waiting -= 1

    def _chat(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> Prompt:
        return self._text(self._model.template.render(messages, variables=variables), False, "messages")

    def _text(self, text: str, add_special: bool, param: str) -> Prompt:
        # No token is longer than the longest: a text of more bytes needs no tokenising to be refused.
        limit = self._context_length()
        least = len(text.encode()) // self._longest_token
        if least > limit:
            raise too_long(limit, least, param, at_least=True)
        ids = self._model.tokenizer.encode(text, add_special=add_special)
        if not ids:
            raise BatonError(Reason.INVALID_REQUEST, "The prompt is empty.", param=param)
        return self._made(ids, text, param)

    def _ids(self, ids: Sequence[int]) -> Prompt:
        vocabulary = self._model.tokenizer.vocab_size
        if not all(0 <= i < vocabulary for i in ids):
            raise BatonError(
                Reason.INVALID_REQUEST, f"Token ids must be between 0 and {vocabulary - 1}.", param="prompt"
            )
        return self._made(ids, self._model.tokenizer.decode(ids, skip_special=False), "prompt")

    def _made(self, ids: Sequence[int], text: str, param: str) -> Prompt:
        limit = self._context_length()
        if len(ids) >= limit:
            raise too_long(limit, len(ids), param)
        return Prompt(tuple(ids), tuple(block_keys(self._root, ids)), text)


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
