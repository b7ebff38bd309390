"""A batch that is interrupted wherever, and goes on; one that is late, cancelled, or finds the disk full."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import time
from collections import Counter
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from baton.errors import BatonError, Reason
from baton.rpc.tasks import Background
from services.frontend.batches.answer import Answer, Answerer, line_of
from services.frontend.batches.batch import WINDOW_S, Batch, Status
from services.frontend.batches.batches import Batches
from services.frontend.batches.metrics import BatchMetrics
from services.frontend.batches.usage import Usage

LINES = 20
USAGE = Usage(input=2, output=5, cached=1)
"""Of each line that is answered well."""
HANG_S = 60.0


class Scripted(Answerer):
    """Answers at once, every third line badly; never, once it has answered `most`."""

    def __init__(self, most: int = 1 << 30) -> None:
        self.answered: Counter[str] = Counter()
        self.tenants: set[str] = set()
        self._most = most

    async def answer(self, custom_id: str, endpoint: str, body: bytes, tenant: str, expires: float) -> Answer:
        if self.answered.total() >= self._most:
            await asyncio.Event().wait()
        await asyncio.sleep(0)
        self.answered[custom_id] += 1
        self.tenants.add(tenant)
        if int(custom_id) % 3 == 0:
            return Answer(False, line_of(custom_id, error=("bad", "bad")), "bad")
        answered = b'{"usage":{"prompt_tokens":2,"completion_tokens":5,"prompt_tokens_details":{"cached_tokens":1}}}'
        return Answer(True, line_of(custom_id, answered=(200, "r", msgspec.Raw(answered))), "ok", USAGE)


class World:
    """The batches of a directory, from one start to the next."""

    def __init__(self, directory: Path, answerer: Answerer | None = None, most: int = 1 << 20) -> None:
        self.background = Background("test")
        metrics = BatchMetrics(CollectorRegistry())
        self.answerer = answerer or Scripted()
        self.batches = Batches(directory, "m", 1 << 20, most, self.answerer, lambda: 4, self.background, metrics)

    async def __aenter__(self) -> Batches:
        await self.batches.open()
        return self.batches

    async def __aexit__(self, *_: object) -> None:
        await self.batches.close()
        await self.background.close()
        assert self.background.failures == 0


def line(n: int) -> bytes:
    return b'{"custom_id":"%d","method":"POST","url":"/v1/completions","body":{}}\n' % n


async def put(batches: Batches, data: bytes | None = None, tenant: str = "") -> Batch:
    """A batch of LINES lines."""
    upload = batches.files.upload(tenant)
    try:
        await upload.write(b"".join(map(line, range(LINES))) if data is None else data)
        file = await upload.keep("in", "batch")
    finally:
        upload.close()
    return await batches.create(file.id, "/v1/completions", None, tenant=tenant)


async def over(batches: Batches, id: str, tenant: str = "") -> Batch:
    async with asyncio.timeout(HANG_S):
        while not batches.get(id, tenant).status.over or id in batches._runs:  # noqa: ASYNC110
            await asyncio.sleep(0.002)
    return batches.get(id, tenant)


def names(batches: Batches, id: str | None) -> Counter[str]:
    if id is None:
        return Counter()
    return Counter(json.loads(one)["custom_id"] for one in batches.files.path(id).read_text().splitlines())


def complete(batches: Batches, batch: Batch) -> None:
    """Every line is in one of the files, once; bytes add up."""
    good, bad = names(batches, batch.output_file_id), names(batches, batch.error_file_id)
    assert good + bad == dict.fromkeys(map(str, range(LINES)), 1)
    kept = sum(file.bytes for file in batches.files.all(""))
    assert batches._space.used == kept
    assert not [p for p in (batches._directory / "batches").iterdir() if p.suffix != ".json"]


@settings(max_examples=12)
@given(stops=st.lists(st.integers(0, 12), max_size=4), torn=st.booleans())
def test_interrupted_anywhere_each_line_is_in_once(
    tmp_path_factory: pytest.TempPathFactory, stops: list[int], torn: bool
) -> None:
    """`stops`: after so many more lines the process is gone, with half a line on the disk or not."""
    directory = tmp_path_factory.mktemp("batches")

    async def play() -> None:
        id = ""
        for stop in stops:
            scripted = Scripted(stop)
            async with World(directory, scripted) as batches:
                id = id or (await put(batches)).id
                async with asyncio.timeout(HANG_S):
                    while scripted.answered.total() < stop and not batches.get(id, "").status.over:  # noqa: ASYNC110
                        await asyncio.sleep(0.002)
            path = directory / "batches" / f"{id}.output"
            # Once it is linked as a file nobody writes to it.
            if torn and path.exists() and path.stat().st_nlink == 1:
                with path.open("ab") as file:
                    file.write(b'{"custom_id":"1","resp')
        async with World(directory) as batches:
            id = id or (await put(batches)).id
            batch = await over(batches, id)
            assert (batch.status, batch.total, batch.done, batch.failed) == (Status.COMPLETED, LINES, 13, 7)
            assert batch.usage == Usage(input=26, output=65, cached=13)
            complete(batches, batch)

    asyncio.run(play())


@pytest.mark.parametrize("call", ["link", "unlink", "rename"])
async def test_interrupted_while_results_become_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """A system call of the last steps never returns: what comes after it was not done."""
    stopped = False
    scripted = Scripted()
    original = getattr(os, call)

    def dies(*args: object, **more: object) -> None:
        nonlocal stopped
        if scripted.answered.total() == LINES:
            stopped = True
            raise OSError(errno.EIO, "the process is gone")
        original(*args, **more)

    async with World(tmp_path, scripted) as batches:
        batch = await put(batches)
        record = tmp_path / "batches" / f"{batch.id}.json"
        async with asyncio.timeout(HANG_S):
            while batch.status is not Status.IN_PROGRESS:  # noqa: ASYNC110
                await asyncio.sleep(0)
            before = record.read_bytes()
            monkeypatch.setattr(os, call, dies)
            while batch.id in batches._runs:  # noqa: ASYNC110
                await asyncio.sleep(0.002)
        monkeypatch.undo()
    assert stopped
    record.write_bytes(before)  # as a process that is gone would have left it
    async with World(tmp_path) as batches:
        batch = await over(batches, batch.id)
        assert batch.status is Status.COMPLETED
        good, bad = names(batches, batch.output_file_id), names(batches, batch.error_file_id)
        assert good + bad == dict.fromkeys(map(str, range(LINES)), 1)


async def test_late_lines_are_told_and_what_is_done_is_kept(tmp_path: Path) -> None:
    scripted = Scripted(5)
    async with World(tmp_path, scripted) as batches:
        batch = await put(batches)
        async with asyncio.timeout(HANG_S):
            while scripted.answered.total() < 5:  # noqa: ASYNC110
                await asyncio.sleep(0.002)
        batch.created = int(time.time()) - WINDOW_S
        batch = await over(batches, batch.id)
        assert batch.status is Status.EXPIRED
        assert batch.at["expired"]
        assert batch.done + batch.failed <= scripted.answered.total() < LINES, "those that never ran count for neither"
        complete(batches, batch)
        lines = batches.files.path(batch.error_file_id or "").read_text().splitlines()
        codes = Counter(json.loads(one)["error"]["code"] for one in lines)
        assert codes["batch_expired"] == LINES - batch.done - batch.failed


async def test_a_cancelled_batch_ends_also_after_a_restart(tmp_path: Path) -> None:
    async with World(tmp_path, Scripted(0)) as batches:
        id = (await put(batches)).id
        async with asyncio.timeout(HANG_S):
            while batches.get(id, "").status is Status.VALIDATING:  # noqa: ASYNC110
                await asyncio.sleep(0.002)
        cancelling = asyncio.ensure_future(batches.cancel(id, ""))
        await asyncio.sleep(0)
    await cancelling
    async with World(tmp_path) as batches:
        batch = await over(batches, id)
        assert batch.status is Status.CANCELLED
        complete(batches, batch)
        with pytest.raises(BatonError, match="Cannot cancel"):
            await batches.cancel(id, "")


async def test_a_full_disk_fails_the_batch_with_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scripted = Scripted()
    write = os.write

    def full(fd: int, data: bytes) -> int:
        if scripted.answered.total() > 8:
            raise OSError(errno.ENOSPC, "no space")
        return write(fd, data)

    async with World(tmp_path, scripted) as batches:
        batch = await put(batches)
        monkeypatch.setattr(os, "write", full)
        batch = await over(batches, batch.id)
        monkeypatch.undo()
        assert batch.status is Status.FAILED
        assert [(error.code, error.message) for error in batch.errors] == [
            ("storage_full", "The disk of this server is full.")
        ]
        assert names(batches, batch.output_file_id).total() == batch.done > 0
        again = await over(batches, (await put(batches)).id)
        assert again.status is Status.COMPLETED


async def test_a_bad_file_runs_nothing(tmp_path: Path) -> None:
    async with World(tmp_path, scripted := Scripted()) as batches:
        batch = await over(batches, (await put(batches, line(0) + b"{\n" + line(0))).id)
        assert batch.status is Status.FAILED
        assert [(error.code, error.line) for error in batch.errors] == [
            ("invalid_json_line", 2),
            ("duplicate_custom_id", 3),
        ]
        assert not scripted.answered


async def test_a_file_stays_while_a_batch_needs_it(tmp_path: Path) -> None:
    async with World(tmp_path, Scripted(0)) as batches:
        batch = await put(batches)
        with pytest.raises(BatonError) as caught:
            await batches.files.delete(batch.input_file_id, "")
        assert caught.value.reason is Reason.FILE_IN_USE
        await batches.cancel(batch.id, "")
        await over(batches, batch.id)
        await batches.files.delete(batch.input_file_id, "")


async def test_a_batch_is_its_tenants_also_after_a_restart(tmp_path: Path) -> None:
    """Nobody else is told of its record, its input or its results; each of its lines is its tenant's."""
    async with World(tmp_path, first := Scripted(5)) as batches:
        batch = await put(batches, tenant="acme")
        file = batch.input_file_id
        async with asyncio.timeout(HANG_S):
            while first.answered.total() < 5:  # noqa: ASYNC110
                await asyncio.sleep(0.002)
    async with World(tmp_path, second := Scripted()) as batches:
        batch = await over(batches, batch.id, "acme")
        assert first.tenants == second.tenants == {"acme"}
        files = [file, batch.output_file_id, batch.error_file_id]
        assert {one.id for one in batches.files.all("acme")} == set(files)
        assert [one.id for one in batches.all("acme")] == [batch.id]
        for tenant in ("", "other"):
            assert (batches.all(tenant), batches.files.all(tenant)) == ([], [])
            for attempt in (
                lambda tenant=tenant: batches.get(batch.id, tenant),
                lambda tenant=tenant: batches.files.get(file, tenant),
                lambda tenant=tenant: batches.files.get(batch.output_file_id or "", tenant),
            ):
                with pytest.raises(BatonError) as caught:
                    attempt()
                assert caught.value.reason is Reason.NOT_FOUND
            for call in (
                batches.create(file, "/v1/completions", None, tenant=tenant),
                batches.cancel(batch.id, tenant),
                batches.files.delete(file, tenant),
            ):
                with pytest.raises(BatonError) as caught:
                    await call
                assert caught.value.reason is Reason.NOT_FOUND
        await batches.files.delete(file, "acme")


