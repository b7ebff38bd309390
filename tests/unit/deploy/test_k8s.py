"""The base manifests: what the API server would refuse, and what it would take and then not work."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

from tests.unit.deploy.services import ROOT, SERVICES, WORKERS, accepts, leaves_within_s, unknown_environment

BASE = ROOT / "deploy/k8s/base"
Object = dict[str, Any]

API_VERSIONS = {
    "Namespace": "v1",
    "ConfigMap": "v1",
    "ServiceAccount": "v1",
    "Service": "v1",
    "PersistentVolumeClaim": "v1",
    "Deployment": "apps/v1",
    "StatefulSet": "apps/v1",
    "DaemonSet": "apps/v1",
    "PodDisruptionBudget": "policy/v1",
}
DNS_LABEL = re.compile(r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$")
QUANTITY = re.compile(r"^\d+(\.\d+)?(m|k|M|G|T|Ki|Mi|Gi|Ti)?$")


def load() -> list[Object]:
    return [
        document
        for path in sorted(BASE.glob("*.yaml"))
        if path.name != "kustomization.yaml"
        for document in yaml.safe_load_all(path.read_text())
    ]


OBJECTS = load()
KUSTOMIZATION: Object = yaml.safe_load((BASE / "kustomization.yaml").read_text())


def of(kind: str) -> dict[str, Object]:
    return {o["metadata"]["name"]: o for o in OBJECTS if o["kind"] == kind}


WORKLOADS = of("Deployment") | of("StatefulSet") | of("DaemonSet")
RUNS = {f"baton-{service}": service for service in SERVICES} | {"baton-batches": "frontend"}
"""Workloads of ours, and the service that each one runs."""
GIB = 1 << 30


def container(workload: Object) -> Object:
    (only,) = workload["spec"]["template"]["spec"]["containers"]
    found: Object = only
    return found


def labels(workload: Object) -> dict[str, str]:
    found: dict[str, str] = workload["spec"]["template"]["metadata"]["labels"]
    return found


def environment(workload: Object) -> dict[str, str]:
    """The container's variables as it sees them; those of the downward API with a stand-in."""
    values: dict[str, str] = {}
    for source in container(workload).get("envFrom", []):
        values |= of("ConfigMap")[source["configMapRef"]["name"]]["data"]
    for item in container(workload).get("env", []):
        values[item["name"]] = item.get("value", "10.0.0.1")
    return values


def test_every_file_is_listed_and_every_listed_file_is_there() -> None:
    on_disk = {path.name for path in BASE.glob("*.yaml")} - {"kustomization.yaml"}
    assert set(KUSTOMIZATION["resources"]) == on_disk
    assert len(KUSTOMIZATION["resources"]) == len(set(KUSTOMIZATION["resources"]))
    assert KUSTOMIZATION["kind"] == "Kustomization"
    assert KUSTOMIZATION["namespace"] in of("Namespace")


@pytest.mark.parametrize("found", OBJECTS, ids=lambda o: f"{o['kind']}/{o['metadata']['name']}")
def test_object_is_what_its_kind_asks(found: Object) -> None:
    assert found["apiVersion"] == API_VERSIONS[found["kind"]]
    assert DNS_LABEL.match(found["metadata"]["name"])
    assert set(found) <= {"apiVersion", "kind", "metadata", "spec", "data", "automountServiceAccountToken"}
    if found["kind"] == "ConfigMap":
        assert all(isinstance(value, str) for value in found["data"].values()), "quote it"


def test_names_are_unique() -> None:
    names = [(o["kind"], o["metadata"]["name"]) for o in OBJECTS]
    assert len(names) == len(set(names))


def test_a_workload_and_a_service_for_each_service() -> None:
    expected = {*RUNS, "baton-etcd"}
    assert set(WORKLOADS) == expected
    assert set(of("Service")) == expected


@pytest.mark.parametrize("name", WORKLOADS)
def test_selectors_match_labels(name: str) -> None:
    workload = WORKLOADS[name]
    assert workload["spec"]["selector"]["matchLabels"].items() <= labels(workload).items()
    matching = [n for n, w in WORKLOADS.items() if of("Service")[name]["spec"]["selector"].items() <= labels(w).items()]
    assert matching == [name]
    for spread in workload["spec"]["template"]["spec"].get("topologySpreadConstraints", []):
        assert spread["labelSelector"]["matchLabels"].items() <= labels(workload).items()


