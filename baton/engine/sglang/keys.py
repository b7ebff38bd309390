"""Names of SGLang's pages as block keys of ours.

SGLang names a page by a hash of all tokens up to its end, in hex, seeded with adapter and cache salt. That says what
was computed, but not by which weights nor on which rank, so our key is

    root = H(namespace(weights, tenant) ‖ "sglang" ‖ fingerprint ‖ tp rank ‖ pp rank)      parts length-prefixed
    key  = H(root ‖ page hash)

H is BLAKE2b-128 as everywhere. One page is one block, whatever its size: the page size is in the fingerprint (and in
SGLang's chain), so 32-token and 64-token pages of one prompt are different blocks under different keys. They are not
the keys of our own workers: SGLang's chain hashes other bytes, so no page of one is taken for a block of the other.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from baton.kv.keys import KEY_BYTES, Namespace

MAX_HASH_CHARS = 1024


class PageKeys:
    """Keys of one rank's pages. Pure: equal arguments give equal keys in every process."""

    def __init__(self, weights: str, tenant: str, fingerprint: str, tp_rank: int, pp_rank: int) -> None:
        parts = (b"sglang", fingerprint.encode(), str(tp_rank).encode(), str(pp_rank).encode())
        root = Namespace(weights=weights, tokenizer="", salt=tenant).root()
        self._root = _digest(root + b"".join(len(p).to_bytes(4, "little") + p for p in parts))

    def key(self, page_hash: str) -> bytes:
        """The key of the page with that hash. Raises ValueError when it is no page's hash."""
        if not page_hash or len(page_hash) > MAX_HASH_CHARS:
            raise ValueError(f"a page's hash has 1 to {MAX_HASH_CHARS} characters, not {len(page_hash)}")
        return _digest(self._root + page_hash.encode())

    def keys(self, page_hashes: Sequence[str]) -> list[bytes]:
        """Of several, in order."""
        return [self.key(page_hash) for page_hash in page_hashes]


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=KEY_BYTES).digest()
