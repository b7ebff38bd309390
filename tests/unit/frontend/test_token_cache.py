"""Ids from the cache are those of the tokenizer, for any chat; the cache stays within its bytes."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.model.card import Model
from services.frontend.prompt import Prompts
from services.frontend.token_cache import TokenCache

SPICE = [
    "<|im_start|>",
    "<|im_end|>",
    "<|endoftext|>",
    "<|im_start",
    "|>",
    "user\n",
    "\n",
    "  ",
    "é",
    "e\u0301",
    "語",
    "😀",
]
contents = st.lists(st.sampled_from(SPICE) | st.text(max_size=6), max_size=8).map("".join)
messages = st.builds(
    lambda role, content: {"role": role, "content": content}, st.sampled_from(["user", "assistant", "system"]), contents
)


@pytest.fixture(scope="module")
def shared(model: Model) -> TokenCache:
    """One cache for all examples, too small for all of them."""
    return TokenCache(model.tokenizer, max_bytes=40_000)


@given(chat=st.lists(messages, min_size=1, max_size=6), data=st.data())
@settings(max_examples=200)
def test_cached_ids_are_the_tokenizers(model: Model, shared: TokenCache, chat: list[Any], data: st.DataObject) -> None:
    """Each turn of a random chat, whose contents try to look like the template."""
    for turn in range(1, len(chat) + 1):
        text = model.template.render(chat[:turn], add_generation_prompt=data.draw(st.booleans()))
        ids, reused = shared.encode(text)
        assert list(ids) == model.tokenizer.encode(text, add_special=False)
        assert 0 <= reused <= len(ids)
        assert shared.encode(text) == (ids, len(ids))
    assert shared.check_integrity() == []


def test_a_turn_reuses_the_turns_before_it(model: Model) -> None:
    prompts = Prompts(model)
    chat = [{"role": role, "content": f"{role} says {n} things"} for n in range(50) for role in ("user", "assistant")]
    for turn in range(1, 100, 2):
        prompt = prompts.chat(chat[:turn], {}, 8192)
        assert list(prompt.ids) == model.tokenizer.encode(prompt.text, add_special=False)
    new = len(model.tokenizer.encode(f"<|im_start|>assistant\n{chat[97]['content']}", add_special=False))
    new += len(model.tokenizer.encode(f"<|im_start|>user\n{chat[98]['content']}", add_special=False))
    assert len(prompt.ids) - prompt.reused == new
    assert prompts.cache.check_integrity() == []


def test_the_cache_is_bounded_and_keeps_what_was_used_last(model: Model) -> None:
    cache = TokenCache(model.tokenizer, max_bytes=10_000)
    for n in range(200):
        cache.encode(f"<|im_start|>number {n}")
        cache.encode("<|im_start|>stays")
        assert cache.held_bytes <= 10_000
    assert cache.encode("<|im_start|>number 0")[1] == 0
    ids, reused = cache.encode("<|im_start|>stays<|im_start|>number 199")
    assert reused == len(ids)
    huge = "<|im_start|>" + "word " * 1000
    assert cache.encode(huge)[1] == cache.encode(huge)[1] == 0
    assert cache.encode("") == (cache.encode("")[0], 0)
    assert cache.check_integrity() == []


def test_a_piece_that_repeats_is_tokenised_once_and_counted_as_new(model: Model) -> None:
    ids, reused = TokenCache(model.tokenizer).encode("<|im_end|>" * 50)
    assert (list(ids), reused) == ([2] * 50, 0)


def test_threads_share_it(model: Model) -> None:
    cache, wrong = TokenCache(model.tokenizer, max_bytes=8_000), []

    def work(offset: int) -> None:
        for n in range(60):
            text = "".join(f"<|im_start|>piece {(n * 7 + offset * k) % 40}" for k in range(6))
            if list(cache.encode(text)[0]) != model.tokenizer.encode(text, add_special=False):
                wrong.append(text)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert cache.check_integrity() == []


def test_a_message_is_continued_where_it_stops(model: Model) -> None:
    prompts = Prompts(model)
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "im_end is "}]
    prompt = prompts.chat(chat, {}, 8192, generation_prompt=False, continue_final=True)
    assert prompt.text.endswith("<|im_start|>assistant\nim_end is ")
    plain = prompts.chat(chat[:1], {}, 8192, generation_prompt=False)
    assert plain.text.endswith("hi<|im_end|>\n")
