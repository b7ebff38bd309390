"""What integration tests share: real servers, started and ended here, and clients of a stack."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest
from openai import AsyncOpenAI

from tests.etcd import EtcdServer
from tests.integration.asking import KEY, openai_client
from tests.integration.stack import HANG_S, Stack


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[EtcdServer]:
    """A running etcd of this test's own."""
    with EtcdServer(tmp_path) as server:
        yield server


@pytest.fixture(scope="session")
def api_keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of keys, with that of `http` and `client`."""
    path = tmp_path_factory.mktemp("keys") / "keys"
    path.write_text(f"{KEY}\n")
    return path


@pytest.fixture
async def http(stack: Stack) -> AsyncIterator[httpx.AsyncClient]:
    """A plain client with the key, to the module's `stack`."""
    headers = {"authorization": f"Bearer {KEY}"}
    async with httpx.AsyncClient(base_url=stack.url(), headers=headers, trust_env=False, timeout=HANG_S) as client:
        yield client


@pytest.fixture
async def client(stack: Stack) -> AsyncIterator[AsyncOpenAI]:
    """The official client, to the same."""
    async with openai_client(stack) as client:
        yield client
