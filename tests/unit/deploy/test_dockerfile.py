"""The Dockerfile, read as its builder reads it: stages, sources, entry points, users, health checks."""

from __future__ import annotations

import fnmatch
import importlib.util
import json
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.unit.deploy.services import ROOT, SERVICES, WORKERS, unknown_environment

DOCKERFILE = ROOT / "deploy/docker/Dockerfile"


@dataclass
class Stage:
    name: str
    parent: str
    instructions: list[tuple[str, str]] = field(default_factory=list)

    def all(self, word: str) -> list[str]:
        return [rest for instruction, rest in self.instructions if instruction == word]


def parse() -> dict[str, Stage]:
    text = re.sub(r"\\\n", " ", DOCKERFILE.read_text())
    stages: dict[str, Stage] = {}
    stage: Stage | None = None
    for line in text.splitlines():
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        word, _, rest = line.strip().partition(" ")
        assert word.isupper(), line
        if word == "FROM":
            parent, as_, name = rest.split()
            assert as_ == "AS"
            stage = stages[name] = Stage(name, parent)
        elif stage is not None:
            stage.instructions.append((word, rest.strip()))
        else:
            assert word == "ARG", "only ARG may come before the first FROM"
    return stages


STAGES = parse()


def lineage(name: str) -> list[Stage]:
    """The stage and its ancestors, oldest first."""
    chain = []
    while name in STAGES:
        chain.append(STAGES[name])
        name = STAGES[name].parent
    return chain[::-1]


def test_a_target_for_each_service() -> None:
    assert set(SERVICES) <= set(STAGES)
    roots = {stage.parent for stage in STAGES.values() if stage.parent not in STAGES}
    assert roots == {"python:${PYTHON}-slim-bookworm"}


def test_every_source_exists_and_is_sent_to_the_builder() -> None:
    ignore = (ROOT / ".dockerignore").read_text().splitlines()
    allowed = [line[1:] for line in ignore if line.startswith("!")]
    assert "*" in ignore
    for stage in STAGES.values():
        for copy in stage.all("COPY"):
            words = shlex.split(copy)
            sources = [word for word in words[:-1] if not word.startswith("--")]
            origin = [word.removeprefix("--from=") for word in words if word.startswith("--from=")]
            if origin:
                assert origin[0] in STAGES, copy
                continue
            for source in sources:
                assert (ROOT / source).exists(), f"{source} is copied and does not exist"
                assert any(source == name or fnmatch.fnmatch(source, f"{name}/*") for name in allowed), (
                    f".dockerignore keeps {source} out"
                )


@pytest.mark.parametrize("service", SERVICES)
def test_entry_point_is_the_service(service: str) -> None:
    (entry,) = STAGES[service].all("ENTRYPOINT")
    python, flag, module = json.loads(entry)
    assert (python, flag, module) == ("python", "-m", f"services.{service}")
    assert importlib.util.find_spec(f"{module}.__main__") is not None
    assert not STAGES[service].all("CMD"), "flags come from the environment"


@pytest.mark.parametrize("service", SERVICES)
def test_runs_as_nobody_special(service: str) -> None:
    users = [user for stage in lineage(service) for user in stage.all("USER")]
    assert users[-1] == "10001:10001"


@pytest.mark.parametrize("service", SERVICES)
def test_health_check_asks_the_port_that_is_exposed(service: str) -> None:
    (check,) = STAGES[service].all("HEALTHCHECK")
    command = json.loads(check.partition("CMD")[2])
    assert command[1] == "/opt/baton/healthcheck.py"
    assert command[2] == ("http" if service == "frontend" else "grpc")
    environment = environment_of(service)
    exposed = {port for stage in lineage(service) for ports in stage.all("EXPOSE") for port in ports.split()}
    assert {environment["BATON_PORT"], environment["BATON_METRICS_PORT"]} <= exposed
    copied = [copy for stage in lineage(service) for copy in stage.all("COPY")]
    assert any(copy.endswith("/opt/baton/healthcheck.py") for copy in copied)


def environment_of(service: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for stage in lineage(service):
        for line in stage.all("ENV"):
            found |= dict(word.split("=", 1) for word in shlex.split(line))
    return found


@pytest.mark.parametrize("service", SERVICES)
def test_environment_is_read_by_the_service(service: str) -> None:
    assert unknown_environment(service, environment_of(service)) == set()


def test_only_workers_carry_an_engine() -> None:
    for service in SERVICES:
        installs = " ".join(run for stage in lineage(service) for run in stage.all("RUN"))
        assert (" torch " in f"{installs} ".replace("&&", " ")) == (service in WORKERS)
        assert ("nixl" in installs) == (service in {*WORKERS, "kvstore"})


def test_every_install_is_pinned_and_no_index_is_named() -> None:
    text = DOCKERFILE.read_text()
    assert not re.search(r"https?://", text)
    for stage in STAGES.values():
        for run in stage.all("RUN"):
            for command in run.split("&&"):
                if "pip install" in command:
                    assert "-c /opt/baton/constraints.txt" in command, command


def test_the_health_check_says_no_and_yes() -> None:
    """As a container runs it: a process with an exit code."""
    from concurrent import futures

    import grpc
    from grpc_health.v1 import health, health_pb2, health_pb2_grpc

    servicer = health.HealthServicer()
    server = grpc.server(futures.ThreadPoolExecutor(2))
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()

    def check(*arguments: str) -> int:
        command = [sys.executable, str(ROOT / "deploy/docker/healthcheck.py"), *arguments]
        environment = {"BATON_HOST": "127.0.0.1", "BATON_PORT": str(port), "PATH": ""}
        return subprocess.run(command, env=environment, capture_output=True, timeout=60, check=False).returncode

    try:
        servicer.set("", health_pb2.HealthCheckResponse.SERVING)
        assert check("grpc") == 0
        servicer.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
        assert check("grpc") == 1
        assert check("http", "/health") == 1
        assert check("nonsense") == 2
    finally:
        server.stop(0).wait()
    assert check("grpc") == 1


def test_the_wheel_of_what_is_copied_carries_every_service_and_the_generated_code(tmp_path: Path) -> None:
    """From the files that the build stage copies, without code generated earlier, as a clean clone has it."""
    source = tmp_path / "src"
    for copy in STAGES["build"].all("COPY"):
        for name in shlex.split(copy)[:-1]:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("v1", "__pycache__"))
                if name == "protos":
                    shutil.copytree(ROOT / name, source / name, dirs_exist_ok=True)
            else:
                source.mkdir(exist_ok=True)
                shutil.copy(ROOT / name, source / name)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*command, "--wheel-dir", str(tmp_path), "."], cwd=source, check=True, timeout=240)
    (wheel,) = tmp_path.glob("*.whl")
    packed = set(zipfile.ZipFile(wheel).namelist())
    assert {f"services/{service}/__main__.py" for service in SERVICES} <= packed
    generated = {
        f"baton/v1/{p.stem}_pb2{part}.py" for p in (ROOT / "protos/baton/v1").glob("*.proto") for part in ("", "_grpc")
    }
    assert generated <= packed
