"""Tokens become whole characters; log probabilities go with the text that is shown; ends are not shown."""

from hypothesis import given, settings
from hypothesis import strategies as st

from baton.model.card import Model
from baton.v1.worker_pb2 import Logprob
from services.frontend.detokenise import ChoiceText, Piece, Show


def _choice(model: Model, **changes: object) -> ChoiceText:
    fields = {"stops": (), "ends": frozenset({2}), "min_tokens": 0, "max_tokens": 1000} | changes
    return ChoiceText(model.tokenizer, **fields)  # type: ignore[arg-type]


def _logprobs(ids: list[int]) -> list[Logprob]:
    return [Logprob(token_id=i, logprob=-1.0) for i in ids]


def test_characters_split_over_tokens_come_whole(model: Model) -> None:
    ids = model.tokenizer.encode("a😀日本b", add_special=False)
    choice = _choice(model)
    pieces = [choice.push([i], (), "") for i in ids]
    assert "".join(p.text for p in pieces) == "a😀日本b"
    assert not any("\ufffd" in p.text for p in pieces)
    assert len(ids) > len("a😀日本b")


def test_an_unfinished_character_at_the_end_is_not_shown(model: Model) -> None:
    ids = model.tokenizer.encode("a😀", add_special=False)[:-1]
    assert _choice(model).push(ids, (), "length") == Piece("a", [], "length", taken=len(ids))


def test_the_end_token_is_counted_and_not_shown(model: Model) -> None:
    ids = model.tokenizer.encode("hello", add_special=False)
    choice = _choice(model, ends=frozenset({2, 905}))
    piece = choice.push([*ids, 905], _logprobs([*ids, 905]), "stop")
    assert piece.text == "hello"
    assert [t.token_id for t in piece.tokens] == ids
    assert choice.tokens == len(ids) + 1
    assert choice.push(ids, (), "") == Piece("", [], "")


def test_an_end_id_in_the_middle_is_text(model: Model) -> None:
    ids = model.tokenizer.encode(" world hello", add_special=False)
    choice = _choice(model, ends=frozenset({ids[0]}))
    assert choice.push(ids, (), "length").text == " world hello"


def test_stop_strings_wait_for_min_tokens(model: Model) -> None:
    ids = model.tokenizer.encode("x x x x", add_special=False)
    choice = _choice(model, stops=("x",), min_tokens=2)
    out = [choice.push([i], (), "") for i in ids]
    assert "".join(p.text for p in out) == "x x "
    assert out[2].finish == "stop"


def test_the_budget_holds_and_zero_shows_nothing(model: Model) -> None:
    ids = model.tokenizer.encode("one two three", add_special=False)
    assert _choice(model, max_tokens=0).push(ids, _logprobs(ids), "") == Piece("", [], "length")
    choice = _choice(model, max_tokens=2)
    assert choice.push(ids, (), "").finish == "length"
    assert choice.tokens == 2


@given(st.lists(st.sampled_from(["ab", "b", " END", "EN", "D", "é", "😀", "\n", "x END y"]), max_size=12), st.data())
@settings(deadline=None)
def test_logprobs_are_those_of_the_shown_text(model: Model, words: list[str], data: st.DataObject) -> None:
    ids = model.tokenizer.encode("".join(words), add_special=False)
    stops = data.draw(st.lists(st.sampled_from(["END", "b", "😀", "zz"]), max_size=2))
    choice = _choice(model, stops=tuple(stops))
    pieces, rest = [], ids
    while rest:
        size = data.draw(st.integers(1, 3))
        pieces.append(choice.push(rest[:size], _logprobs(rest[:size]), "" if rest[size:] else "length"))
        rest = rest[size:]
    text = "".join(p.text for p in pieces)
    tokens = [t for p in pieces for t in p.tokens]
    spelled = b"".join(model.tokenizer.token_bytes(t.token_id) for t in tokens)
    # Each shown token has an entry; only the one in which a stop string begins may say more than is shown.
    assert spelled.decode().startswith(text)
    assert [t.token_id for t in tokens] == ids[: len(tokens)]
    if choice.finish != "stop":
        assert spelled.decode() == text


def test_what_a_client_wants_to_see(model: Model) -> None:
    ids = model.tokenizer.encode("one END two", add_special=False)
    assert _choice(model, show=Show(special=True)).push([1, *ids], (), "length").text == "<|im_start|>one END two"
    assert _choice(model, stops=("END",), show=Show(stop=True)).push(ids, (), "").text == "one END"
    told = _choice(model, show=Show(ids=True)).push([*ids, 2], (), "stop")
    assert (told.text, list(told.ids)) == ("one END two", [*ids, 2])


def test_token_ids_are_those_that_usage_counts(model: Model) -> None:
    ids = model.tokenizer.encode("one END two", add_special=False)
    choice = _choice(model, stops=("END",), show=Show(ids=True))
    piece = choice.push(ids, (), "")
    assert piece.finish == "stop"
    assert list(piece.ids) == ids[: choice.tokens] != ids
    choice = _choice(model, max_tokens=2, show=Show(ids=True))
    assert [list(choice.push([i], (), "").ids) for i in ids] == [[ids[0]], [ids[1]], *[[]] * (len(ids) - 2)]


@given(st.lists(st.integers(0, 300) | st.integers(0, 49151), max_size=40), st.integers(1, 4))
def test_no_output_has_a_replacement_character(model: Model, ids: list[int], size: int) -> None:
    choice = _choice(model, stops=("zz",))
    pieces = [choice.push(ids[at : at + size], (), "") for at in range(0, len(ids), size)]
    text = "".join(p.text for p in [*pieces, choice.push([], (), "length")])
    said = b"".join(model.tokenizer.token_bytes(i) for i in ids if not model.tokenizer.is_special(i))
    if "zz" not in said.decode(errors="ignore"):
        assert text == said.decode(errors="ignore")
