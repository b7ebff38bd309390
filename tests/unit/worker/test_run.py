"""What a prefill announces."""

from __future__ import annotations

import pytest

from baton.engine.port import SealedBlocks
from baton.kv.handle import Handle
from baton.worker.run import _to_pb


def handle(i: int) -> Handle:
    return Handle(bytes([i]) * 16, "f", "prefill-1", 1, 1, 32, (), 0)


@pytest.mark.parametrize(("have", "first", "sent"), [(0, 2, [2, 3, 4]), (3, 3, [3, 4]), (5, 5, []), (9, 5, [])])
def test_blocks_that_the_caller_has_are_not_announced(have: int, first: int, sent: list[int]) -> None:
    blocks = _to_pb(SealedBlocks(2, tuple(handle(i) for i in (2, 3, 4))), have).blocks
    assert blocks.first_block == first
    assert [h.key[0] for h in blocks.handles] == sent
