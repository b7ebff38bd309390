"""Texts are cut only where their pieces, tokenised alone, give the ids of the whole: on every kind of vocabulary."""

from __future__ import annotations

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers, processors

from baton.model.segments import Segmenter

TOKENS = ["<|a|>", "<|a|>>", "<|b|>", "[X]", "語", "\n\n"]
"""One begins like another; one is a word's character; one is spaces."""
words = st.sampled_from(
    [*TOKENS, " ", "  ", "\n", "a", "b1", " the", "é", "e\u0301", "<|", "|>", "<|a", "語学", "😀", "x"]
)
texts = st.lists(words | st.text(max_size=4), max_size=24).map("".join)


def _backend(kind: str) -> tokenizers.Tokenizer:
    """A vocabulary of single characters and bytes, made as the families make theirs."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    if kind == "unigram":
        pieces = [
            ("<unk>", 0.0),
            ("▁", -1.0),
            *((chr(c), -2.0) for c in range(32, 127)),
            ("▁the", -0.5),
            ("語学", -0.5),
        ]
        backend = tokenizers.Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=False))
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    elif kind == "prepend":
        vocab = {"<unk>": 0} | {chr(c): c - 31 for c in range(32, 127)} | {"▁": 200, "▁a": 201}
        backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[("▁", "a")], unk_token="<unk>"))
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        merges = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("a", "a")]
        vocab = {piece: i for i, piece in enumerate([*alphabet, "th", "the", "Ġthe", "aa"])}
        backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
        if kind == "qwen":
            backend.normalizer = normalizers.NFC()
            split = pre_tokenizers.Split(Regex(r"\s+(?!\S)|\s+|[^\s]+"), behavior="isolated")
            backend.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
        else:
            backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=kind == "prefix")
    backend.add_special_tokens([AddedToken(t, normalized=False) for t in TOKENS[:4]])
    backend.add_tokens([AddedToken(t, normalized=False) for t in TOKENS[4:]])
    backend.add_tokens([AddedToken("the", normalized=True), AddedToken("e\u0301", normalized=True)])
    backend.post_processor = processors.TemplateProcessing("<|b|> $A", special_tokens=[("<|b|>", 0)])
    return backend


@pytest.fixture(scope="module", params=["gpt2", "prefix", "qwen", "unigram", "prepend"])
def backend(request: pytest.FixtureRequest) -> tokenizers.Tokenizer:
    return _backend(request.param)


@given(text=texts)
@settings(max_examples=150)
def test_pieces_give_the_ids_of_the_whole(backend: tokenizers.Tokenizer, text: str) -> None:
    pieces = Segmenter(backend.get_added_tokens_decoder().values()).cut(text)
    assert "".join(pieces) == text
    assert all(pieces)
    assert all(piece.startswith(tuple(TOKENS)) for piece in pieces[1:])
    whole = backend.encode(text, add_special_tokens=False).ids
    assert [i for p in pieces for i in backend.encode(p, add_special_tokens=False).ids] == whole


@pytest.mark.parametrize("flag", ["lstrip", "rstrip", "single_word"])
def test_a_token_that_acts_beyond_itself_forbids_cutting(flag: str) -> None:
    segmenter = Segmenter([AddedToken("<a>", normalized=False), AddedToken("<b>", normalized=False, **{flag: True})])
    assert not segmenter.cuts
    assert segmenter.cut("x <a> y") == ["x <a> y"]
    assert segmenter.cut("") == []


def test_tokens_of_normalised_text_are_no_place_to_cut() -> None:
    segmenter = Segmenter([AddedToken("<a>", normalized=True), AddedToken("<b>", normalized=False)])
    assert segmenter.cut("x<a>y<b>z") == ["x<a>y", "<b>z"]
