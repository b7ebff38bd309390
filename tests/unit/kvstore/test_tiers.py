"""What every tier promises: one suite over host memory, device memory (torch on the CPU, and CUDA where there is one)
and a disk."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch

from baton.errors import BatonError, Reason
from baton.kv.arena import Arena
from services.kvstore.aligned import ALIGN
from services.kvstore.device import DeviceTier
from services.kvstore.eviction import Watermarks
from services.kvstore.host import HostTier
from services.kvstore.nvme.disk import SlabFile
from services.kvstore.nvme.tier import NvmeTier
from services.kvstore.tier import BlockShape, Facts, Tier, Verdict

BLOCK = 4096
SLOTS = 8
SHAPE = BlockShape("fp", BLOCK, 32)
MARKS = Watermarks(1.0, 0.75)
QUOTAS = {"small": 3 * 2 * BLOCK}
CUDA = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))


def keys(count: int, first: int = 0) -> list[bytes]:
    return [n.to_bytes(16, "big") for n in range(first, first + count)]


def payload(key: bytes) -> memoryview:
    return memoryview((key * BLOCK)[:BLOCK])


@pytest.fixture(params=["host", "device", CUDA, "nvme"])
async def tier(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Tier]:
    """Eight slots, clean at the end."""
    made: Tier
    if request.param == "host":
        made = HostTier(Arena.create(SLOTS * BLOCK), "store", 7, MARKS, QUOTAS)
    elif request.param == "nvme":
        nvme = NvmeTier(SlabFile(tmp_path / "nvme", ALIGN + SLOTS * (ALIGN + BLOCK)), MARKS, QUOTAS, 20.0)
        await nvme.open()
        await nvme.scan()
        made = nvme
    else:
        device = "cuda" if request.param == "cuda" else "cpu"
        made = DeviceTier(device, SLOTS * BLOCK, MARKS, QUOTAS)
    made.fix(SHAPE)
    yield made
    await made.flush()
    assert made.check_integrity() == []
    assert made.stats().blocks == len(made.keys())
    await made.close()


async def put(tier: Tier, names: list[bytes], facts: Facts = Facts()) -> list[bool]:  # noqa: B008
    return [await tier.store(key, payload(key), facts) for key in names]


async def get(tier: Tier, key: bytes) -> bytes | None:
    into = bytearray(BLOCK)
    return bytes(into) if await tier.load(key, memoryview(into)) else None


async def test_what_is_stored_is_loaded(tier: Tier) -> None:
    assert all(await put(tier, keys(5)))
    assert sorted(tier.keys()) == keys(5)
    for key in keys(5):
        assert tier.holds(key)
        assert await get(tier, key) == bytes(payload(key))
        assert await tier.verify(key) is Verdict.SOUND
    assert await get(tier, b"x" * 16) is None
    assert tier.stats().blocks == 5
    assert tier.stats().state.startswith("ok")


async def test_storing_twice_is_storing_once(tier: Tier) -> None:
    assert all(await put(tier, keys(2) + keys(2)))
    assert tier.stats().blocks == 2


async def test_a_payload_of_another_size_is_not_stored(tier: Tier) -> None:
    assert not await tier.store(keys(1)[0], memoryview(b"short"), Facts())
    assert tier.keys() == []


async def test_eviction_makes_room_and_says_what_went(tier: Tier) -> None:
    gone: list[bytes] = []
    tier.on_gone = lambda names, reason: gone.extend(names)
    assert all(await put(tier, keys(SLOTS + 1)))
    assert gone == keys(3), "from the high mark to the low one, the oldest first"
    assert set(tier.keys()) == set(keys(SLOTS + 1)) - set(gone)
    assert await get(tier, gone[0]) is None


async def test_what_is_used_again_stays(tier: Tier) -> None:
    assert all(await put(tier, keys(SLOTS)))
    if isinstance(tier, HostTier):
        tier.touch(keys(1))
    else:
        await get(tier, keys(1)[0])
    await put(tier, keys(1, first=100))
    assert tier.holds(keys(1)[0])
    assert not tier.holds(keys(2)[1])


async def test_facts_stay_with_the_block(tier: Tier) -> None:
    facts = Facts("somebody", time.time() + 1000)
    await put(tier, keys(1), facts)
    placed = tier.placed(keys(1)[0])
    assert placed is not None
    assert placed.facts == facts
    assert tier.placed(b"x" * 16) is None


async def test_a_tenant_over_its_quota_loses_its_own(tier: Tier) -> None:
    limit = QUOTAS["small"] // (2 * BLOCK if tier.name == "nvme" else BLOCK)
    assert all(await put(tier, keys(1), Facts("other")))
    assert all(await put(tier, keys(limit + 1, first=10), Facts("small")))
    mine = [key for key in tier.keys() if (p := tier.placed(key)) and p.facts.tenant == "small"]  # noqa: SIM118
    assert mine == keys(limit, first=11)
    assert tier.holds(keys(1)[0])


async def test_time_over_is_a_miss(tier: Tier) -> None:
    await put(tier, keys(1), Facts(expires=time.time() - 1))
    if isinstance(tier, HostTier):
        assert tier.pin(keys(1), "fp") == []
    else:
        assert await get(tier, keys(1)[0]) is None


async def test_drop_and_clear_forget(tier: Tier) -> None:
    await put(tier, keys(4))
    assert tier.drop([keys(1)[0], b"x" * 16]) == keys(1)
    await tier.flush()
    assert not tier.holds(keys(1)[0])
    assert sorted(tier.clear()) == keys(4)[1:]
    await tier.flush()
    assert tier.keys() == []
    tier.fix(SHAPE)
    assert all(await put(tier, keys(SLOTS)))


@pytest.mark.parametrize("tenant", ["", "small"])
@pytest.mark.parametrize("steps", [0, 1, 2, 5])
async def test_what_is_being_stored_when_it_is_cleared_is_not_here_afterwards(
    tier: Tier, tenant: str, steps: int
) -> None:
    await put(tier, keys(1), Facts("other"))
    storing = asyncio.create_task(tier.store(b"k" * 16, payload(b"k" * 16), Facts("small")))
    await asyncio.sleep(0)
    for _ in range(steps):
        await asyncio.sleep(0)
    tier.clear(tenant)
    await storing
    assert tier.keys() == (keys(1) if tenant else [])
    await tier.flush()


async def test_many_at_once(tier: Tier) -> None:
    names = keys(6)
    assert all(await asyncio.gather(*(tier.store(key, payload(key), Facts()) for key in names)))
    found = await asyncio.gather(*(get(tier, key) for key in names * 4))
    assert found == [bytes(payload(key)) for key in names * 4]


async def test_a_block_that_does_not_fit_at_all_is_refused(tier: Tier) -> None:
    with pytest.raises(BatonError) as refused:
        tier.fix(BlockShape("huge", 1 << 20, 32))
    assert refused.value.reason is (Reason.KV_LAYOUT_MISMATCH if tier.keys() else Reason.NO_CAPACITY)


async def test_speeds_are_measured(tier: Tier) -> None:
    await put(tier, keys(1))
    assert await get(tier, keys(1)[0])
    if not isinstance(tier, HostTier):  # whoever reads the host measures
        assert tier.stats().read_latency_s > 0
        assert tier.stats().read_bytes_s > 0
