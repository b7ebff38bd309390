"""Which tiers there are below the host: what was asked for, as far as the machine has it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import structlog

from services.kvstore.eviction import Watermarks
from services.kvstore.metrics import KvStoreMetrics
from services.kvstore.nvme.disk import SlabFile
from services.kvstore.nvme.tier import NvmeTier
from services.kvstore.settings import KvStoreSettings
from services.kvstore.tier import Tier, TierStats

_log = structlog.get_logger()


@dataclass
class Lower:
    """The tiers below, fastest first; those that could not be had, and why; those that an earlier life may fill."""

    tiers: list[Tier] = field(default_factory=list)
    missing: list[TierStats] = field(default_factory=list)
    scans: list[NvmeTier] = field(default_factory=list)


async def lower_tiers(settings: KvStoreSettings, marks: Watermarks, metrics: KvStoreMetrics) -> Lower:
    """Open what was asked for. A disk without room, a folder that another store has: not that tier, and said so."""
    lower = Lower()
    if settings.device_gib:
        try:
            from services.kvstore.device import DeviceTier

            size = int(settings.device_gib * 2**30)
            count = metrics.tier("device")
            lower.tiers.append(DeviceTier("cuda", size, marks, settings.quotas, settings.io_deadline_s, count=count))
        except (ImportError, RuntimeError, AssertionError) as error:  # AssertionError: torch was built without CUDA
            lower.missing.append(_missing("device", error))
    if settings.nvme_dir:
        try:
            disk = SlabFile(Path(settings.nvme_dir), int(settings.nvme_gib * 2**30))
            nvme = NvmeTier(disk, marks, settings.quotas, settings.io_deadline_s, count=metrics.tier("nvme"))
            await nvme.open()
            lower.tiers.append(nvme)
            lower.scans.append(nvme)
            _log.info("disk tier", folder=settings.nvme_dir, bytes=disk.size, direct=disk.direct)
        except OSError as error:
            lower.missing.append(_missing("nvme", error))
    return lower


def _missing(name: str, error: Exception) -> TierStats:
    _log.error("running without a tier", tier=name, error=str(error))
    return TierStats(name, 0, 0, 0, 0, state=f"off: {error}")
