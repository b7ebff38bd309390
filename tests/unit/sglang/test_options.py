"""What is said of Baton in SGLang's extra config."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pytest

from baton.engine.sglang.launch.command import extra_config
from baton.engine.sglang.options import Options, refuse_unsupported


@dataclass
class Config:
    """SGLang's own, as far as it is read."""

    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    is_mla_model: bool = False
    should_split_heads: bool = False
    tp_lcm_size: int | None = None
    attn_cp_size: int = 1
    extra_config: dict[str, Any] | None = None


def test_what_the_launcher_writes_is_what_the_storage_reads() -> None:
    options = Options(weights="ab" * 16, etcd="a:1, b:2", tenant="t", bounce_mib=7)
    assert Options.parse(json.loads(extra_config(options))) == options
    assert options.etcd_endpoints == ["a:1", "b:2"]


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        (None, "'baton' must be an object"),
        ({"baton": "x"}, "'baton' must be an object"),
        ({"baton": {}}, "baton.weights is missing"),
        ({"baton": {"weights": "w", "tennant": "x"}}, "baton.tennant is not known; there are weights, etcd"),
        ({"baton": {"weights": 5}}, "baton.weights must be of type str, not 5"),
        ({"baton": {"weights": "w", "bounce_mib": True}}, "baton.bounce_mib must be of type int, not True"),
        ({"baton": {"weights": "w", "bounce_mib": 0}}, "baton.bounce_mib must be at least 1, not 0"),
        ({"baton": {"weights": "w", "etcd": " ,"}}, "baton.etcd must be host:port"),
    ],
)
def test_wrong_options_are_named(extra: dict[str, Any] | None, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Options.parse(extra)


def test_kinds_of_kv_that_are_not_taken_are_named() -> None:
    refuse_unsupported(Config(tp_size=4, tp_rank=3))
    for config, said in (
        (Config(is_mla_model=True), "MLA"),
        (Config(should_split_heads=True), "tp_lcm_size"),
        (Config(tp_lcm_size=8), "tp_lcm_size"),
        (Config(attn_cp_size=2), "attn_cp_size"),
    ):
        with pytest.raises(ValueError, match=said):
            refuse_unsupported(config)
