"""The body that goes to both servers of a pair."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.engine.sglang.launch.pairing import FIELDS, ROOM_BITS, Bootstrap, new_room, paired

BOOTSTRAP = Bootstrap("10.0.0.5", 8998)


class Zero(random.Random):
    """A source that draws the one room which is none."""

    def getrandbits(self, k: int) -> int:
        assert k == ROOM_BITS
        return 0


@given(st.dictionaries(st.text(min_size=1).filter(lambda name: name not in FIELDS), st.integers()), st.integers())
def test_nothing_else_changes(body: dict[str, int], seed: int) -> None:
    room = new_room(random.Random(seed))
    assert 0 < room < 1 << ROOM_BITS
    made = paired(body, BOOTSTRAP, room)
    assert {name: value for name, value in made.items() if name not in FIELDS} == body
    assert [made[name] for name in FIELDS] == ["10.0.0.5", 8998, room]


def test_a_room_is_never_zero() -> None:
    assert new_room(Zero()) == 1


@pytest.mark.parametrize("name", FIELDS)
def test_a_client_cannot_choose_where_it_meets(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is set by the pair"):
        paired({name: 0}, BOOTSTRAP, 1)
    assert paired({name: None}, BOOTSTRAP, 1)["bootstrap_room"] == 1


@pytest.mark.parametrize("room", [0, -1, 1 << 63])
def test_a_room_that_is_none_is_refused(room: int) -> None:
    with pytest.raises(ValueError, match="a room has 63 bits"):
        paired({}, BOOTSTRAP, room)