@pytest.mark.parametrize("name", WORKLOADS)
def test_service_ports_lead_to_container_ports(name: str) -> None:
    ports = {port["name"]: port["containerPort"] for port in container(WORKLOADS[name])["ports"]}
    assert len(set(ports.values())) == len(ports)
    for port in of("Service")[name]["spec"]["ports"]:
        assert port["targetPort"] in ports
        # a headless service does not translate: who looks it up connects to the port of the pod
        if of("Service")[name]["spec"].get("clusterIP") == "None":
            assert port["port"] == ports[port["targetPort"]]


@pytest.mark.parametrize("name", WORKLOADS)
def test_probes_ask_ports_that_are_there(name: str) -> None:
    ports = {port["name"]: port["containerPort"] for port in container(WORKLOADS[name])["ports"]}
    for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
        probe = container(WORKLOADS[name])[kind]
        (how,) = set(probe) & {"httpGet", "grpc", "tcpSocket", "exec"}
        if how == "grpc":
            assert probe["grpc"]["port"] in ports.values(), "a grpc probe takes a number"
        else:
            assert probe[how]["port"] in ports
    service = RUNS.get(name)
    if service == "frontend":
        assert container(WORKLOADS[name])["readinessProbe"]["httpGet"]["path"] == "/ready"
        assert container(WORKLOADS[name])["livenessProbe"]["httpGet"]["path"] == "/health"
    elif service:
        assert "grpc" in container(WORKLOADS[name])["readinessProbe"]
        assert "grpc" not in container(WORKLOADS[name])["livenessProbe"], "draining must not look dead"


@pytest.mark.parametrize("name", RUNS)
def test_environment_is_what_the_service_reads(name: str) -> None:
    workload, service = WORKLOADS[name], RUNS[name]
    values = environment(workload)
    assert unknown_environment(service, values) == set()
    assert accepts(service, values)
    ports = {port["name"]: port["containerPort"] for port in container(workload)["ports"]}
    assert int(values["BATON_PORT"]) == ports["http" if service == "frontend" else "grpc"]
    if service != "frontend":
        assert int(values["BATON_METRICS_PORT"]) == ports["metrics"]
    host, port = values["BATON_ETCD"].split(":")
    assert int(port) in [p["port"] for p in of("Service")[host]["spec"]["ports"]]
    sources = {
        i["name"]: i["valueFrom"]["fieldRef"]["fieldPath"] for i in container(workload)["env"] if "valueFrom" in i
    }
    assert sources == {"BATON_ID": "metadata.name", "BATON_HOST": "status.podIP"}
    assert ("BATON_MODEL" in values) == (service in {*WORKERS, "frontend"})


@pytest.mark.parametrize("name", WORKLOADS)
def test_scrape_annotations_name_the_metrics_port(name: str) -> None:
    if name in RUNS:
        annotations = WORKLOADS[name]["spec"]["template"]["metadata"]["annotations"]
        port = "BATON_PORT" if RUNS[name] == "frontend" else "BATON_METRICS_PORT"
        assert annotations["prometheus.io/port"] == environment(WORKLOADS[name])[port]


@pytest.mark.parametrize("name", WORKLOADS)
def test_pods_are_confined(name: str) -> None:
    """What the namespace enforces (`restricted`), and a bound on memory."""
    pod, only = WORKLOADS[name]["spec"]["template"]["spec"], container(WORKLOADS[name])
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] == 10001
    assert pod["securityContext"]["seccompProfile"]["type"] == "RuntimeDefault"
    assert pod["automountServiceAccountToken"] is False
    assert pod["enableServiceLinks"] is False, "service links would add variables that begin with BATON_"
    assert only["securityContext"]["allowPrivilegeEscalation"] is False
    assert only["securityContext"]["readOnlyRootFilesystem"] is True
    assert only["securityContext"]["capabilities"]["drop"] == ["ALL"]
    for kind in ("requests", "limits"):
        for quantity in only["resources"][kind].values():
            assert QUANTITY.match(str(quantity))
    assert "memory" in only["resources"]["limits"]
    assert {"cpu", "memory"} <= set(only["resources"]["requests"])


@pytest.mark.parametrize("name", RUNS)
def test_pods_may_take_longer_to_stop_than_a_service_drains(name: str) -> None:
    workload, service = WORKLOADS[name], RUNS[name]
    assert workload["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] > leaves_within_s(
        service, environment(workload)
    )
    assert "lifecycle" not in container(workload), "a preStop takes its time from the drain; a service lingers itself"


