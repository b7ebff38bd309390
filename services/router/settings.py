"""What can be set of a router."""

from __future__ import annotations

from pydantic import Field

from baton.config import ServiceSettings
from services.router.costs import Parameters


class RouterSettings(ServiceSettings):
    """Flags of `python -m services.router`."""

    max_index_keys: int = Field(
        default=1_000_000, gt=0, description="Block keys the prefix index holds at most (about 300 bytes each)."
    )
    stall_weight: float = Field(
        default=Parameters.stall_weight,
        ge=0.0,
        description="Seconds of this request that a frozen stream's second is worth.",
    )
