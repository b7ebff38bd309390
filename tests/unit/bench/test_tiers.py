"""A figure of `baton bench tiers` is of the tier that it names, or the run ends with an error."""

from __future__ import annotations

import pytest

from bench.tiers import Disk, Measured, prove

NONE = Disk()


def measured(cached: int = 0, stored: int = 0, disk: Disk = NONE) -> Measured:
    return Measured([0.1, 0.2], [cached, cached], [stored, stored], disk)


def test_what_came_from_the_tier_that_is_named_is_a_figure() -> None:
    prove(measured(cached=992), "device")
    prove(measured(stored=320), "host")
    prove(measured(stored=320, disk=Disk(20, 20 * 8192, 8192, "O_DIRECT")), "nvme")


@pytest.mark.parametrize(
    ("found", "tier", "why"),
    [
        (measured(stored=320), "device", "device: nothing of 2 of 2 prompts"),
        (measured(), "host", "host: nothing of 2 of 2 prompts"),
        (measured(stored=320, disk=Disk(3, 0, 8192, "O_DIRECT")), "host", "3 blocks came from the disk"),
        (measured(), "nvme", "nvme: nothing of 2 of 2 prompts"),
        (measured(stored=320), "nvme", "of 20 blocks only 0 came from the disk"),
        (measured(stored=320, disk=Disk(17, 17 * 8192, 8192, "O_DIRECT")), "nvme", "of 20 blocks only 17"),
        (measured(stored=320, disk=Disk(20, 4096, 8192, "ok (buffered)")), "nvme", "buffered.*163840 bytes only 4096"),
    ],
)
def test_a_figure_that_is_not_of_its_tier_is_an_error(found: Measured, tier: str, why: str) -> None:
    with pytest.raises(RuntimeError, match=why):
        prove(found, tier)


def test_what_the_disk_did_is_counted_from_before() -> None:
    now, before = Disk(30, 9000, 100, "O_DIRECT"), Disk(10, 1000, 100, "O_DIRECT")
    assert now.since(before) == Disk(20, 8000, 100, "O_DIRECT")
