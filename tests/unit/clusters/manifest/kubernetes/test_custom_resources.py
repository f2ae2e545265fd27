"""What is peculiar to each custom resource, and what its schema refuses."""

from __future__ import annotations

from typing import Any

import pytest

from asyncrpc.clusters.manifest.kubernetes.workload import PodProbe, ProbeKind
from asyncrpc.errors import UsageError
from tests.unit.clusters.manifest.kubernetes.schemas import (
    ManifestRefusedError,
    check_object,
    custom_schemas,
)
from tests.unit.clusters.manifest.kubernetes.test_manifests import (
    objects,
    the,
    workers,
)
from tests.unit.clusters.manifest.kubernetes.workloads import small


def variables(kind: str) -> dict[str, Any]:
    (worker,) = workers(kind, small())
    return {
        variable["name"]: variable.get("value", variable.get("valueFrom"))
        for variable in worker["env"]
    }


def test_each_custom_resource_has_a_schema() -> None:
    kinds = {kind for _, kind in custom_schemas()}
    assert kinds == {
        *("JobSet", "LeaderWorkerSet", "TrainJob", "TrainingRuntime", "RayJob")
    }


@pytest.mark.parametrize(
    ("kind", "name", "path", "value", "words"),
    [
        ("jobset", "JobSet", "spec/network/publishNotReady", True, "publishNotReady"),
        ("jobset", "JobSet", "spec/failurePolicy/maxRestarts", "3", "not of type"),
        ("jobset", "JobSet", "spec/failurePolicy/restartStrategy", "All", "not one of"),
        ("lws", "LeaderWorkerSet", "spec/startupPolicy", "Ready", "not one of"),
        (
            "lws",
            "LeaderWorkerSet",
            "spec/leaderWorkerTemplate/size",
            "4",
            "not of type",
        ),
        ("lws", "LeaderWorkerSet", "spec/leaderWorkerTemplate", {}, "workerTemplate"),
        ("trainjob", "TrainJob", "spec/runtimeRef", {}, "'name' is a required"),
        ("trainjob", "TrainJob", "spec/trainer/nodes", 4, "nodes"),
        ("trainjob", "TrainingRuntime", "spec", {}, "should be non-empty"),
        ("trainjob", "TrainingRuntime", "spec/mlPolicy/torch/nproc", 1, "nproc"),
        ("ray", "RayJob", "spec/entrypoint", ["python"], "not of type"),
        ("ray", "RayJob", "spec/rayClusterSpec", {}, "'headGroupSpec' is a required"),
    ],
)
def test_wrong_custom_resource_is_refused(
    kind: str, name: str, path: str, value: object, words: str
) -> None:
    manifest = the(name, objects(kind))
    *outer, last = path.split("/")
    part = manifest
    for key in outer:
        part = part[key]
    part[last] = value
    with pytest.raises(ManifestRefusedError, match=words):
        check_object(manifest)


def test_job_pods_take_the_run_id_from_their_controller() -> None:
    uid = "metadata.labels['batch.kubernetes.io/controller-uid']"
    source = {"fieldRef": {"fieldPath": uid}}
    assert variables("job")["ASYNCRPC_RUN_ID"] == source


def test_job_set_pods_know_their_address_and_attempt() -> None:
    environment = variables("jobset")
    assert environment["WORLD_SIZE"] == "4"
    assert environment["MASTER_ADDR"] == "trainer-worker-0-0.trainer"
    spec = the("JobSet", objects("jobset"))["spec"]
    assert spec["network"]["subdomain"] == "trainer"
    assert spec["network"]["publishNotReadyAddresses"]
    attempt = "metadata.annotations['jobset.sigs.k8s.io/restart-attempt']"
    assert environment["JOBSET_RESTART_ATTEMPT"] == {"fieldRef": {"fieldPath": attempt}}


@pytest.mark.parametrize(
    ("kind", "name"), [("jobset", "JobSet"), ("trainjob", "TrainingRuntime")]
)
def test_job_set_restarts_all_pods_and_ignores_disruptions(
    kind: str, name: str
) -> None:
    spec = the(name, objects(kind))["spec"]
    spec = spec["template"]["spec"] if name == "TrainingRuntime" else spec
    policy = spec["failurePolicy"]
    assert policy["maxRestarts"] == 2
    (rule,) = policy["rules"]
    assert rule["action"] == "RestartJobSetAndIgnoreMaxRestarts"
    (job,) = spec["replicatedJobs"]
    job = job["template"]["spec"]
    assert job["backoffLimit"] == 0
    assert {rule["action"] for rule in job["podFailurePolicy"]["rules"]} == {"FailJob"}
    (container,) = job["template"]["spec"]["containers"]
    code = job["podFailurePolicy"]["rules"][1]["onExitCodes"]
    assert code["containerName"] == container["name"]


def test_leader_worker_set_sets_all_variables_but_the_port() -> None:
    assert variables("lws").keys() == {"MASTER_PORT", "ASYNCRPC_SECRET_FILE"}
    spec = the("LeaderWorkerSet", objects("lws"))["spec"]
    assert spec["leaderWorkerTemplate"]["size"] == 4
    template = spec["leaderWorkerTemplate"]["workerTemplate"]
    assert template["spec"]["restartPolicy"] == "Always"
    # The leader is ready when it has met the others, which must not wait for that.
    assert spec["startupPolicy"] == "LeaderCreated"


def test_train_job_refers_to_its_runtime_with_container_node() -> None:
    manifests = objects("trainjob")
    run, runtime = the("TrainJob", manifests), the("TrainingRuntime", manifests)
    reference = run["spec"]["runtimeRef"]
    assert (reference["kind"], reference["name"]) == ("TrainingRuntime", "trainer")
    assert runtime["metadata"]["name"] == "trainer"
    assert run["spec"]["trainer"] == {"numNodes": 4}
    (worker,) = workers("trainjob")
    assert worker["name"] == "node"
    names = {variable["name"] for variable in worker["env"]}
    assert not names & {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}


def test_train_job_has_the_port_of_its_controller() -> None:
    with pytest.raises(UsageError, match="--port must be 29500 for a TrainJob"):
        objects("trainjob", small(port=7000))


def test_ray_job_runs_the_program_on_a_head_without_cores() -> None:
    manifest = the("RayJob", objects("ray", small(command=("python", "-c", "a b"))))
    assert manifest["spec"]["entrypoint"] == "python -c 'a b'"
    cluster = manifest["spec"]["rayClusterSpec"]
    assert cluster["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    (group,) = cluster["workerGroupSpecs"]
    assert group["replicas"] == group["minReplicas"] == group["maxReplicas"] == 4
    # KubeRay makes the commands.
    assert all("command" not in worker for worker in workers("ray"))


def test_network_policy_lets_ray_in_to_the_dashboard_only() -> None:
    _, rule = the("NetworkPolicy", objects("ray"))["spec"]["ingress"]
    assert rule["ports"] == [{"port": 8265, "protocol": "TCP"}]


def test_ray_is_probed_by_its_operator() -> None:
    with pytest.raises(UsageError, match="--probe must be none for Ray"):
        objects("ray", small(probe=PodProbe(ProbeKind.HTTP, 8080)))


@pytest.mark.parametrize(
    ("kind", "most"), [("job", 61), ("jobset", 46), ("lws", 59), ("trainjob", 48)]
)
def test_pod_names_fit_the_dns(kind: str, most: int) -> None:
    objects(kind, small(name="a" * most))
    with pytest.raises(UsageError, match=f"NAME must have at most {most} characters"):
        objects(kind, small(name="a" * (most + 1)))
