"""Every manifest passes Kubernetes' own schemas, and a broken one does not."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest

from asyncrpc.clusters.manifest.kubernetes.kinds import KINDS
from asyncrpc.clusters.manifest.kubernetes.workload import PodProbe, ProbeKind, Workload
from tests.unit.clusters.manifest.kubernetes.schemas import (
    NEWEST,
    OLDEST,
    ManifestRefusedError,
    check_objects,
)
from tests.unit.clusters.manifest.kubernetes.workloads import full, small

Object = dict[str, Any]


def objects(kind: str, workload: Workload | None = None) -> list[Object]:
    return KINDS[kind](workload or fullest(kind))


def parts(node: Any) -> Iterator[Object]:
    """Return every dictionary in an object."""
    if isinstance(node, dict):
        yield node
        for part in node.values():
            yield from parts(part)
    elif isinstance(node, list):
        for part in node:
            yield from parts(part)


def pods(kind: str, workload: Workload | None = None) -> list[Object]:
    """Return the specifications of the workers' pods of a kind."""
    nodes = parts(objects(kind, workload))
    return [node for node in nodes if "containers" in node and "volumes" in node]


def fullest(kind: str) -> Workload:
    """Return a workload that has everything that its kind may have."""
    return full(probe=PodProbe()) if kind == "ray" else full()


def workers(kind: str, workload: Workload | None = None) -> list[Object]:
    """Return the containers of the workers of a kind."""
    templates = pods(kind, workload)
    return [container for pod in templates for container in pod["containers"]]


def the(kind: str, manifests: list[Object]) -> Object:
    """Return the one object of a kind of Kubernetes."""
    (match,) = [each for each in manifests if each["kind"] == kind]
    return match


every_kind = pytest.mark.parametrize("kind", KINDS)


@every_kind
@pytest.mark.parametrize("version", [OLDEST, NEWEST])
def test_every_manifest_passes_the_schema(kind: str, version: str) -> None:
    check_objects(objects(kind), version)
    check_objects(objects(kind, small()), version)


@pytest.mark.parametrize("kind", sorted(KINDS.keys() - {"ray"}))
def test_probe_of_the_listening_port_passes(kind: str) -> None:
    check_objects(objects(kind, small(probe=PodProbe(ProbeKind.TCP, 29_600))))


@every_kind
def test_unknown_pod_field_is_refused(kind: str) -> None:
    manifests = objects(kind)
    for pod in [part for part in parts(manifests) if "containers" in part]:
        pod["terminationGraceSeconds"] = 30
    with pytest.raises(ManifestRefusedError, match="terminationGraceSeconds"):
        check_objects(manifests)


@every_kind
def test_container_without_a_name_is_refused(kind: str) -> None:
    manifests = objects(kind)
    for pod in [part for part in parts(manifests) if "containers" in part]:
        del pod["containers"][0]["name"]
    with pytest.raises(ManifestRefusedError, match="'name' is a required property"):
        check_objects(manifests)


@every_kind
def test_number_as_text_is_refused(kind: str) -> None:
    manifests = objects(kind)
    for pod in [part for part in parts(manifests) if "containers" in part]:
        pod["terminationGracePeriodSeconds"] = "30"
    with pytest.raises(ManifestRefusedError, match="'30' is not of type"):
        check_objects(manifests)


@every_kind
def test_no_manifest_contains_a_secret(kind: str) -> None:
    kinds = {manifest["kind"] for manifest in objects(kind)}
    assert "Secret" not in kinds
    for container in workers(kind):
        by_name = {variable["name"]: variable for variable in container["env"]}
        path = by_name["ASYNCRPC_SECRET_FILE"]["value"]
        (mount,) = [
            m for m in container["volumeMounts"] if path.startswith(m["mountPath"])
        ]
        assert mount["readOnly"]
        assert "ASYNCRPC_SECRET" not in by_name
    for pod in pods(kind):
        (volume,) = [volume for volume in pod["volumes"] if "secret" in volume]
        assert volume["secret"]["secretName"] == "shared-secret"
        assert volume["secret"]["defaultMode"] == 0o400


@every_kind
def test_shared_memory_is_a_volume_in_memory(kind: str) -> None:
    for pod in pods(kind):
        (volume,) = [volume for volume in pod["volumes"] if "emptyDir" in volume]
        assert volume["emptyDir"] == {"medium": "Memory", "sizeLimit": "2Gi"}
        for container in pod["containers"]:
            paths = {m["name"]: m["mountPath"] for m in container["volumeMounts"]}
            assert paths[volume["name"]] == "/dev/shm"  # noqa: S108  (a mount)


@every_kind
def test_network_policy_admits_members_only(kind: str) -> None:
    manifests = objects(kind)
    policy = the("NetworkPolicy", manifests)["spec"]
    wanted = policy["podSelector"]["matchLabels"].items()
    assert policy["policyTypes"] == ["Ingress"]
    assert policy["ingress"][0] == {"from": [{"podSelector": policy["podSelector"]}]}
    for template in [
        part for part in parts(manifests) if "containers" in part.get("spec", {})
    ]:
        assert wanted <= template["metadata"]["labels"].items()


@every_kind
def test_all_manifests_are_in_the_namespace(kind: str) -> None:
    assert {manifest["metadata"]["namespace"] for manifest in objects(kind)} == {
        "research"
    }
    namespaces = {
        manifest["metadata"].get("namespace") for manifest in objects(kind, small())
    }
    assert namespaces == {None}


@every_kind
def test_gpus_have_limits_and_cores_have_none(kind: str) -> None:
    for container in workers(kind):
        wanted = container["resources"]
        gpus = {} if container["name"] == "ray-head" else {"nvidia.com/gpu": "2"}
        assert wanted["requests"] == {"cpu": "4", "memory": "16Gi"} | gpus
        assert wanted["limits"] == {"memory": "16Gi"} | gpus
    assert all(worker["resources"] == {} for worker in workers(kind, small()))


@every_kind
def test_pods_of_a_user_read_the_secret_without_more_rights(kind: str) -> None:
    for pod in pods(kind):
        security = pod["securityContext"]
        assert security["runAsUser"] == security["fsGroup"] == 1000
        assert security["runAsNonRoot"]
        for container in pod["containers"]:
            assert not container["securityContext"]["allowPrivilegeEscalation"]
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert all("runAsUser" not in pod["securityContext"] for pod in pods(kind, small()))


@every_kind
def test_services_of_the_namespace_set_no_variables(kind: str) -> None:
    for pod in pods(kind):
        assert pod["enableServiceLinks"] is False


@every_kind
def test_dollar_signs_are_escaped(kind: str) -> None:
    for container in workers(kind):
        by_name = {
            variable["name"]: variable.get("value") for variable in container["env"]
        }
        assert by_name["PATTERN"] == "$$(HOME)"


@every_kind
def test_builder_output_shares_nothing_between_calls(kind: str) -> None:
    workload = fullest(kind)
    first, second = objects(kind, workload), objects(kind, workload)
    before = copy.deepcopy(second)
    for part in list(parts(first)):
        part.clear()
    assert second == before
