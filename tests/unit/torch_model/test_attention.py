"""Which sequences are computed together."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from baton.engine.torch.attention import PADDING, SPARE_BLOCKS, PagedAttention, group_sequences, opened_slots
from baton.engine.torch.batch import Batch, SequenceSlice
from baton.engine.torch.config import ModelConfig
from baton.engine.torch.kvpool import KvPool

shapes = st.lists(st.tuples(st.sampled_from([1, 1, 1, 7, 256]), st.integers(1, 300)), min_size=1, max_size=40)


@given(shapes)
def test_groups_hold_each_sequence_once_and_pad_little(shapes: list[tuple[int, int]]) -> None:
    groups = group_sequences(shapes)
    assert sorted(i for group in groups for i in group) == list(range(len(shapes)))
    for group in groups:
        assert len({shapes[i][0] for i in group}) == 1
        blocks = [shapes[i][1] for i in group]
        assert max(blocks) * len(blocks) <= max(PADDING * sum(blocks), sum(blocks) + SPARE_BLOCKS)


def test_equals_share_and_a_long_one_stands_alone() -> None:
    assert group_sequences([(1, 9)] * 8) == [list(range(8))]
    assert group_sequences([(1, 9), (1, 250), (1, 9), (1, 10)]) == [[0, 2, 3], [1]]
    assert group_sequences([(256, 9), (1, 9)]) == [[1], [0]]


def test_slots_that_are_opened_and_not_filled() -> None:
    def opened(start: int, count: int) -> list[int]:
        return opened_slots(Batch([SequenceSlice([0] * count, start, [10, 11, 12])]), 32)

    assert opened(0, 1) == [10]
    assert opened(1, 1) == []
    assert opened(0, 32) == []
    assert opened(0, 33) == [11]
    assert opened(31, 1) == []
    assert opened(32, 1) == [11]
    assert opened(5, 70) == [12]
    assert opened(32, 20) == [11]
    assert opened(40, 5) == []


def test_the_kernel_for_gpus_gives_what_the_products_give() -> None:
    config = ModelConfig("llama", 2, 64, 4, 2, 16, 96, 96, 1e-5, 1e4, None, True, 512, ())
    pool = KvPool(torch.zeros(8 * 2 * 2 * 2 * 32 * 16 * 4, dtype=torch.uint8), config, torch.float32)
    pool.tensor.normal_(generator=torch.Generator().manual_seed(0))
    batch = Batch([SequenceSlice([1], 40, [0, 1]), SequenceSlice([1] * 9, 30, [2, 5]), SequenceSlice([1], 3, [7])])
    query, key_value = torch.randn(11, 4, 16), torch.randn(11, 4, 16)
    attention = PagedAttention(batch, pool, heads=4)
    products = attention(1, query, key_value)
    attention._fused = True
    torch.testing.assert_close(attention(1, query, key_value), products, rtol=1e-4, atol=1e-5)
