"""Stop strings against a naive oracle: whatever the cuts, the text before the first completed one, and no leak."""

from hypothesis import given
from hypothesis import strategies as st

from services.frontend.stops import StopStrings

_text = st.text(alphabet="abc", max_size=30)
_stops = st.lists(st.text(alphabet="abc", min_size=1, max_size=4), max_size=4)


def _oracle(text: str, stops: list[str]) -> tuple[str, bool]:
    for end in range(1, len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)], True
    return text, False


@given(_text, _stops, st.lists(st.integers(0, 5), max_size=30))
def test_any_cutting_gives_what_the_oracle_gives(text: str, stops: list[str], sizes: list[int]) -> None:
    expected, stopped = _oracle(text, stops)
    filter = StopStrings(stops)
    shown, rest = "", text
    for size in sizes:
        shown += filter.push(rest[:size])
        rest = rest[size:]
        # Nothing is shown that the whole text would not show.
        assert expected.startswith(shown)
    shown += filter.push(rest)
    assert filter.stopped == stopped
    if not stopped:
        # Held back is only what could still become a stop string.
        held = text[len(shown) :]
        assert not held or any(stop.startswith(held) and stop != held for stop in stops)
        shown += filter.flush()
    assert shown == expected


def test_nothing_comes_after_a_stop() -> None:
    filter = StopStrings(["b"])
    assert filter.push("ab") == "a"
    assert filter.push("c") == ""
    assert filter.flush() == ""


def test_without_stops_nothing_is_held() -> None:
    assert StopStrings([]).push("abc") == "abc"


def test_over_an_edge_and_a_near_miss() -> None:
    filter = StopStrings(["END"])
    assert filter.push("x E") == "x "
    assert filter.push("N") == ""
    assert filter.push("ENDy") == "EN"
    assert filter.stopped


@given(st.text(alphabet="ab", max_size=20), st.lists(st.integers(1, 4), max_size=20))
def test_a_stop_string_that_is_wanted_is_the_end_of_the_text(text: str, sizes: list[int]) -> None:
    hidden, shown = StopStrings(["aab", "bb"]), StopStrings(["aab", "bb"], include=True)
    out = ["", ""]
    for size in [*sizes, len(text) + 1]:
        piece, text = text[:size], text[size:]
        out = [out[0] + hidden.push(piece), out[1] + shown.push(piece)]
    assert hidden.stopped == shown.stopped
    if shown.stopped:
        assert out[1] in (out[0] + "aab", out[0] + "bb")
    else:
        assert out[0] + hidden.flush() == out[1] + shown.flush()
