"""What was chosen for a request and what really happened to it, by name.

These names are the vocabulary of `Plan.reasons`, `RouteTaken.reasons`, the `x-baton-route` header, the last chunk's
`baton` field and the `reason` label of the fallback counters: one list, so that all of them agree.
"""

from __future__ import annotations

from enum import StrEnum


class RouteReason(StrEnum):
    """Why a request ran where it ran. The value is the name that travels on the wire."""

    # What the router chose, and why.
    DISAGGREGATED = "DISAGGREGATED"
    MERGED_CHEAPEST = "MERGED_CHEAPEST"
    LOCAL_CHEAPEST = "LOCAL_CHEAPEST"
    MERGED_ONLY = "MERGED_ONLY"
    """Asked for something (prompt logprobs) that only a worker which computes the prompt itself can answer."""
    NO_DECODE = "NO_DECODE"
    """No decode worker may take it: it runs merged whatever that costs."""

    # What went wrong on the way to the KV.
    PREFILL_UNAVAILABLE = "PREFILL_UNAVAILABLE"
    PREFILL_NO_CAPACITY = "PREFILL_NO_CAPACITY"
    PREFILL_FAILED = "PREFILL_FAILED"
    KV_TRANSFER_TIMEOUT = "KV_TRANSFER_TIMEOUT"
    KV_TRANSFER_FAILED = "KV_TRANSFER_FAILED"
    KV_CHECKSUM_MISMATCH = "KV_CHECKSUM_MISMATCH"
    KV_LAYOUT_MISMATCH = "KV_LAYOUT_MISMATCH"
    KV_STALE_EPOCH = "KV_STALE_EPOCH"
    KV_LEASE_LOST = "KV_LEASE_LOST"
    STORE_LOAD_FAILED = "STORE_LOAD_FAILED"
    """A store brought less than planned, or not in time: the rest was computed."""

    # What was done about it.
    ALTERNATE_PREFILL = "ALTERNATE_PREFILL"
    LOCAL_FALLBACK = "LOCAL_FALLBACK"
    MERGED_FALLBACK = "MERGED_FALLBACK"
    HANDBACK = "HANDBACK"
    REROUTED = "REROUTED"
    RESUMED = "RESUMED"
