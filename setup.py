"""Build hook: generate the gRPC code from protos/ into baton/v1 (wheels, editable installs and `make protos` alike)."""

import os
import subprocess
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent


def generate_protos() -> None:
    """Compile every .proto with the protoc that grpcio-tools carries; type stubs come from mypy-protobuf."""
    protos = sorted(str(p.relative_to(ROOT / "protos")) for p in (ROOT / "protos").rglob("*.proto"))
    out = f"{ROOT}"
    flags = [f"--{kind}_out={out}" for kind in ("python", "grpc_python", "mypy", "mypy_grpc")]
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{ROOT / 'protos'}", *flags, *protos]
    # protoc finds its mypy plugin on the PATH: the one beside this interpreter.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    subprocess.run(command, check=True, cwd=ROOT, env={**os.environ, "PATH": path})
    (ROOT / "baton" / "v1" / "__init__.py").write_text('"""Generated from protos/baton/v1; do not edit."""\n')


class BuildWithProtos(build_py):
    """`build_py` that generates first, so a clean clone installs with one command."""

    def run(self) -> None:
        generate_protos()
        # In a clean clone the folder did not exist when packages were looked for.
        self.packages = sorted({*(self.packages or ()), "baton.v1"})
        super().run()


if __name__ == "__main__":
    if sys.argv[1:] == ["protos"]:
        generate_protos()
    else:
        setup(cmdclass={"build_py": BuildWithProtos})
