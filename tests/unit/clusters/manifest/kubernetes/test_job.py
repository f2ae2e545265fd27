"""An indexed Job: what its pods are told, and how the resolver of env:// reads it."""

from __future__ import annotations

import pytest

from asyncrpc.errors import UsageError
from tests.unit.clusters.manifest.kubernetes.test_manifests import (
    objects,
    pods,
    the,
    workers,
)
from tests.unit.clusters.manifest.kubernetes.workloads import full, small


def test_service_names_pods_that_are_not_ready() -> None:
    service = the("Service", objects("job"))["spec"]
    assert service["publishNotReadyAddresses"]
    assert service["clusterIP"] == "None"
    (pod,) = pods("job")
    assert pod["subdomain"] == "trainer"


def test_job_pods_know_their_address_and_world_size() -> None:
    (worker,) = workers("job", small(port=7000))
    by_name = {variable["name"]: variable.get("value") for variable in worker["env"]}
    assert by_name["WORLD_SIZE"] == "4"
    assert by_name["MASTER_ADDR"] == "trainer-0.trainer"
    assert by_name["MASTER_PORT"] == "7000"
    assert "RANK" not in by_name  # it is the index, which Kubernetes tells each pod


def test_pod_has_time_to_drain() -> None:
    (pod,) = pods("job", full(grace_s=60, pre_stop_s=5))
    assert pod["terminationGracePeriodSeconds"] == 65
    (worker,) = pod["containers"]
    assert worker["lifecycle"] == {"preStop": {"sleep": {"seconds": 5}}}
    (pod,) = pods("job", small())
    assert pod["terminationGracePeriodSeconds"] == 30
    assert "lifecycle" not in pod["containers"][0]


def test_preempted_pod_is_replaced_without_counting() -> None:
    spec = the("Job", objects("job"))["spec"]
    assert spec["completions"] == spec["parallelism"] == 4
    assert spec["podReplacementPolicy"] == "Failed"
    assert spec["backoffLimitPerIndex"] == 2
    rules = spec["podFailurePolicy"]["rules"]
    assert {rule["action"] for rule in rules} == {"Ignore"}
    assert rules[1]["onExitCodes"]["values"] == [75]
    # Kubernetes demands Never where there are such rules.
    assert spec["template"]["spec"]["restartPolicy"] == "Never"


def test_name_too_long_for_the_pods_is_refused() -> None:
    with pytest.raises(UsageError, match="NAME must have at most 61 characters"):
        objects("job", small(name="a" * 62))
