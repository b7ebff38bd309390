"""What an operator says of an upstream."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class UpstreamOptions:
    """`url` and `model` as the server knows them. `dialect` and `prompts` are a name, or `auto`: found out at start.

    `max_context` 0: what the server tells, else what the model's files say. `first_s`, `stall_s` and `start_s` are
    seconds: until a first chunk, between two, and until the server is there at all.
    """

    url: str
    model: str
    api_key: str = ""
    dialect: str = "auto"
    prompts: str = "auto"
    max_context: int = 0
    max_streams: int = 64
    first_s: float = 60.0
    stall_s: float = 10.0
    start_s: float = 300.0
