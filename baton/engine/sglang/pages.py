"""SGLang's host pool as we see it: pages of K and V bytes at addresses, and the layout that they have.

In a page-first layout a page is two runs, its K and its V, in two halves of one tensor:

    page_first         [2, tokens, layers, heads, dim]
    page_first_direct  [2, pages, layers, page, heads, dim]
    page_head          [2, pages, heads, page, layers, dim]

`get_page_buffer_meta(host_indices)` of the pool tells the runs' addresses and lengths, K and V of each page in turn.
As a block of ours a page is its K followed by its V, which is also what SGLang's flat pages are.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from baton.kv.handle import Segment
from baton.kv.keys import BLOCK_SIZE
from baton.kv.layout import LayoutFingerprint

PAGE_FIRST = ("page_first", "page_first_direct", "page_head")
DTYPES = ("float16", "bfloat16", "float32")
"""Of KV that stands for itself; quantised KV has its scales elsewhere."""


class HostPool(Protocol):
    """What we use of SGLang's `HostKVCache` for multi-head attention."""

    page_size: int
    layout: str
    dtype: Any
    layer_num: int
    head_num: int
    head_dim: int
    kv_buffer: Any

    def get_page_buffer_meta(self, indices: Any) -> tuple[list[int], list[int]]:
        """Address and bytes of each run of the pages whose tokens' indices these are."""


@dataclass(frozen=True)
class Run:
    """`length` bytes of a page at `address` in this process."""

    address: int
    length: int


Page = tuple[Run, ...]


class Pages:
    """The pages of one pool. Raises ValueError for a pool that we do not take, with what is wrong by name."""

    def __init__(self, pool: HostPool) -> None:
        if pool.layout not in PAGE_FIRST:
            raise ValueError(f"--hicache-mem-layout must be one of {', '.join(PAGE_FIRST)}, not {pool.layout}")
        if pool.page_size % BLOCK_SIZE:
            raise ValueError(f"--page-size must be a multiple of {BLOCK_SIZE}, not {pool.page_size}")
        self.dtype = str(pool.dtype).removeprefix("torch.")
        if self.dtype not in DTYPES:
            raise ValueError(f"--kv-cache-dtype: the pool holds {self.dtype}, Baton's store takes {', '.join(DTYPES)}")
        buffer = pool.kv_buffer
        if not hasattr(buffer, "data_ptr") or buffer.dim() != 5 + (pool.layout != "page_first") or buffer.shape[0] != 2:
            raise ValueError(f"{type(pool).__name__}: Baton's store takes pools of K and V of plain attention")
        if getattr(pool, "target_layer_num", pool.layer_num) != pool.layer_num:
            raise ValueError("speculative decoding: the pool also holds the draft model's layers, which no key names")
        self.tokens = int(pool.page_size)
        self.address = int(buffer.data_ptr())
        self.size = int(buffer.nbytes)
        self.page_bytes = 2 * self.tokens * pool.layer_num * pool.head_num * pool.head_dim * int(pool.dtype.itemsize)
        self._pool = pool

    def layout(self, weights: str, tp_size: int, pp_size: int) -> LayoutFingerprint:
        """How a page's bytes lie. `order` names SGLang's layout: its pages pair with no other engine's blocks."""
        pool = self._pool
        return LayoutFingerprint(
            model=weights,
            layers=pool.layer_num,
            kv_heads=pool.head_num,
            head_dim=pool.head_dim,
            block_size=self.tokens,
            dtype=self.dtype,
            order=f"sglang-{pool.layout}",
            tensor_parallel=tp_size,
            pipeline_parallel=pp_size,
        )

    def of(self, host_indices: Any) -> list[Page]:
        """The pages of these token indices, whole pages in order. Raises ValueError when the pool says anything that
        cannot be: what it says is written to."""
        count, rest = divmod(len(host_indices), self.tokens)
        addresses, lengths = self._pool.get_page_buffer_meta(host_indices)
        runs = [Run(int(address), int(length)) for address, length in zip(addresses, lengths, strict=True)]
        if rest or len(runs) != 2 * count:
            raise ValueError(f"{len(host_indices)} indices and {len(runs)} runs are not pages of {self.tokens} tokens")
        end = self.address + self.size
        if any(2 * r.length != self.page_bytes or r.address < self.address or r.address + r.length > end for r in runs):
            raise ValueError("a page lies outside SGLang's host pool")
        return [tuple(runs[i : i + 2]) for i in range(0, len(runs), 2)]

    def flat(self, tensor: Any) -> Page:
        """A flat page in memory of its own, as a page of one run. Raises ValueError when it is none."""
        if not tensor.is_contiguous() or tensor.device.type != "cpu" or tensor.nbytes != self.page_bytes:
            raise ValueError(f"a flat page is {self.page_bytes} contiguous bytes of host memory, not {tensor.nbytes}")
        return (Run(int(tensor.data_ptr()), self.page_bytes),)

    def segments(self, page: Page) -> tuple[Segment, ...]:
        """Where a page of the pool lies, for peers that read the pool as an arena."""
        return tuple(Segment(0, run.address - self.address, run.length) for run in page)


def views(page: Page) -> Iterator[memoryview]:
    """The bytes of a page, run by run, no copy."""
    for run in page:
        yield memoryview((ctypes.c_char * run.length).from_address(run.address)).cast("B")


def fill(page: Page, source: int) -> None:
    """Copy a page's bytes from the address `source`. Lets go of the interpreter's lock."""
    for run in page:
        ctypes.memmove(run.address, source, run.length)
        source += run.length


def take(page: Page, target: int) -> None:
    """Copy a page's bytes to the address `target`. Lets go of the interpreter's lock."""
    for run in page:
        ctypes.memmove(target, run.address, run.length)
        target += run.length


def lengths(pages: Sequence[Page]) -> int:
    """Bytes of all of them."""
    return sum(run.length for page in pages for run in page)
