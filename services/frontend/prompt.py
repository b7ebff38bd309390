"""Prompts: what clients send as text, messages or ids becomes token ids and block keys. Pure."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from baton.engine.openai.prompt import whole_characters
from baton.errors import BatonError, Reason
from baton.kv.keys import block_keys
from baton.model.card import Model
from services.frontend.owner import NOBODY, Owner
from services.frontend.token_cache import TokenCache

_HERE = "\ue000\ue001\ue000"
"""Marks where a continued message stops, whatever a template puts after it."""


@dataclass(frozen=True)
class Prompt:
    """A prompt's tokens and the keys of its full blocks. `text` is the client's, or what its ids say when it is echoed.

    `reused` of its tokens were known from earlier chats. `root` is what its keys begin with, `tenant` whose it is.
    """

    ids: Sequence[int]
    keys: tuple[bytes, ...]
    text: str
    reused: int = field(default=0, compare=False)
    root: bytes = b""
    tenant: str = ""


class Prompts:
    """Makes prompts of one model. Thread-safe. `limit`: tokens that prompt and output may have together."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self.cache = TokenCache(model.tokenizer)
        vocabulary = range(model.tokenizer.vocab_size)
        self._common_root = model.key_root()
        self._longest_token = max((len(model.tokenizer.token_bytes(i)) for i in vocabulary), default=1)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any],
        limit: int,
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        generation_prompt: bool = True,
        continue_final: bool = False,
        add_special: bool = False,
        param: str = "messages",
        owner: Owner = NOBODY,
    ) -> Prompt:
        """The prompt of a conversation. `continue_final` ends it where the last message stops. `param`: the field that
        the messages came from.

        Raises BatonError (template's refusal, too long).
        """
        if continue_final:
            messages = [*messages[:-1], {**messages[-1], "content": messages[-1]["content"] + _HERE}]
        text = self._model.template.render(
            messages, add_generation_prompt=generation_prompt, variables=variables, tools=tools
        )
        if continue_final:
            text, found, _ = text.rpartition(_HERE)
            if not found:
                raise BatonError(
                    Reason.INVALID_REQUEST,
                    "This model's chat template does not show the last message as it is.",
                    param="continue_final_message",
                )
        return self._text(text, add_special, param, limit, owner, chat=True)

    def text(
        self, text: str, limit: int, *, add_special: bool = True, param: str = "prompt", owner: Owner = NOBODY
    ) -> Prompt:
        """The prompt of raw text, with the BOS the model expects. Raises BatonError (too long, empty)."""
        return self._text(text, add_special, param, limit, owner)

    def ids(
        self, ids: Sequence[int], limit: int, *, spelled: bool, param: str = "prompt", owner: Owner = NOBODY
    ) -> Prompt:
        """A prompt that came as ids of the vocabulary; `spelled`: with its text. Raises BatonError (too long)."""
        if len(ids) >= limit:
            raise too_long(limit, len(ids), param)
        return self._made(ids, self._model.tokenizer.spell(ids) if spelled else "", 0, owner)

    def parted(self, prompt: Prompt) -> bool:
        """Whether it has a tenant or a salt: only those with the same find its KV."""
        return prompt.root not in (b"", self._common_root)

    def extended(self, prompt: Prompt, emitted: Sequence[int]) -> tuple[bytes, ...]:
        """Block keys of the prompt together with output that a resume counts as prompt."""
        return tuple(block_keys(prompt.root, [*prompt.ids, *emitted])) if emitted else prompt.keys

    def joined(self, received: Sequence[int], text: str) -> list[int]:
        """Output that came as tokens and then as text, as the tokens that a resume counts as prompt.

        A character that the tokens only began is in the text as a whole.
        """
        tokenizer = self._model.tokenizer
        return [*whole_characters(tokenizer, received), *tokenizer.encode_continuation(text)]

    def _text(
        self, text: str, add_special: bool, param: str, limit: int, owner: Owner, *, chat: bool = False
    ) -> Prompt:
        # No token is longer than the longest: a text of more bytes needs no tokenising to be refused.
        least = len(text.encode()) // self._longest_token
        if least > limit:
            raise too_long(limit, least, param, at_least=True)
        ids: Sequence[int]
        if chat and not add_special:
            ids, reused = self.cache.encode(text)
        else:
            ids, reused = self._model.tokenizer.encode(text, add_special=add_special), 0
        if not ids:
            raise BatonError(Reason.INVALID_REQUEST, "The prompt is empty.", param=param)
        if len(ids) >= limit:
            raise too_long(limit, len(ids), param)
        return self._made(ids, text, reused, owner)

    def _made(self, ids: Sequence[int], text: str, reused: int, owner: Owner) -> Prompt:
        root = self._model.key_root(salt=owner.salt)
        return Prompt(array("I", ids), tuple(block_keys(root, ids)), text, reused, root, owner.tenant)


def too_long(
    limit: int, tokens: int, param: str, *, completion: int = 0, at_least: bool = False, blamed: str = ""
) -> BatonError:
    """CONTEXT_LENGTH_EXCEEDED in the words that OpenAI's clients know. `blamed`: the field at fault, if not `param`."""
    about = "at least " if at_least else ""
    asked = f"{about}{tokens + completion} tokens ({about}{tokens} in the {param}, {completion} in the completion)"
    if not completion:
        asked = f"{about}{tokens} tokens in the {param}, and at least 1 for the completion"
    return BatonError(
        Reason.CONTEXT_LENGTH_EXCEEDED,
        f"This model's maximum context length is {limit} tokens. However, you requested {asked}. "
        f"Please reduce {blamed or f'the length of the {param}'}.",
        param=blamed or param,
    )
