"""What the engine process is started with."""

from __future__ import annotations

import pytest

from baton.engine.torch.environment import SHAPE_CACHES, child_environment


@pytest.mark.parametrize(
    ("given", "made"),
    [
        ({}, "glibc.malloc.hugetlb=1"),
        ({"GLIBC_TUNABLES": "glibc.malloc.arena_max=1"}, "glibc.malloc.arena_max=1:glibc.malloc.hugetlb=1"),
        ({"GLIBC_TUNABLES": "glibc.malloc.hugetlb=0"}, "glibc.malloc.hugetlb=0"),
    ],
)
def test_huge_pages_are_asked_for_unless_somebody_decided(given: dict[str, str], made: str) -> None:
    environment = child_environment({"PATH": "/bin", **given})
    assert (environment["PATH"], environment["GLIBC_TUNABLES"]) == ("/bin", made)


@pytest.mark.parametrize("cache", SHAPE_CACHES)
def test_compiled_shapes_are_bounded_unless_somebody_decided(cache: str) -> None:
    assert child_environment({})[cache] == "48"
    assert child_environment({cache: "1024"})[cache] == "1024"
