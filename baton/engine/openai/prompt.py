"""A prompt as an upstream takes it: token ids, or their text for a server that takes nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from baton.model.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"
LONGEST_CHARACTER = 4
"""Bytes, and so tokens, that a character may be cut into."""


class PromptForm(StrEnum):
    """How prompts go to the upstream."""

    TOKENS = "tokens"
    TEXT = "text"


def whole_characters(tokenizer: Tokenizer, emitted: Sequence[int]) -> list[int]:
    """`emitted` without the tokens at its end that are only a part of a character: an upstream that answers text says
    the whole character again. Replacement characters that the model itself made stay."""
    ids = list(emitted)
    for cut in range(1, min(LONGEST_CHARACTER, len(ids) + 1)):
        if not tokenizer.decode(ids[-LONGEST_CHARACTER:]).endswith(REPLACEMENT):
            return ids
        if not tokenizer.decode(ids[:-cut][-LONGEST_CHARACTER:]).endswith(REPLACEMENT):
            return ids[:-cut]
    return ids


def as_upstream_takes(
    tokenizer: Tokenizer, form: PromptForm, prompt: Sequence[int], emitted: Sequence[int]
) -> str | list[int]:
    """Prompt and what was emitted, as one. As text without the token that the server itself puts at the beginning."""
    ids = [*prompt, *whole_characters(tokenizer, emitted)]
    if form is PromptForm.TOKENS:
        return ids
    added = tokenizer.encode("", add_special=True)
    if len(added) == 1 and ids[:1] == added:
        ids = ids[1:]
    return tokenizer.decode(ids, skip_special=False)
