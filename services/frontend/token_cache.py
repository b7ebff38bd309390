"""Token ids of pieces of rendered chats, so that turn 50 of a chat tokenises one turn and not all 50.

A rendered chat is cut where tokenising begins anew (`baton.model.segments`): with ChatML each message is a piece. What
a piece's ids are depends on nothing around it, so a piece is found again in any chat and at any place, by its whole
text: there is no key that could collide. The least recently used go when the bytes are spent.
"""

from __future__ import annotations

import threading
from array import array
from collections import OrderedDict

from baton.model.tokenizer import Tokenizer

MAX_BYTES = 64 << 20
LARGEST = 1 / 8
"""Of the cache: what is larger is not kept, or one text would drive out all others."""
ENTRY_BYTES = 256
"""What one entry costs beside its text and ids (measured: 240)."""
ID_BYTES = 4


class TokenCache:
    """Thread-safe. `max_bytes` bounds texts and ids together."""

    def __init__(self, tokenizer: Tokenizer, max_bytes: int = MAX_BYTES) -> None:
        self._tokenizer = tokenizer
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._known: OrderedDict[str, array[int]] = OrderedDict()
        self._bytes = 0

    @property
    def held_bytes(self) -> int:
        """Bytes of texts and ids."""
        return self._bytes

    def encode(self, text: str) -> tuple[array[int], int]:
        """Token ids of `text`, nothing added, and how many of them needed no tokenising."""
        if not self._tokenizer.segmenter.cuts:
            return array("I", self._tokenizer.encode(text, add_special=False)), 0
        pieces = self._tokenizer.segmenter.cut(text)
        with self._lock:
            found = {piece: self._take(piece) for piece in pieces}
        missing = [piece for piece, ids in found.items() if ids is None]
        fresh = {p: array("I", ids) for p, ids in zip(missing, self._tokenizer.encode_pieces(missing), strict=True)}
        with self._lock:
            for piece, ids in fresh.items():
                self._keep(piece, ids)
        out, reused = array("I"), 0
        for piece in pieces:
            known = found[piece]
            reused += 0 if known is None else len(known)
            out += fresh[piece] if known is None else known
        return out, reused

    def _take(self, piece: str) -> array[int] | None:
        ids = self._known.get(piece)
        if ids is not None:
            self._known.move_to_end(piece)
        return ids

    def _keep(self, piece: str, ids: array[int]) -> None:
        size = _size(piece, ids)
        if size > self._max_bytes * LARGEST or piece in self._known:
            return
        self._known[piece] = ids
        self._bytes += size
        while self._bytes > self._max_bytes:
            self._bytes -= _size(*self._known.popitem(last=False))

    def check_integrity(self) -> list[str]:
        """What does not add up, in words."""
        with self._lock:
            held = sum(_size(piece, ids) for piece, ids in self._known.items())
            if held != self._bytes or held > self._max_bytes:
                return [f"token cache: {held} bytes held, {self._bytes} counted, {self._max_bytes} allowed"]
        return []


def _size(piece: str, ids: array[int]) -> int:
    # A string takes 1, 2 or 4 bytes a character, by its widest one.
    width = 1 if piece.isascii() else 4
    return len(piece) * width + len(ids) * ID_BYTES + ENTRY_BYTES
