"""When a registration may write its key: the policy as a table."""

from __future__ import annotations

import asyncio

import pytest

from baton.errors import BatonError, Reason
from baton.registry.client import EtcdClient
from baton.registry.lease import LeasedKey, Policy
from baton.v1.etcd_pb2 import KeyValue

OURS, THEIRS = 7, 8


def held(value: bytes, lease: int) -> KeyValue:
    """What etcd has."""
    return KeyValue(key=b"k", value=value, lease=lease, mod_revision=3)


@pytest.mark.parametrize(
    ("policy", "was_ours", "current", "write"),
    [
        (Policy.REPLACE, False, None, True),
        (Policy.REPLACE, True, None, True),
        (Policy.REPLACE, False, held(b"new", OURS), False),
        (Policy.REPLACE, True, held(b"old", OURS), True),
        (Policy.REPLACE, False, held(b"new", THEIRS), True),  # the process before us: its lease must not end our key
        (Policy.REPLACE, False, held(b"other", THEIRS), True),
        (Policy.REPLACE, True, held(b"other", THEIRS), False),  # a later process of our id
        (Policy.FIRST, False, None, True),
        (Policy.FIRST, False, held(b"other", THEIRS), False),
        (Policy.FIRST, False, held(b"new", THEIRS), False),
        (Policy.FIRST, True, held(b"new", OURS), False),
    ],
)
async def test_when_to_write(policy: Policy, was_ours: bool, current: KeyValue | None, write: bool) -> None:
    client = EtcdClient(["127.0.0.1:1"])
    key = LeasedKey(client, b"k", b"new", policy)
    key._lease, key._was_ours = OURS, was_ours
    assert key._must_write(current) is write
    await client.close()


async def test_no_failure_ends_the_renewal(monkeypatch: pytest.MonkeyPatch) -> None:
    """gRPC raises what is no RpcError when a call breaks in the wrong moment: a process that is there stays known."""
    client = EtcdClient(["127.0.0.1:1"])
    key = LeasedKey(client, b"k", b"new")
    renewed = asyncio.Event()
    failures = [RuntimeError('Failed "execute_batch"'), BatonError(Reason.REGISTRY_UNAVAILABLE, "no answer")]

    async def beat() -> None:
        if failures:
            raise failures.pop(0)
        renewed.set()

    monkeypatch.setattr(key, "_beat", beat)
    task = asyncio.create_task(key.run())
    await asyncio.wait_for(renewed.wait(), 20.0)
    task.cancel()
    await client.close()
