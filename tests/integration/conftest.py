"""What integration tests share: real servers, started and ended here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.etcd import EtcdServer


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[EtcdServer]:
    """A running etcd of this test's own."""
    with EtcdServer(tmp_path) as server:
        yield server
