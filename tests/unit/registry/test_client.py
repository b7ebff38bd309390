"""The parts of the client that need no server."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import BatonError, Reason
from baton.registry.backoff import Backoff
from baton.registry.client import EtcdClient, prefix_end
from baton.registry.host import machine_id


@given(prefix=st.binary(min_size=1, max_size=8), key=st.binary(max_size=10))
def test_prefix_end_separates_exactly(prefix: bytes, key: bytes) -> None:
    end = prefix_end(prefix)
    inside = prefix <= key and (end == b"\0" or key < end)
    assert inside == key.startswith(prefix) or (end == b"\0" and key >= prefix)


def test_prefix_end_carries() -> None:
    assert prefix_end(b"a/") == b"a0"
    assert prefix_end(b"a\xff\xff") == b"b"
    assert prefix_end(b"\xff") == b"\0"


def test_backoff_grows_jittered_to_its_limit_and_resets() -> None:
    backoff = Backoff(0.1, 5.0)
    delays = [backoff.next() for _ in range(50)]
    for n, delay in enumerate(delays):
        whole = min(5.0, 0.1 * 2**n)
        assert whole / 2 <= delay <= whole
    assert len(set(delays)) > 40
    backoff.reset()
    assert backoff.next() <= 0.1


@pytest.mark.parametrize("endpoints", [[], [""], [" ", ""]])
def test_no_endpoint_is_refused_in_words(endpoints: list[str]) -> None:
    with pytest.raises(BatonError) as caught:
        EtcdClient(endpoints)
    assert caught.value.reason is Reason.INVALID_REQUEST
    assert caught.value.param == "etcd"


async def test_closed_client_says_so() -> None:
    client = EtcdClient(["127.0.0.1:1"])
    await client.close()
    with pytest.raises(BatonError, match="closed"):
        await client.get(b"k")


def test_machine_id_is_short_and_stable() -> None:
    assert machine_id() == machine_id()
    assert len(machine_id()) == 16
    int(machine_id(), 16)
