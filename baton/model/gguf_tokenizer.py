"""A `tokenizers` tokenizer out of a GGUF file's metadata: byte-level BPE, its pre-tokenizer chosen by name."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from baton.model.errors import ModelError

_CONTROL, _USER_DEFINED, _UNUSED = 3, 4, 5

_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class _Kind:
    """How one family cuts text before BPE, and what else distinguishes it."""

    pre: Callable[[], pre_tokenizers.PreTokenizer]
    normalizer: Callable[[], normalizers.Normalizer] | None = None
    whole_words: bool = False
    """A word that is itself a token is taken whole, merges or not."""
    adds_bos: bool = False
    """When the metadata does not say."""


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _digits_then_gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _split(pattern: str) -> Callable[[], pre_tokenizers.PreTokenizer]:
    def make() -> pre_tokenizers.PreTokenizer:
        split = pre_tokenizers.Split(Regex(pattern), behavior="isolated", invert=False)
        return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])

    return make


_QWEN2_KIND = _Kind(_split(_QWEN2), normalizer=normalizers.NFC)
_LLAMA3_KIND = _Kind(_split(_LLAMA3), whole_words=True, adds_bos=True)
KINDS: dict[str, _Kind] = {
    "": _Kind(_gpt2),
    "default": _Kind(_gpt2),
    "gpt2": _Kind(_gpt2),
    "gpt-2": _Kind(_gpt2),
    "smollm": _Kind(_digits_then_gpt2),
    "qwen2": _QWEN2_KIND,
    "deepseek-r1-qwen": _QWEN2_KIND,
    "llama-bpe": _LLAMA3_KIND,
    "llama3": _LLAMA3_KIND,
    "llama-v3": _LLAMA3_KIND,
}
"""`tokenizer.ggml.pre` values that are understood."""


@dataclass(frozen=True)
class GgufTokenizer:
    """What was built, the digest of what it was built from, and the text of its BOS and EOS ("" = none)."""

    backend: tokenizers.Tokenizer
    digest: str
    bos: str
    eos: str


def gguf_tokenizer(metadata: Mapping[str, Any]) -> GgufTokenizer:
    """Build the tokenizer that a GGUF file's metadata describes.

    Raises ModelError naming the kind when it is not byte-level BPE or its pre-tokenizer is unknown, or the field that
    is missing or malformed.
    """
    model, pre = metadata.get("tokenizer.ggml.model", ""), metadata.get("tokenizer.ggml.pre", "")
    if model != "gpt2":
        raise ModelError(
            f"tokenizer kind {model!r} of this GGUF is not supported (only 'gpt2', byte-level BPE): "
            "use the model's safetensors directory with its tokenizer.json"
        )
    kind = KINDS.get(pre)
    if kind is None:
        known = ", ".join(sorted(filter(None, KINDS)))
        raise ModelError(f"pre-tokenizer {pre!r} of this GGUF is not supported (supported: {known})")
    tokens, merges = _strings(metadata, "tokens"), _strings(metadata, "merges")
    types = metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    if len(types) != len(tokens):
        raise ModelError(f"tokenizer.ggml.token_type has {len(types)} entries for {len(tokens)} tokens")

    vocab = {token: i for i, (token, kind_) in enumerate(zip(tokens, types, strict=True)) if kind_ != _UNUSED}
    pairs = [_pair(merge) for merge in merges]
    try:
        bpe = models.BPE(vocab=vocab, merges=pairs, ignore_merges=kind.whole_words)
    except Exception as error:  # the library raises bare Exception
        raise ModelError(f"the merges of this GGUF do not fit its tokens: {error}") from error
    backend = tokenizers.Tokenizer(bpe)
    if kind.normalizer is not None:
        backend.normalizer = kind.normalizer()
    backend.pre_tokenizer = kind.pre()
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([_added(t, special=True) for t, k in zip(tokens, types, strict=True) if k == _CONTROL])
    backend.add_tokens([_added(t, special=False) for t, k in zip(tokens, types, strict=True) if k == _USER_DEFINED])

    bos, eos = _special(metadata, "bos", tokens), _special(metadata, "eos", tokens)
    backend.post_processor = _post_processor(
        bos if metadata.get("tokenizer.ggml.add_bos_token", kind.adds_bos) else "",
        eos if metadata.get("tokenizer.ggml.add_eos_token", False) else "",
        vocab,
    )
    return GgufTokenizer(backend, _digest(metadata), bos, eos)


def _strings(metadata: Mapping[str, Any], name: str) -> list[str]:
    values = metadata.get(f"tokenizer.ggml.{name}")
    if not isinstance(values, list) or not values or not isinstance(values[0], str):
        raise ModelError(f"this GGUF has no tokenizer.ggml.{name}")
    return values


def _pair(merge: str) -> tuple[str, str]:
    # The second part of a merge never starts with a space: the alphabet has none.
    left, _, right = merge.partition(" ")
    return left, right


def _added(token: str, *, special: bool) -> AddedToken:
    return AddedToken(token, special=special, normalized=False)


def _special(metadata: Mapping[str, Any], name: str, tokens: list[str]) -> str:
    token_id = metadata.get(f"tokenizer.ggml.{name}_token_id")
    return tokens[token_id] if isinstance(token_id, int) and 0 <= token_id < len(tokens) else ""


def _post_processor(bos: str, eos: str, vocab: Mapping[str, int]) -> processors.PostProcessor:
    """Byte level first (it only moves offsets), then what is added around raw text."""
    if not bos and not eos:
        return processors.ByteLevel(trim_offsets=False)
    single = " ".join(filter(None, (bos and f"{bos}:0", "$A:0", eos and f"{eos}:0")))
    special = [(token, vocab[token]) for token in (bos, eos) if token]
    return processors.TemplateProcessing(single=single, pair=f"{single} $B:1", special_tokens=special)


def _digest(metadata: Mapping[str, Any]) -> str:
    """Over every tokenizer field, so that it does not depend on how this file builds the tokenizer."""
    fields = {k: v for k, v in metadata.items() if k.startswith("tokenizer.ggml.")}
    encoded = json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()
    return hashlib.blake2b(encoded, digest_size=16).hexdigest()
