"""JSON that stays one line for whoever splits text into lines.

Many clients read a stream with their HTTP library's lines, and httpx for one ends a line wherever Unicode does (as
Python's `str.splitlines`). JSON escapes control characters below U+0020 itself; these three it may leave.
"""

from __future__ import annotations

_ENDS = ((b"\xc2\x85", b"\\u0085"), (b"\xe2\x80\xa8", b"\\u2028"), (b"\xe2\x80\xa9", b"\\u2029"))


def one_line(json: bytes) -> bytes:
    """The same value, as UTF-8 JSON without a character that ends a line."""
    for end, escaped in _ENDS:
        if end in json:
            json = json.replace(end, escaped)
    return json
