"""What lies on the disk: whole or not there, counted, and found again."""

from __future__ import annotations

import asyncio
import errno
import json
import os
from collections import Counter
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.errors import BatonError, Reason
from services.frontend.batches.disk import Space, write_whole
from services.frontend.batches.expiry import DEFAULT_S, read_form_expiry, read_output_expiry
from services.frontend.batches.files import Files, Upload, check_id
from services.frontend.batches.form import Form, boundary_of, read_form
from services.frontend.batches.lines import MAX_LINE_BYTES, check_lines
from services.frontend.batches.results import ERRORS, OUTPUT, Results

LINE = b'{"custom_id":"%s","response":{"x":1}}\n'


def files_of(path: Path, *, most: int = 100, space: int = 250) -> Files:
    files = Files(path / "files", Space(space), most)
    files.open()
    return files


async def put(files: Files, data: bytes) -> str:
    upload = files.upload("")
    try:
        await upload.write(data)
        return (await upload.keep("name", "batch")).id
    finally:
        upload.close()


# ---- files


async def test_files_are_found_again_and_what_was_interrupted_is_not(tmp_path: Path) -> None:
    files = files_of(tmp_path)
    id = await put(files, b"a\nb\n")
    half = files.upload("")
    await half.write(b"half")
    (tmp_path / "files" / "x.json.new").write_bytes(b"{")
    again = files_of(tmp_path)
    assert [file.id for file in again.all("")] == [id]
    assert (again.get(id, "").bytes, again.get(id, "").lines) == (4, 2)
    assert sorted(path.name for path in (tmp_path / "files").iterdir()) == [f"{id}.data", f"{id}.json"]
    half.close()


async def test_bytes_and_uploads_are_bounded_and_given_back(tmp_path: Path) -> None:
    files = files_of(tmp_path)
    ids = [await put(files, b"x" * 100) for _ in range(2)]
    with pytest.raises(BatonError) as full:
        await put(files, b"x" * 100)
    assert full.value.reason is Reason.STORAGE_FULL
    with pytest.raises(BatonError) as large:
        await put(files, b"x" * 101)
    assert large.value.reason is Reason.REQUEST_TOO_LARGE
    await files.delete(ids[0], "")
    ids[0] = await put(files, b"x" * 100)
    for id in ids:
        await files.delete(id, "")
    assert files._space.used == 0
    assert list((tmp_path / "files").iterdir()) == []
    uploads = [files.upload("") for _ in range(8)]
    with pytest.raises(BatonError, match="taking other files in"):
        files.upload("")
    for upload in uploads:
        upload.close()
    await put(files, b"x")


async def test_a_file_is_no_more_when_its_time_has_passed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = 1_000_000.0
    monkeypatch.setattr("services.frontend.batches.files.time.time", lambda: clock)
    files = files_of(tmp_path)
    upload = files.upload("")
    await upload.write(b"short")
    short = (await upload.keep("name", "batch", 3600)).id
    upload.close()
    stays = await put(files, b"stays")
    (tmp_path / "made").write_bytes(b"made\n")
    files._space.take(5)
    made = files.adopt(tmp_path / "made", "file-" + "0" * 24, "", "made", 7200)
    assert [files.get(id, "").shown()["expires_at"] for id in (short, stays, made.id)] == [
        1_003_600,
        1_000_000 + DEFAULT_S,
        1_007_200,
    ]
    clock += 3599
    assert await files.expire() == 0
    files = files_of(tmp_path)
    assert len(files.all("")) == 3, "the record tells it after a restart too"
    clock += 1
    for refused in (files.get, lambda *named: asyncio.run(files.delete(*named))):
        with pytest.raises(BatonError) as gone:
            await asyncio.to_thread(refused, short, "")
        assert gone.value.reason is Reason.NOT_FOUND
    assert {file.id for file in files.all("")} == {stays, made.id}
    files.in_use = lambda id: "batch_1" if id == short else None
    assert await files.expire() == 0
    assert files.path(short).read_bytes() == b"short", "who reads it may do so to the end"
    files.in_use = lambda _: None
    assert await files.expire() == 1
    assert not files.path(short).exists()
    assert files._space.used == 10
    clock += 3600
    with monkeypatch.context() as broken:
        broken.setattr(files, "_remove", lambda _: os.unlink("/nowhere"))
        assert await files.expire() == 0
    assert await files.expire() == 1, "what failed is tried again"
    assert [file.id for file in files_of(tmp_path).all("")] == [stays]


