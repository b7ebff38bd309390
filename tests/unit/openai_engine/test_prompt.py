"""Prompts as an upstream takes them: the same ids, or a text that is tokenised to them again."""

from __future__ import annotations

import pytest

from baton.engine.openai.prompt import PromptForm, as_upstream_takes, whole_characters
from baton.model.card import Model

TEXTS = ["Hello there", "<|im_start|>user\nhi<|im_end|>\n", "naïve 🙂 text", " leading", "a\n\nb"]


@pytest.mark.parametrize("text", TEXTS)
def test_text_is_what_the_ids_say(model: Model, text: str) -> None:
    ids = model.tokenizer.encode(text, add_special=False)
    assert as_upstream_takes(model.tokenizer, PromptForm.TOKENS, ids, ()) == ids
    assert as_upstream_takes(model.tokenizer, PromptForm.TEXT, ids, ()) == text


def test_an_output_cut_within_a_character_goes_back_to_its_last_whole_one(model: Model) -> None:
    tokenizer = model.tokenizer
    ids = tokenizer.encode("ok 𒀀", add_special=False)
    whole = [n for n in range(len(ids) + 1) if "\ufffd" not in tokenizer.decode(ids[:n])]
    assert len(whole) < len(ids) + 1, "the character is of more tokens than one"
    for n in range(len(ids) + 1):
        assert whole_characters(tokenizer, ids[:n]) == ids[: max(w for w in whole if w <= n)]


@pytest.mark.parametrize("text", TEXTS)
def test_a_continuation_is_the_text_again(model: Model, text: str) -> None:
    ids = model.tokenizer.encode_continuation(text)
    assert model.tokenizer.decode(ids, skip_special=False) == text
