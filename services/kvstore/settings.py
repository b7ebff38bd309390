"""What can be set of a store."""

from __future__ import annotations

from pydantic import Field, model_validator

from baton.config import ServiceSettings


class KvStoreSettings(ServiceSettings):
    """Flags of `python -m services.kvstore`."""

    capacity_gib: float = Field(default=1.0, gt=0, description="Host memory for blocks.")
    high_watermark: float = Field(default=0.95, gt=0, le=1, description="Share of slots in use that starts eviction.")
    low_watermark: float = Field(default=0.85, ge=0, le=1, description="Share of slots in use at which eviction stops.")
    transports: str = Field(default="nixl,tcp", description="Transports to offer, in order of preference.")

    @model_validator(mode="after")
    def _watermarks_in_order(self) -> KvStoreSettings:
        if self.low_watermark > self.high_watermark:
            raise ValueError("low_watermark must not be above high_watermark")
        return self
