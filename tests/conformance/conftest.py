"""One set of workers for each engine and session of tests; after every test nothing is left in any of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from baton.v1 import registry_pb2
from tests.conformance.subjects import SUBJECTS, Subject
from tests.worker_process import Frontend, frontend, settle

START_S = 900
"""The first test of an engine waits for its workers: vLLM's take minutes on a busy machine."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """This hook sees the items of every folder."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.timeout(START_S))


@pytest.fixture(scope="package", params=sorted(SUBJECTS))
def started(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, model_path: Path
) -> Iterator[Subject]:
    """The engine's workers, and what they say of themselves."""
    name: str = request.param
    with SUBJECTS[name](tmp_path_factory.mktemp(name), model_path) as subject:
        described = asyncio.run(_describe(subject))
        assert described.HasField("layout") == subject.hands_over
        subject.lacks = frozenset(described.lacks)
        subject.exact = described.resume == "exact"
        yield subject


async def _describe(subject: Subject) -> registry_pb2.Worker:
    async with frontend(subject.merged) as client:
        return client.described


@pytest_asyncio.fixture
async def subject(started: Subject) -> AsyncIterator[Subject]:
    """The engine, clean before and after."""
    yield started
    await settle(*started.workers)


@pytest_asyncio.fixture
async def client(subject: Subject) -> AsyncIterator[Frontend]:
    """A frontend of the merged worker."""
    async with frontend(subject.merged) as one:
        yield one


@pytest_asyncio.fixture
async def decode(subject: Subject) -> AsyncIterator[Frontend]:
    """A frontend of the decode worker; skips engines that hand nothing over."""
    if subject.decode is None:
        pytest.skip("its KV is out of reach")
    async with frontend(subject.decode) as one:
        yield one


@pytest.fixture
def can(subject: Subject) -> Callable[..., None]:
    """`can(need...)` skips engines that lack one of them."""

    def check(*needs: str) -> None:
        if lacking := subject.lacks & set(needs):
            pytest.skip(f"it says that it cannot do {', '.join(sorted(lacking))}")

    return check