@pytest.mark.parametrize(
    ("value", "param"),
    [
        ("x", "output_expires_after"),
        ({}, "output_expires_after.anchor"),
        ({"anchor": "used_at", "seconds": 3600}, "output_expires_after.anchor"),
        *[
            ({"anchor": "created_at", "seconds": seconds}, "output_expires_after.seconds")
            for seconds in (None, 3599, 2_592_001, 3600.0, True, "3600", 10**30)
        ],
    ],
)
def test_how_long_a_file_stays_is_checked(value: Any, param: str) -> None:
    with pytest.raises(BatonError) as caught:
        read_output_expiry(value)
    assert (caught.value.reason, caught.value.param) == (Reason.INVALID_REQUEST, param)
    if isinstance(value, dict) and not isinstance(value.get("seconds"), str):
        form = {f"expires_after[{name}]": str(one) for name, one in value.items()}
        if form:
            with pytest.raises(BatonError) as caught:
                read_form_expiry(form)
            assert caught.value.param == param.replace("output_", "").replace(".", "[") + "]"


def test_how_long_a_file_may_stay() -> None:
    for seconds in (3600, 2_592_000):
        assert read_output_expiry({"anchor": "created_at", "seconds": seconds}) == seconds
        form = {"purpose": "batch", "expires_after[anchor]": "created_at", "expires_after[seconds]": str(seconds)}
        assert read_form_expiry(form) == seconds
    assert read_output_expiry(None) == read_form_expiry({"purpose": "batch"}) == 2_592_000
    with pytest.raises(BatonError, match="A form says it as"):
        read_form_expiry({"expires_after": "{}"})


async def test_a_full_disk_is_told_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = files_of(tmp_path)

    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(BatonError) as caught:
        await put(files, b"x")
    assert caught.value.reason is Reason.STORAGE_FULL
    monkeypatch.undo()
    assert files._space.used == 0
    assert list((tmp_path / "files").iterdir()) == []


@pytest.mark.parametrize(
    "id", ["", "file-", "file-../lock", "file-" + "A" * 24, "batch_" + "0" * 24, "file-" + "0" * 25]
)
def test_nothing_but_a_name_of_ours_becomes_a_path(id: str) -> None:
    with pytest.raises(BatonError, match="No such File"):
        check_id(id, "file-")
    assert check_id("file-" + "0" * 24, "file-")


def test_what_is_written_whole_is_there_or_as_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.json"
    write_whole(path, b"before")

    def fails(*_: object) -> None:
        raise OSError(errno.EIO, "broken")

    for call in ("fsync", "rename"):
        monkeypatch.setattr(os, call, fails)
        with pytest.raises(OSError, match="broken"):
            write_whole(path, b"after")
        monkeypatch.undo()
        assert path.read_bytes() == b"before"
        assert list(tmp_path.iterdir()) == [path]


# ---- forms


class Sink:
    """An upload that keeps what it is given."""

    def __init__(self) -> None:
        self.data = b""

    async def write(self, data: bytes) -> None:
        self.data += data


def form_of(parts: dict[str, bytes], filename: str = "in.jsonl") -> bytes:
    body = b""
    for name, value in parts.items():
        more = f'; filename="{filename}"' if name == "file" else ""
        body += f'--B\r\nContent-Disposition: form-data; name="{name}"{more}\r\n\r\n'.encode() + value + b"\r\n"
    return body + b"--B--\r\n"


async def read(body: bytes, *cuts: int) -> tuple[Form, bytes]:
    async def parts() -> AsyncIterator[bytes]:
        edges = [0, *sorted(cuts), len(body)]
        for start, end in pairwise(edges):
            yield body[start:end]

    sink = Sink()
    upload: Upload = sink  # type: ignore[assignment]
    return await read_form(b"B", parts(), upload), sink.data


@settings(max_examples=50)
@given(cuts=st.lists(st.integers(0, 180), max_size=6), data=st.binary(max_size=60))
def test_a_form_is_the_same_however_it_is_cut(cuts: list[int], data: bytes) -> None:
    body = form_of({"purpose": b"batch", "file": data})
    form, file = asyncio.run(read(body, *(cut for cut in cuts if cut < len(body))))
    assert (form.fields, form.filename, file) == ({"purpose": "batch"}, "in.jsonl", data)


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"", "too early"),
        (b"nonsense", "cannot be read"),
        (form_of({"file": b"x"})[:-6], "too early"),
        (form_of({"purpose": b"batch"}), "no file"),
        (form_of({"file": b"x"})[:-8] + b"\r\n" + form_of({"file": b"y"}), "more than one file"),
        (form_of({"purpose": b"b" * 5000, "file": b"x"}), "more than 4096 bytes"),
        (form_of({f"f{n}": b"" for n in range(17)}), "more than 16 fields"),
        (form_of({"file": b"x"}, filename="f" * 5000), "cannot be read"),
    ],
)
async def test_a_bad_form_is_refused(body: bytes, why: str) -> None:
    with pytest.raises(BatonError, match=why):
        await read(body)


