"""SGLang's host pool as pages, with the pool's own methods from SGLang's wheel."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from baton.engine.sglang.pages import PAGE_FIRST, Pages, fill, take, views
from baton.kv.arena import Arena
from tests.sglang_wheel import host_pool_methods

METHODS = ("get_page_buffer_meta", "get_data_page", "set_from_flat_data_page", "get_dummy_flat_data_page")
LAYERS, HEADS, DIM, SIZE, COUNT = 3, 2, 8, 32, 5


def pool(layout: str, /, **changes: Any) -> Any:
    """A pool whose bytes all differ from their neighbours."""
    made = type("Pool", (), host_pool_methods(*METHODS))()
    made.layout, made.page_size, made.device, made.pin_memory = layout, SIZE, "cpu", False
    made.layer_num, made.head_num, made.head_dim, made.dtype = LAYERS, HEADS, DIM, torch.float16
    made.page_num, made.size = COUNT, COUNT * SIZE
    shapes = {
        "page_first": (2, made.size, LAYERS, HEADS, DIM),
        "page_first_direct": (2, COUNT, LAYERS, SIZE, HEADS, DIM),
        "page_head": (2, COUNT, HEADS, SIZE, LAYERS, DIM),
    }
    made.kv_buffer = torch.rand(shapes.get(layout, (2, LAYERS, made.size, HEADS, DIM)), dtype=torch.float32).half()
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def indices(*pages: int) -> torch.Tensor:
    return torch.tensor([page * SIZE + n for page in pages for n in range(SIZE)])


@pytest.mark.parametrize("layout", PAGE_FIRST)
def test_a_page_is_what_sglang_calls_the_flat_page(layout: str) -> None:
    """So that both of its interfaces store the same bytes under the same key."""
    host = pool(layout)
    pages = Pages(host)
    for number, page in zip((3, 0), pages.of(indices(3, 0)), strict=True):
        flat = host.get_data_page(number * SIZE).view(torch.uint8)
        assert b"".join(views(page)) == bytes(flat.numpy())
        assert len(flat) == pages.page_bytes
        assert [s.length for s in pages.segments(page)] == [pages.page_bytes // 2] * 2


@pytest.mark.parametrize("layout", PAGE_FIRST)
def test_copies_in_and_out_touch_that_page_alone(layout: str) -> None:
    host = pool(layout)
    pages = Pages(host)
    before = [host.get_data_page(n * SIZE).clone() for n in range(COUNT)]
    block = torch.empty(pages.page_bytes, dtype=torch.uint8)
    source, target = pages.of(indices(1, 4))
    take(source, block.data_ptr())
    fill(target, block.data_ptr())
    after = [host.get_data_page(n * SIZE) for n in range(COUNT)]
    assert torch.equal(after[4], before[1])
    assert all(torch.equal(after[n], before[n]) for n in range(4))


def test_segments_lie_in_the_pool() -> None:
    host = pool("page_first")
    pages = Pages(host)
    arena = Arena.over(pages.address, pages.size)
    (page,) = pages.of(indices(2))
    told = b"".join(arena.view(s.offset, s.length) for s in pages.segments(page))
    assert told == b"".join(views(page))
    with pytest.raises(ValueError, match="outside the arena"):
        arena.view(pages.size, 1)


def test_the_layout_says_what_decides_the_bytes() -> None:
    layouts = [Pages(pool(layout)).layout("w", 1, 1) for layout in PAGE_FIRST]
    assert len({layout.digest() for layout in layouts}) == 3
    assert all(layout.block_bytes == Pages(pool("page_first")).page_bytes for layout in layouts)
    plain = Pages(pool("page_first"))
    changed = [plain.layout("v", 1, 1), plain.layout("w", 2, 1), plain.layout("w", 1, 2)]
    assert len({layout.digest() for layout in [*changed, plain.layout("w", 1, 1)]}) == 4


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"layout": "layer_first"}, "--hicache-mem-layout must be one of page_first, page_first_direct, page_head"),
        ({"page_size": 48}, "--page-size must be a multiple of 32, not 48"),
        ({"target_layer_num": LAYERS - 1}, "speculative decoding"),
        ({"dtype": torch.uint8}, "--kv-cache-dtype: the pool holds uint8"),
        ({"kv_buffer": torch.zeros(7)}, "pools of K and V of plain attention"),
        ({"kv_buffer": [torch.zeros(7), torch.zeros(7)]}, "pools of K and V of plain attention"),
    ],
)
def test_pools_that_are_not_taken_are_named(changes: dict[str, Any], said: str) -> None:
    host = pool("page_first", **changes)
    with pytest.raises(ValueError, match=said):
        Pages(host)


def test_what_the_pool_says_is_checked() -> None:
    pages = Pages(pool("page_first"))
    with pytest.raises(ValueError, match="a page lies outside"):
        pages.of(indices(COUNT))
    with pytest.raises(ValueError, match="are not pages of 32 tokens"):
        Pages(pool("page_first", get_page_buffer_meta=lambda _: ([1], [2]))).of(indices(1))
    with pytest.raises(ValueError, match="a flat page is"):
        pages.flat(torch.zeros(5))
