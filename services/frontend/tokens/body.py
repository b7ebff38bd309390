"""Bodies of `/tokenize` and `/detokenize` (vLLM's endpoints), answered where they are read: in a thread or a process.

A text is bounded in bytes, for tokenising it takes time in proportion: more than anybody can send to the model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from baton.errors import BatonError, Reason
from baton.model.card import Model
from services.frontend.errors import invalid
from services.frontend.fields import Fields
from services.frontend.messages import read_messages
from services.frontend.prompt import Prompts
from services.frontend.tools import Tools, read_tools

LEAST_BYTES = 1 << 20
TOKEN_BYTES = 16
"""Bytes for each token of the context, where that is more."""
_UNLIMITED = 1 << 40
_encode = msgspec.json.Encoder().encode


class Conversations(Protocol):
    """Who knows how messages are put to this model (`Voices`)."""

    def conversation(
        self, messages: Sequence[Mapping[str, Any]], tools: Tools | None
    ) -> tuple[Sequence[Mapping[str, Any]], list[dict[str, Any]] | None]:
        """Messages and tools for the chat template."""


@dataclass(frozen=True)
class TokenizeBody:
    """A text, or a conversation."""

    text: str | None
    messages: tuple[Mapping[str, Any], ...]
    variables: Mapping[str, Any]
    generation_prompt: bool
    continue_final: bool
    add_special: bool
    spelled: bool
    tools: Tools | None


def parse_tokenize(raw: Mapping[str, Any]) -> TokenizeBody:
    """Check a body. Raises BatonError(INVALID_REQUEST) with the field at fault."""
    fields = Fields(raw, 0)
    spelled = fields.boolean("return_token_strs")
    text, given = raw.get("prompt"), raw.get("messages")
    if (text is None) == (given is None):
        raise invalid("Give either 'prompt' or 'messages'.", "prompt" if given is None else "messages")
    if given is None:
        if not isinstance(text, str):
            raise invalid("'prompt' must be a string.", "prompt")
        add_special = fields.boolean("add_special_tokens", default=True)
        return TokenizeBody(text, (), {}, False, False, add_special, spelled, None)
    messages = read_messages(given)
    continue_final = fields.boolean("continue_final_message")
    generation_prompt = fields.boolean("add_generation_prompt", default=not continue_final)
    if continue_final and generation_prompt:
        raise invalid("'continue_final_message' excludes 'add_generation_prompt'.", "continue_final_message")
    if continue_final and messages[-1]["role"] != "assistant":
        raise invalid("'continue_final_message' needs a last message of the assistant.", "continue_final_message")
    return TokenizeBody(
        None,
        messages,
        fields.object("chat_template_kwargs"),
        generation_prompt,
        continue_final,
        fields.boolean("add_special_tokens"),
        spelled,
        read_tools(raw),
    )


def read_tokenize(
    raw: Mapping[str, Any], model: Model, conversations: Conversations, prompts: Prompts, limit: int
) -> bytes:
    """The answer: `count`, `max_model_len` (the context, `limit`), `tokens`, `token_strs`. Raises BatonError."""
    body = parse_tokenize(raw)
    if body.text is not None:
        _check_size(len(body.text.encode()), limit, "prompt")
        ids: Sequence[int] = model.tokenizer.encode(body.text, add_special=body.add_special)
    else:
        messages, offered = conversations.conversation(body.messages, body.tools)
        _check_size(sum(len(m["content"].encode()) for m in messages if m.get("content")), limit, "messages")
        prompt = prompts.chat(
            messages,
            body.variables,
            _UNLIMITED,
            offered,
            generation_prompt=body.generation_prompt,
            continue_final=body.continue_final,
            add_special=body.add_special,
        )
        ids = list(prompt.ids)
    spelled = [model.tokenizer.backend.id_to_token(i) for i in ids] if body.spelled else None
    return _encode({"count": len(ids), "max_model_len": limit, "tokens": ids, "token_strs": spelled})


def parse_detokenize(raw: Mapping[str, Any], vocab_size: int) -> tuple[int, ...]:
    """The ids of a body. Raises BatonError(INVALID_REQUEST)."""
    if raw.get("tokens") is None:
        raise invalid("You must provide 'tokens'.", "tokens")
    return Fields(raw, vocab_size).token_ids("tokens")


def read_detokenize(raw: Mapping[str, Any], model: Model, _: Conversations, __: Prompts, limit: int) -> bytes:
    """The answer: `prompt`, control tokens included. Raises BatonError."""
    ids = parse_detokenize(raw, model.tokenizer.vocab_size)
    _check_size(len(ids), limit, "tokens")
    return _encode({"prompt": model.tokenizer.decode(ids, skip_special=False)})


def _check_size(size: int, limit: int, param: str) -> None:
    most = max(LEAST_BYTES, TOKEN_BYTES * limit)
    if size > most:
        unit = "tokens" if param == "tokens" else "bytes"
        raise BatonError(Reason.INVALID_REQUEST, f"'{param}' has {size} {unit}; at most {most} are taken.", param=param)
