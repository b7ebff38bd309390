"""The engine process's environment: what glibc and oneDNN read before the first line of Python runs."""

from __future__ import annotations

from collections.abc import Mapping

TUNABLES = "GLIBC_TUNABLES"
HUGE_PAGES = "glibc.malloc.hugetlb"
SHAPE_CACHES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
SHAPES = "48"


def child_environment(ours: Mapping[str, str]) -> dict[str, str]:
    """`ours`, with these two settings unless they were made by hand.

    Memory in transparent huge pages. A decode step reads every weight once, and in pages of 4 KiB the processor stops
    reading ahead at each page's end: measured on one core, a step's products of 4 rows took 15.3 to 17.1 ms, and 12.0
    with huge pages (bf16, SmolLM2-135M). The tunable asks with madvise (glibc 2.35; earlier ones ignore it).

    Fewer compiled shapes. oneDNN and torch's layer over it each keep 1024 products compiled for their shapes, 0.5 to 1
    MiB apiece, and a step's row count is a shape: an engine that had met every chunk size had grown by 0.9 (bf16) to
    1.3 GiB (f32), and with 128 a decode engine still grew after ten minutes. 48 are the five products of nine row
    counts, full within a minute of mixed load: 40 MiB. Measured (SmolLM2-135M, one core, row counts at random from 1 to
    8, 64 and 256): steps as fast as with 128 and with 1024, and with 16 those of 1 to 8 rows 1 ms slower, since one
    that was dropped takes 0.35 ms to compile again.
    """
    made = {**dict.fromkeys(SHAPE_CACHES, SHAPES), **ours}
    given = ours.get(TUNABLES, "")
    if not any(setting.startswith(f"{HUGE_PAGES}=") for setting in given.split(":")):
        made[TUNABLES] = ":".join(filter(None, (given, f"{HUGE_PAGES}=1")))
    return made
