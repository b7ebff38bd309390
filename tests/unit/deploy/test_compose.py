"""compose.yaml against what the compose specification asks, and against the services it starts."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.unit.deploy.services import ROOT, SERVICES, WORKERS, accepts, leaves_within_s, unknown_environment

COMPOSE = ROOT / "deploy/compose/compose.yaml"
DOCKERFILE = ROOT / "deploy/docker/Dockerfile"
DOCUMENT: dict[str, Any] = yaml.safe_load(COMPOSE.read_text())
PROMETHEUS: dict[str, Any] = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())
FOUND: dict[str, dict[str, Any]] = DOCUMENT["services"]

TOP_LEVEL = {"name", "services", "volumes", "networks", "configs", "secrets"}
SERVICE_KEYS = {
    *("image", "build", "command", "entrypoint", "environment", "volumes", "ports", "depends_on", "healthcheck"),
    *("restart", "ulimits", "init", "stop_grace_period", "read_only", "tmpfs", "cap_drop", "security_opt"),
}
CONDITIONS = {"service_started", "service_healthy", "service_completed_successfully"}


def environment(service: str) -> dict[str, str]:
    """The service's variables, `${NAME:-default}` replaced by the default."""
    found = FOUND[service].get("environment", {})
    assert all(isinstance(value, str) for value in found.values()), "quote it: YAML must not read a number or a boolean"
    return {name: re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", value) for name, value in found.items()}


def test_top_level() -> None:
    assert {key for key in DOCUMENT if not key.startswith("x-")} <= TOP_LEVEL
    assert set(FOUND) == {*SERVICES, "etcd", "prometheus"}


@pytest.mark.parametrize("name", FOUND)
def test_service_has_what_the_specification_knows(name: str) -> None:
    service = FOUND[name]
    assert set(service) <= SERVICE_KEYS
    assert "image" in service
    assert service["restart"] == "unless-stopped"
    check = service["healthcheck"]
    assert set(check) <= {"test", "interval", "timeout", "retries", "start_period"}
    assert check["test"][0] == "CMD"
    for other, how in service.get("depends_on", {}).items():
        assert other in FOUND
        assert how["condition"] in CONDITIONS
        assert how["condition"] != "service_healthy" or "healthcheck" in FOUND[other]


def test_nothing_waits_in_a_circle() -> None:
    def behind(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, f"{' -> '.join(path)} -> {name}"
        for other in FOUND[name].get("depends_on", {}):
            behind(other, (*path, name))

    for name in FOUND:
        behind(name, ())


@pytest.mark.parametrize("name", SERVICES)
def test_images_are_built_from_the_target_of_their_name(name: str) -> None:
    build = FOUND[name]["build"]
    assert build["target"] == name
    assert (COMPOSE.parent / build["context"]).resolve() == ROOT
    assert (ROOT / build["dockerfile"]).is_file()


@pytest.mark.parametrize("name", SERVICES)
def test_environment_is_what_the_service_reads(name: str) -> None:
    values = environment(name)
    assert unknown_environment(name, values) == set()
    assert accepts(name, values)
    assert values["BATON_HOST"] == name, "it listens where others look for it"
    assert values["BATON_ETCD"].split(":") == ["etcd", "2379"]
    assert ("BATON_MODEL" in values) == (name in {*WORKERS, "frontend"})


@pytest.mark.parametrize("name", SERVICES)
def test_services_may_take_longer_to_stop_than_they_drain(name: str) -> None:
    assert int(FOUND[name]["stop_grace_period"].removesuffix("s")) > leaves_within_s(name, environment(name))


@pytest.mark.parametrize("name", SERVICES)
def test_health_check_matches_the_protocol(name: str) -> None:
    test = FOUND[name]["healthcheck"]["test"]
    assert test[1:] == (
        ["python", "/opt/baton/healthcheck.py", "http", "/ready"]
        if name == "frontend"
        else ["python", "/opt/baton/healthcheck.py", "grpc"]
    )


@pytest.mark.parametrize("name", [*WORKERS, "frontend"])
def test_the_model_is_mounted_where_the_environment_says(name: str) -> None:
    assert [volume.endswith(":/models:ro") for volume in FOUND[name]["volumes"]].count(True) == 1
    assert environment(name)["BATON_MODEL"].startswith("/models/")


def test_what_a_service_keeps_is_on_a_volume_of_its_own() -> None:
    """It outlives the container, two do not meet in it, and the image made it for the user that writes there."""
    made = re.findall(r"^RUN install --directory --owner=10001 .* (\S+)$", DOCKERFILE.read_text(), re.MULTILINE)
    kept = {"frontend": "BATON_BATCH_DIR", "kvstore": "BATON_NVME_DIR"}
    named = {name: [v.split(":") for v in FOUND[name].get("volumes", []) if v[0].isalnum()] for name in SERVICES}
    for name, variable in kept.items():
        ((volume, path),) = named[name]
        assert environment(name)[variable] == path
        assert path in made
        assert sum(v.split(":")[0] == volume for s in FOUND.values() for v in s.get("volumes", [])) == 1
    assert {name for name, volumes in named.items() if volumes} == set(kept)


def test_only_this_machine_can_reach_the_ports() -> None:
    published: dict[str, str] = {}
    for name, service in FOUND.items():
        for port in service.get("ports", []):
            address, outside, inside = port.split(":")
            assert address == "127.0.0.1"
            assert outside not in published
            published[outside] = name
            if name in SERVICES:
                assert inside == environment(name)["BATON_PORT"]
    assert published == {"8000": "frontend", "9090": "prometheus"}


def test_named_volumes_are_declared_and_mounted_files_exist() -> None:
    for service in FOUND.values():
        for volume in service.get("volumes", []):
            source = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", volume).split(":")[0]
            if source.startswith("."):
                path = (COMPOSE.parent / source).resolve()
                assert path.exists() or path == Path(ROOT / ".baton/models")
            else:
                assert source in DOCUMENT["volumes"]


def test_prometheus_scrapes_every_service_where_it_serves_metrics() -> None:
    targets: dict[str, str] = {}
    for job in PROMETHEUS["scrape_configs"]:
        assert set(job) <= {"job_name", "metrics_path", "dns_sd_configs", "static_configs", "relabel_configs"}
        for config in job["dns_sd_configs"]:
            assert config["type"] == "A"
            targets |= {name: str(config["port"]) for name in config["names"]}
    assert set(targets) == {*SERVICES, "etcd"}
    for name in SERVICES:
        port = "BATON_PORT" if name == "frontend" else "BATON_METRICS_PORT"
        assert targets[name] == environment(name)[port]
    assert len({job["job_name"] for job in PROMETHEUS["scrape_configs"]}) == len(PROMETHEUS["scrape_configs"])