def test_only_forms_are_uploads() -> None:
    assert boundary_of({"content-type": 'multipart/form-data; boundary="x y"'}) == b"x y"
    for headers in ({}, {"content-type": "application/json"}, {"content-type": "multipart/mixed; boundary=x"}):
        with pytest.raises(BatonError) as caught:
            boundary_of(headers)
        assert caught.value.reason is Reason.UNSUPPORTED_MEDIA_TYPE
    with pytest.raises(BatonError, match="boundary"):
        boundary_of({"content-type": "multipart/form-data"})


# ---- lines


def test_positions_are_those_of_the_file() -> None:
    line = b'{"custom_id":"%d","method":"POST","url":"/v1/completions","body":{"a":%d}}\n'
    parts = [line % (1, 1), b"\n", line % (2, 2), b"  \n", (line % (3, 3)).rstrip()]
    index, errors = check_lines(parts, "/v1/completions")
    assert not errors
    data = b"".join(parts)
    found = [data[start : start + size] for start, size in zip(index.starts, index.sizes, strict=True)]
    assert found == [parts[0], parts[2], parts[4]]
    assert index.custom_ids == {"1": 0, "2": 1, "3": 2}


@pytest.mark.parametrize(
    "raw",
    [b"\xff\n", b"[" * 100_000 + b"\n", b'{"custom_id":"\xed\xa0\x80"}\n', b"null\n", b"x" * (MAX_LINE_BYTES + 1)],
)
def test_no_line_can_do_harm(raw: bytes) -> None:
    index, errors = check_lines([raw], "/v1/completions")
    assert len(index) == 0
    assert [error.line for error in errors] == [1]


# ---- results


def ids_of(results: Results) -> Counter[str]:
    lines = [line for path in results.paths.values() for line in path.read_text().splitlines()]
    return Counter(json.loads(line)["custom_id"] for line in lines)


@settings(max_examples=40)
@given(cut=st.integers(0, 400), garbage=st.sampled_from([b"", b"\x00\x00\n", b"{}\n"]))
def test_what_counted_is_there_and_the_rest_is_cut_off(
    tmp_path_factory: pytest.TempPathFactory, cut: int, garbage: bytes
) -> None:
    """A crash leaves a beginning of what was written, and perhaps something that is no line."""
    directory = tmp_path_factory.mktemp("results")
    lines = [LINE % f"{n}".encode() for n in range(8)]
    whole = b"".join(lines)
    (directory / "b.output").write_bytes(whole[:cut] + garbage)
    (directory / "b.errors").write_bytes(LINE % b"bad")
    space = Space(10_000)
    results = Results(directory, "b", space)
    results.open()
    counted = min(cut, len(whole)) // len(lines[0])
    assert results.done == {str(n) for n in range(counted)} | {"bad"}
    assert space.used == results.sizes[OUTPUT] + results.sizes[ERRORS]

    async def rest() -> None:
        await asyncio.gather(*(results.add(OUTPUT, str(n), lines[n]) for n in range(counted, 8)))
        await results.close()

    asyncio.run(rest())
    assert ids_of(results) == dict.fromkeys([*map(str, range(8)), "bad"], 1)
    assert results.counts == {OUTPUT: 8, ERRORS: 1}


async def test_a_full_disk_takes_all_of_it_or_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = Results(tmp_path, "b", space := Space(10_000))
    results.open()
    await results.add(OUTPUT, "0", LINE % b"0")
    write = os.write

    def full(fd: int, data: bytes) -> int:
        write(fd, bytes(data)[:10])
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(os, "write", full)
    both = await asyncio.gather(
        *(results.add(OUTPUT, str(n), LINE % b"%d" % n) for n in (1, 2)), return_exceptions=True
    )
    assert [error.reason for error in both if isinstance(error, BatonError)] == [Reason.STORAGE_FULL] * 2
    monkeypatch.undo()
    assert results.paths[OUTPUT].read_bytes() == LINE % b"0"
    await results.add(OUTPUT, "3", LINE % b"3")
    await results.close()
    assert ids_of(results) == {"0": 1, "3": 1}
    assert space.used == results.sizes[OUTPUT]


async def test_a_line_whose_task_is_cancelled_counts_once_or_not_at_all(tmp_path: Path) -> None:
    results = Results(tmp_path, "b", space := Space(10_000))
    results.open()
    tasks = [asyncio.ensure_future(results.add(OUTPUT, str(n), LINE % b"%d" % n)) for n in range(20)]
    await asyncio.sleep(0)
    for task in tasks[::2]:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await results.close()
    found = ids_of(results)
    assert set(found.values()) == {1}
    assert set(found) >= {str(n) for n in range(1, 20, 2)}
    assert results.counts[OUTPUT] == len(found)
    assert results.done == set(found)
    assert space.used == results.sizes[OUTPUT]
