"""What can be set of a store."""

from __future__ import annotations

from pydantic import Field, field_validator, model_validator

from baton.config import ServiceSettings
from services.kvstore.quotas import parse_quotas


class KvStoreSettings(ServiceSettings):
    """Flags of `python -m services.kvstore`."""

    capacity_gib: float = Field(default=1.0, gt=0, description="Host memory for blocks.")
    high_watermark: float = Field(default=0.95, gt=0, le=1, description="Share of slots in use that starts eviction.")
    low_watermark: float = Field(default=0.85, ge=0, le=1, description="Share of slots in use at which eviction stops.")
    nvme_dir: str = Field(default="", description="Folder of the NVMe tier, this store's alone; empty = no such tier.")
    nvme_gib: float = Field(default=10.0, gt=0, description="What the NVMe tier takes, preallocated.")
    io_deadline_s: float = Field(default=1.0, gt=0, description="A disk or GPU silent for so long is a miss.")
    device_gib: float = Field(default=0.0, ge=0, description="GPU memory below the host; needs torch. 0 = none.")
    quota: str = Field(
        default="", description="What a tenant may take of each tier: TENANT=GIB,...; * is every other tenant."
    )
    ttl_s: float = Field(default=0.0, ge=0, description="How long a block is kept; 0 = until room is needed.")
    layout_rest_s: float = Field(
        default=3600.0, ge=0, description="How long nobody uses the layout of what is held until another may come."
    )
    transports: str = Field(default="nixl,tcp", description="Transports to offer, in order of preference.")

    @model_validator(mode="after")
    def _watermarks_in_order(self) -> KvStoreSettings:
        if self.low_watermark > self.high_watermark:
            raise ValueError("low_watermark must not be above high_watermark")
        return self

    @field_validator("quota")
    @classmethod
    def _quota_can_be_read(cls, value: str) -> str:
        parse_quotas(value)
        return value

    @property
    def quotas(self) -> dict[str, int]:
        """Bytes by tenant."""
        return parse_quotas(self.quota)
