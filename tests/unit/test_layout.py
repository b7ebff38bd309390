"""Layouts: a difference in any field unpairs, and is named with both values."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from baton.kv.layout import LayoutFingerprint
from baton.rpc.codec import layout_from_pb, layout_to_pb
from baton.v1 import registry_pb2
from baton.worker.announce import layout_difference

LAYOUT = LayoutFingerprint("weights", 2, 2, 16, 32, "float32")


@pytest.mark.parametrize("name", [f.name for f in fields(LayoutFingerprint)])
def test_every_field_counts(name: str) -> None:
    value = getattr(LAYOUT, name)
    other = replace(LAYOUT, **{name: value + 1 if isinstance(value, int) else f"{value}x"})
    assert other.digest() != LAYOUT.digest()
    assert LAYOUT.differences(other) == [f"{name}: {value} != {getattr(other, name)}"]
    ours, theirs = (registry_pb2.StandingLayout(layout=layout_to_pb(one)) for one in (other, LAYOUT))
    assert layout_difference(ours, theirs) == other.differences(LAYOUT)
    assert layout_from_pb(layout_to_pb(other)) == other


def test_the_digest_of_a_release_without_variants() -> None:
    """It decides what pairs during a rolling upgrade, and what a store on disk holds."""
    assert LAYOUT.digest() == "59d585ab86ea154cc4aa7310"