@pytest.mark.parametrize("name", WORKLOADS)
def test_every_mount_has_its_volume(name: str) -> None:
    pod = WORKLOADS[name]["spec"]["template"]["spec"]
    volumes = {volume["name"] for volume in pod.get("volumes", [])}
    volumes |= {claim["metadata"]["name"] for claim in WORKLOADS[name]["spec"].get("volumeClaimTemplates", [])}
    assert {mount["name"] for mount in container(WORKLOADS[name])["volumeMounts"]} == volumes
    for volume in pod.get("volumes", []):
        if "persistentVolumeClaim" in volume:
            assert volume["persistentVolumeClaim"]["claimName"] in of("PersistentVolumeClaim")
    assert pod.get("serviceAccountName", "baton") in of("ServiceAccount")


def test_the_model_is_where_the_environment_says() -> None:
    for name in (name for name, service in RUNS.items() if service in {*WORKERS, "frontend"}):
        mounts = {m["mountPath"]: m for m in container(WORKLOADS[name])["volumeMounts"]}
        assert environment(WORKLOADS[name])["BATON_MODEL"].startswith("/models/")
        assert mounts["/models"]["readOnly"] is True


def test_memory_holds_the_pool() -> None:
    for service, name in [*((w, "BATON_POOL_GIB") for w in WORKERS), ("kvstore", "BATON_CAPACITY_GIB")]:
        workload = WORKLOADS[f"baton-{service}"]
        requested = container(workload)["resources"]["requests"]["memory"]
        gib = int(requested[:-2]) / (1 if requested.endswith("Gi") else 1024)
        assert gib >= float(environment(workload)[name]) + 0.5


def test_budgets_select_one_workload_each_and_let_one_go() -> None:
    budgets = of("PodDisruptionBudget")
    assert set(budgets) == set(WORKLOADS) - {"baton-etcd", "baton-kvstore", "baton-batches"}
    for name, budget in budgets.items():
        assert budget["spec"]["selector"]["matchLabels"].items() <= labels(WORKLOADS[name]).items()
        assert budget["spec"]["maxUnavailable"] == 1


def test_images_are_the_targets_of_the_dockerfile() -> None:
    targets = re.findall(r"^FROM \S+ AS (\S+)$", (ROOT / "deploy/docker/Dockerfile").read_text(), re.MULTILINE)
    for name, service in RUNS.items():
        assert container(WORKLOADS[name])["image"] == f"baton-{service}"
        assert service in targets


def test_one_frontend_alone_owns_files_and_batches() -> None:
    """Replicas do not know each other's files, and two cannot have one directory; what is kept outlives the pod."""
    owners = [name for name in RUNS if "BATON_BATCH_DIR" in environment(WORKLOADS[name])]
    assert owners == ["baton-batches"]
    workload = WORKLOADS["baton-batches"]
    assert workload["kind"] == "StatefulSet", "the next pod starts when this one has gone: a Deployment starts it first"
    assert workload["spec"]["replicas"] == 1
    (claim,) = workload["spec"]["volumeClaimTemplates"]
    (mount,) = [m for m in container(workload)["volumeMounts"] if m["name"] == claim["metadata"]["name"]]
    values = environment(workload)
    assert mount["mountPath"] == values["BATON_BATCH_DIR"]
    assert claim["spec"]["accessModes"] == ["ReadWriteOnce"]
    size = claim["spec"]["resources"]["requests"]["storage"]
    assert int(size.removesuffix("Gi")) * GIB > int(values["BATON_BATCH_DIR_BYTES"]), "full by our count first"


def test_the_ingress_sends_every_path_to_who_serves_it() -> None:
    ingress: Object = yaml.safe_load((ROOT / "deploy/k8s/ingress.yaml").read_text())
    assert (ingress["apiVersion"], ingress["kind"]) == ("networking.k8s.io/v1", "Ingress")
    (rule,) = ingress["spec"]["rules"]
    to = {}
    for path in rule["http"]["paths"]:
        assert path["pathType"] == "Prefix"
        service = path["backend"]["service"]
        assert service["port"]["name"] in [p["name"] for p in of("Service")[service["name"]]["spec"]["ports"]]
        to[path["path"]] = service["name"]
    assert to == {"/": "baton-frontend", "/v1/files": "baton-batches", "/v1/batches": "baton-batches"}
