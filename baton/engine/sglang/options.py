"""What is said of Baton in SGLang's `--hicache-storage-backend-extra-config`, and which of its set-ups we take.

    {"backend_name": "baton", "module_path": "baton.engine.sglang.storage", "class_name": "BatonStorage",
     "interface_v1": 1, "baton": {"weights": "<weights identity>", "etcd": "10.0.0.1:2379"}}

Everything of ours stands under "baton" and is checked strictly: a misspelt name must not silently mean a default.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Protocol

OURS = "baton"
"""The key in the extra config under which our options stand."""


class StorageConfig(Protocol):
    """What we read of SGLang's `HiCacheStorageConfig`."""

    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    is_mla_model: bool
    extra_config: dict[str, Any] | None


@dataclass(frozen=True)
class Options:
    """`weights` names the weights (`baton.model.identity.weights_identity`): two checkpoints under one served name
    must never share KV, and SGLang tells its storage only that name.

    `tenant` separates: instances with different tenants share no page. `host` is the address at which the store
    reaches this process. `transports` as of the store, in order of preference. `bounce_mib` is the memory through which
    pages are read.
    """

    weights: str
    etcd: str = "127.0.0.1:2379"
    cluster: str = "local"
    tenant: str = ""
    host: str = "127.0.0.1"
    transports: str = "nixl,tcp"
    bounce_mib: int = 256

    @property
    def etcd_endpoints(self) -> list[str]:
        """The endpoints one by one."""
        return [endpoint.strip() for endpoint in self.etcd.split(",") if endpoint.strip()]

    @classmethod
    def parse(cls, extra_config: Mapping[str, Any] | None) -> Options:
        """The options in an extra config. Raises ValueError that names the field."""
        ours = (extra_config or {}).get(OURS)
        if not isinstance(ours, Mapping):
            raise ValueError(f"extra config: {OURS!r} must be an object with at least 'weights', not {ours!r}")
        known = {field.name: field for field in fields(cls)}
        for name, value in ours.items():
            if name not in known:
                raise ValueError(f"extra config: {OURS}.{name} is not known; there are {', '.join(known)}")
            kind = int if name == "bounce_mib" else str
            if type(value) is not kind:
                raise ValueError(f"extra config: {OURS}.{name} must be of type {kind.__name__}, not {value!r}")
        if not ours.get("weights"):
            raise ValueError(f"extra config: {OURS}.weights is missing; `baton sglang` fills it in")
        options = cls(**ours)
        if options.bounce_mib < 1:
            raise ValueError(f"extra config: {OURS}.bounce_mib must be at least 1, not {options.bounce_mib}")
        if not options.etcd_endpoints:
            raise ValueError(f"extra config: {OURS}.etcd must be host:port, not {options.etcd!r}")
        return options


def refuse_unsupported(config: StorageConfig) -> None:
    """Raise ValueError, which SGLang shows as it starts, for a kind of KV that we do not take."""
    if config.is_mla_model:
        raise ValueError("MLA: Baton's store does not take KV that is the same on every rank (is_mla_model)")
    if getattr(config, "should_split_heads", False) or getattr(config, "tp_lcm_size", None):
        raise ValueError("tp_lcm_size: Baton's store does not take pages that are split by heads")
    if getattr(config, "attn_cp_size", 1) > 1:
        raise ValueError("attn_cp_size: Baton's store does not take the KV of context-parallel attention")
