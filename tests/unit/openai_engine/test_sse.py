"""The parser: the same events however the bytes are cut, and nothing without bound."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.engine.openai.sse import EventParser, TooLargeError

DATA = st.lists(st.binary(min_size=1, max_size=30).filter(lambda b: b"\n" not in b and b"\r" not in b), max_size=6)
END = st.sampled_from([b"\n", b"\r\n", b"\r"])


def parse(stream: bytes, cuts: list[int]) -> list[bytes]:
    parser, out, start = EventParser(), [], 0
    for cut in [*sorted(c % (len(stream) + 1) for c in cuts), len(stream)]:
        out += parser.feed(stream[start:cut])
        start = max(start, cut)
    return out


@given(DATA, END, st.lists(st.integers(0, 400), max_size=12))
def test_events_do_not_depend_on_how_the_bytes_arrive(data: list[bytes], end: bytes, cuts: list[int]) -> None:
    stream = b"".join(b": ping" + end + b"data: " + one + end + b"id: 7" + end + end for one in data)
    assert parse(stream, cuts) == data


@given(st.lists(st.binary(max_size=200), max_size=8))
def test_whatever_comes_it_gives_events_or_says_too_large(pieces: list[bytes]) -> None:
    parser = EventParser(limit=100)
    try:
        for piece in pieces:
            assert all(len(event) <= 100 + 10 for event in parser.feed(piece))
    except TooLargeError:
        assert sum(map(len, pieces)) > 100


def test_lines_of_one_event_are_joined_and_a_comment_is_none() -> None:
    assert parse(b"data: a\ndata:b\n\n:\n\ndata\n\nevent: x\n\n", []) == [b"a\nb", b""]


@pytest.mark.parametrize("piece", [b"data: xxxxxxxxxx", b"data: xxxxxxxxxx\n"], ids=["one line", "many lines"])
def test_what_does_not_end_is_not_kept_for_ever(piece: bytes) -> None:
    parser = EventParser(limit=1000)

    def feed() -> None:
        for _ in range(200):
            list(parser.feed(piece))

    with pytest.raises(TooLargeError):
        feed()
