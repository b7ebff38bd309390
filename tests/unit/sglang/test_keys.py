"""Keys of SGLang's pages: equal exactly when everything that decides the bytes is equal."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.engine.sglang.keys import PageKeys
from baton.kv.keys import KEY_BYTES, Namespace, block_keys

TEXT = st.text(max_size=6)


@given(st.lists(st.tuples(TEXT, TEXT, TEXT, st.integers(0, 20), st.integers(0, 20)), min_size=2, max_size=2))
def test_two_instances_share_a_key_only_when_all_is_equal(who: list[tuple[str, str, str, int, int]]) -> None:
    one, other = (PageKeys(*each).key("00ff") for each in who)
    assert (one == other) == (who[0] == who[1])
    assert len(one) == KEY_BYTES


def test_parts_cannot_run_together() -> None:
    names = ["", "1", "11", "a1"]
    made = {PageKeys(w, t, f, tp, pp).key("x") for w, t, f, tp, pp in product(names, names, names, (1, 11), (1, 11))}
    assert len(made) == len(names) ** 3 * 4


def test_pages_of_one_prompt_differ_and_are_no_block_of_ours() -> None:
    keys = PageKeys("w", "", "f", 0, 0)
    named = keys.keys(["a", "b"])
    assert named == [keys.key("a"), keys.key("b")]
    assert named[0] != named[1]
    assert not set(named) & set(block_keys(Namespace("w", "").root(), range(64)))


@pytest.mark.parametrize("wrong", ["", "f" * 2000])
def test_what_is_no_hash_is_refused(wrong: str) -> None:
    with pytest.raises(ValueError, match="a page's hash has 1 to 1024 characters"):
        PageKeys("w", "", "f", 0, 0).key(wrong)
