"""Text to token ids and back. One class over the `tokenizers` library, whichever files the vocabulary came from."""

from __future__ import annotations

import codecs
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import tokenizers
from tokenizers.decoders import DecodeStream

from baton.model.errors import ModelError
from baton.model.files import ModelFiles, open_model
from baton.model.gguf_tokenizer import gguf_tokenizer
from baton.model.segments import Segmenter


class TextStream(Protocol):
    """Incremental decoding: each token gives the text that has become certain; bytes that are no character, none."""

    def push(self, token_id: int) -> str:
        """The text that this token completes; "" while a character is still missing bytes."""


def _byte_of_char() -> dict[str, int]:
    """The byte-level alphabet of GPT-2: printable bytes stand for themselves, the others for characters from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    table.update({chr(0x100 + i): byte for i, byte in enumerate(others)})
    return table


class _ByteStream:
    """Byte-level vocabularies: exact, and constant work for each token."""

    def __init__(self, tokenizer: Tokenizer, show_special: bool) -> None:
        self._tokenizer = tokenizer
        self._show_special = show_special
        self._decoder = codecs.getincrementaldecoder("utf-8")("ignore")

    def push(self, token_id: int) -> str:
        if self._tokenizer.is_special(token_id) and not self._show_special:
            return ""
        return self._decoder.decode(self._tokenizer.token_bytes(token_id))


class _LibraryStream:
    """Any other vocabulary: the library's own stream, which holds back what is not yet a whole character."""

    def __init__(self, tokenizer: Tokenizer, show_special: bool) -> None:
        self._backend = tokenizer.backend
        self._stream = DecodeStream(skip_special_tokens=not show_special)

    def push(self, token_id: int) -> str:
        return (self._stream.step(self._backend, token_id) or "").replace("\ufffd", "")


class Tokenizer:
    """A vocabulary and its rules. Thread-safe: nothing changes after construction.

    `digest` names the files' content: equal digests mean equal token ids for every text.
    """

    def __init__(self, backend: tokenizers.Tokenizer, digest: str, *, bos: str = "", eos: str = "") -> None:
        self.backend = backend
        self.digest = digest
        self.bos_token = bos
        self.eos_token = eos
        self.vocab_size = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        added = backend.get_added_tokens_decoder()
        self._special = frozenset(i for i, token in added.items() if token.special)
        self._added = {i: token.content for i, token in added.items()}
        self._alphabet = _byte_of_char() if "ByteLevel" in repr(backend.decoder) else None
        self.segmenter = Segmenter(added.values())

    def encode(self, text: str, *, add_special: bool) -> list[int]:
        """Token ids of `text`; `add_special` adds what the model expects around raw text (a BOS), never for a chat."""
        # As a batch of one: the library keeps the interpreter's lock for a single text (measured: 0.1 s for 256 KB).
        (encoded,) = self.backend.encode_batch_fast([text], add_special_tokens=add_special)
        return list(encoded.ids)

    def encode_pieces(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text, nothing added."""
        return [list(one.ids) for one in self.backend.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """The text of `ids` at once (malformed bytes become U+FFFD)."""
        (text,) = self.backend.decode_batch([list(ids)], skip_special_tokens=skip_special)
        return str(text)

    def stream(self, *, show_special: bool = False) -> TextStream:
        """A fresh incremental decoder for one output; special tokens are text only with `show_special`."""
        kind = _ByteStream if self._alphabet is not None else _LibraryStream
        return kind(self, show_special)

    def spell(self, ids: Sequence[int]) -> str:
        """The text of `ids`, special tokens included; malformed bytes are left out."""
        push = self.stream(show_special=True).push
        return "".join([push(token_id) for token_id in ids])

    def is_special(self, token_id: int) -> bool:
        """Whether the token is a control token, which text does not show unless it is asked to."""
        return token_id in self._special

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes one token stands for; b"" for an id outside the vocabulary."""
        if token_id in self._added:
            return self._added[token_id].encode()
        token = self.backend.id_to_token(token_id)
        if token is None:
            return b""
        if self._alphabet is not None:
            try:
                return bytes([self._alphabet[char] for char in token])
            except KeyError:
                return token.encode()
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            try:
                return bytes([int(token[3:5], 16)])
            except ValueError:
                return token.encode()
        return token.replace("\u2581", " ").encode()


def load_tokenizer(model: str | Path | ModelFiles) -> Tokenizer:
    """The tokenizer of a model: its directory's tokenizer.json, or built from the metadata of its GGUF file.

    Raises ModelError when there is none or its kind is not supported (the kind is named).
    """
    files = model if isinstance(model, ModelFiles) else open_model(model)
    if files.gguf is not None:
        built = gguf_tokenizer(files.gguf.metadata)
        return Tokenizer(built.backend, built.digest, bos=built.bos, eos=built.eos)
    path = files.path / "tokenizer.json"
    if not path.is_file():
        raise ModelError(f"{files.path} has no tokenizer.json")
    raw = path.read_bytes()
    try:
        backend = tokenizers.Tokenizer.from_str(raw.decode("utf-8"))
    except Exception as error:  # the library raises bare Exception
        raise ModelError(f"{path} cannot be loaded: {error}") from error
    # A prompt is never cut or padded behind the caller's back.
    backend.no_truncation()
    backend.no_padding()
    digest = hashlib.blake2b(raw, digest_size=16).hexdigest()
    config = files.tokenizer_config
    return Tokenizer(backend, digest, bos=_content(config.get("bos_token")), eos=_content(config.get("eos_token")))


def _content(token: Any) -> str:
    """A special token in tokenizer_config.json: a string, or an object with its content, or null."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else ""
