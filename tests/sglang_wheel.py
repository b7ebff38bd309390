"""SGLang's own interface without SGLang: its wheel is downloaded once, without dependencies, and never installed.

Its package imports CUDA libraries; the storage interface and the backend factory need torch alone. So the packages
above them are stood in for by empty ones with the right path, and everything below is the wheel's own code.

As a program (`make deps`): download and unpack.
"""

from __future__ import annotations

import ast
import fcntl
import subprocess
import sys
import tempfile
import types
import zipfile
from functools import lru_cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
VERSION = "0.5.23"
SHA256 = "00b3cd5b265ac76c64185fbb6b95424f324ddd9f428d0306b77bc9db9d859937"
BUILD = ("--python-version=3.11", "--implementation=cp", "--abi=cp311", "--platform=manylinux_2_34_x86_64")
"""One build for everybody: only its Python files are used, which are the same in all."""
FETCH_S = 240.0
_HOLLOW = ("sglang", "sglang.srt", "sglang.srt.mem_cache")
_TAKEN = ("sglang/srt/", "sglang/kernels/", "sglang/lang/", "sglang/utils.py")


def unpacked() -> Path:
    """The folder with the wheel's Python files, 40 MB of download the first time."""
    home = ROOT / ".baton" / "sglang"
    home.mkdir(parents=True, exist_ok=True)
    target = home / VERSION
    with (home / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (target / "sglang" / "lang").is_dir():
            with tempfile.TemporaryDirectory(dir=home) as scratch:
                _download(Path(scratch))
                if target.is_dir():  # of an older reader, who took less of the wheel
                    target.rename(Path(scratch) / "old")
                (Path(scratch) / "site").rename(target)
    return target


def importable() -> None:
    """Make `sglang.srt.mem_cache.hicache_storage` and `….storage` importable in this process."""
    _stand_in(_HOLLOW)


def language() -> None:
    """Make `sglang.lang`, the front-end language and its client, importable in this process."""
    _stand_in(("sglang", "sglang.srt"))


def _stand_in(names: tuple[str, ...]) -> None:
    site = unpacked()
    for name in names:
        if name not in sys.modules:
            package = types.ModuleType(name)
            package.__path__ = [str(site.joinpath(*name.split(".")))]
            sys.modules[name] = package


@lru_cache
def host_pool_methods(*names: str) -> dict[str, Any]:
    """Methods of SGLang's host pool for multi-head attention as the wheel has them; the class itself needs a GPU."""
    import torch

    source = unpacked() / "sglang" / "srt" / "mem_cache" / "pool_host" / "mha.py"
    (found,) = [
        node
        for node in ast.parse(source.read_text()).body
        if isinstance(node, ast.ClassDef) and node.name == "MHATokenToKVPoolHost"
    ]
    methods = [node for node in found.body if isinstance(node, ast.FunctionDef) and node.name in names]
    scope: dict[str, Any] = {"torch": torch}
    exec(compile(ast.Module(body=list(methods), type_ignores=[]), str(source), "exec"), scope)
    return {name: scope[name] for name in names}


def _download(folder: Path) -> None:
    requirements = folder / "requirements.txt"
    requirements.write_text(f"sglang=={VERSION} --hash=sha256:{SHA256}\n")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes", "--no-input"]
    command += [
        "--only-binary=:all:",
        "--disable-pip-version-check",
        *BUILD,
        "-r",
        str(requirements),
        "-d",
        str(folder),
    ]
    subprocess.run(command, stdin=subprocess.DEVNULL, timeout=FETCH_S, check=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.namelist():
            if member.endswith(".py") and member.startswith(_TAKEN):
                archive.extract(member, folder / "site")
    wheel.unlink()


if __name__ == "__main__":
    print(f"SGLang {VERSION}: {unpacked()}")