async def test_an_input_may_run_out_of_time_before_its_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The batch reads it to its end, also after a restart; then it goes, and later the results."""
    clock = time.time()
    monkeypatch.setattr("services.frontend.batches.files.time.time", lambda: clock)
    async with World(tmp_path, Scripted(5)) as batches:
        upload = batches.files.upload("")
        await upload.write(b"".join(map(line, range(LINES))))
        file = await upload.keep("in", "batch", 3600)
        upload.close()
        batch = await batches.create(file.id, "/v1/completions", None, 7200, tenant="")
        clock += 3600
        await batches.expire()
        with pytest.raises(BatonError, match="No such File"):
            batches.files.get(file.id, "")
        with pytest.raises(BatonError, match="No such File"):
            await batches.create(file.id, "/v1/completions", None, tenant="")
    world = World(tmp_path)
    async with world as batches:
        batch = await over(batches, batch.id)
        assert (batch.status, batch.done + batch.failed) == (Status.COMPLETED, LINES)
        await batches.expire()
        assert not batches.files.path(file.id).exists()
        complete(batches, batch)
        assert all(one.expires == one.created + 7200 for one in batches.files.all(""))
        clock += 7200
        await batches.expire()
        assert batches._space.used == len(batches.files) == 0
        assert batches.get(batch.id, "").shown()["output_file_id"]
        assert world.batches.metrics.expired._value.get() == 3


async def test_without_a_word_files_stay_for_thirty_days(tmp_path: Path) -> None:
    async with World(tmp_path) as batches:
        await over(batches, (await put(batches)).id)
        files = batches.files.all("")
        assert [file.purpose for file in files].count("batch_output") == 2
        assert all(file.expires == file.created + 30 * 24 * 3600 for file in files)


async def test_records_of_older_versions_are_read(tmp_path: Path) -> None:
    async with World(tmp_path, Scripted(3)) as batches:
        batch = await put(batches)
        async with asyncio.timeout(HANG_S):
            while batches.get(batch.id, "").status is Status.VALIDATING:  # noqa: ASYNC110
                await asyncio.sleep(0.002)
    record = tmp_path / "batches" / f"{batch.id}.json"
    old = {k: v for k, v in json.loads(record.read_bytes()).items() if k not in ("usage", "model")}
    record.write_text(json.dumps(old | {"output_seconds": None}))
    async with World(tmp_path) as batches:
        batch = await over(batches, batch.id)
        assert (batch.status, batch.usage, batch.model) == (Status.COMPLETED, Usage(26, 65, 13), None)
        assert batches.files.get(batch.output_file_id or "", "").expires is None


async def test_two_cannot_have_one_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.frontend.batches.disk.LOCK_S", 0.05)
    async with World(tmp_path):
        second = World(tmp_path)
        with pytest.raises(BatonError, match="another frontend's"):
            await second.batches.open()
    async with World(tmp_path):
        pass
