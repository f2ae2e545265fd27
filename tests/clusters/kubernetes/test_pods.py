"""Pods of a manifest meet, lose one another, and meet again.

What a pod is given comes from the manifest alone; see `cluster` for what is played.
"""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import pytest

from asyncrpc.clusters.manifest.kubernetes.kinds import KINDS
from asyncrpc.clusters.manifest.kubernetes.workload import Workload
from tests.clusters.kubernetes.cluster import SimulatedCluster
from tests.clusters.kubernetes.controllers import NAMESPACE, PodPlan, plans

PROGRAMS = ("-m", "tests.clusters.kubernetes.programs")


def planned(
    kind: str, workers: int, *program: str, attempt: int = 0, **fields: Any
) -> list[PodPlan]:
    """Return the pods that the manifest of a program leads to.

    All that one call returns are of one Job; the next call begins another.
    """
    workload = Workload(
        name="trainer",
        image="registry.example/trainer:1",
        command=(sys.executable, *PROGRAMS, *program),
        workers=workers,
        namespace=NAMESPACE,
        **fields,
    )
    return plans(KINDS[kind](workload), attempt)


@pytest.mark.parametrize("kind", ["job", "jobset", "lws", "trainjob"])
def test_pods_meet_by_the_variables_of_their_manifest(
    cluster: SimulatedCluster, kind: str
) -> None:
    """The last pod is the first to start, and the meeting point the last."""
    pods = [cluster.start(plan) for plan in reversed(planned(kind, 2, "meet"))]
    for rank, pod in enumerate(reversed(pods)):
        assert pod.hears("met as ") == f"worker{rank} of 2"
        assert pod.hears("worker0 is at ") == pods[1].address
        assert pod.hears("worker1 is at ") == pods[0].address


def test_a_name_that_is_published_late_is_waited_for(cluster: SimulatedCluster) -> None:
    plan0, plan1 = planned("job", 2, "meet")
    late = cluster.start(plan1)
    first = cluster.start(plan0, publish=False)
    missing = f"asked {plan0.full_name}: nothing"
    cluster.names.hears(missing)
    cluster.names.hears(missing, since=cluster.names.count)
    cluster.publish(first)
    for pod in (first, late):
        pod.hears("has called all")


@pytest.mark.slow
def test_name_of_a_gone_pod_is_resolved_again(cluster: SimulatedCluster) -> None:
    """After a restart the DNS still has the address of the former pod."""
    plan0, plan1 = planned("job", 2, "meet")
    former = cluster.start(plan0)
    former.hears("begins")
    former.kill()
    late = cluster.start(plan1)
    cluster.names.hears(f"asked {plan0.full_name}: {former.address}")
    first = cluster.start(plan0)
    for pod in (first, late):
        pod.hears("has called all")
        assert pod.hears("worker0 is at ") == first.address


def test_missing_pod_is_named(cluster: SimulatedCluster) -> None:
    plan0, _ = planned("job", 2, "meet", "2")
    pod = cluster.start(plan0)
    assert "rank 1" in pod.hears("missing ")
    assert pod.wait() == 1


@pytest.mark.slow
def test_a_pod_comes_back_under_its_name_at_another_address(
    cluster: SimulatedCluster,
) -> None:
    plan0, plan1, plan2 = planned("job", 3, "meet")
    pods = [cluster.start(plan) for plan in (plan0, plan1, plan2)]
    for pod in pods:
        pod.hears("has called all")
    before = [pods[0].output.count, pods[2].output.count]
    pods[1].kill()
    again = cluster.start(plan1)
    assert again.address != pods[1].address
    again.hears("has called all")
    for pod, since in zip((pods[0], pods[2]), before, strict=True):
        assert pod.hears("worker1 is at ", since=since) == again.address


def test_the_pod_of_the_meeting_point_comes_back_at_another_address(
    cluster: SimulatedCluster,
) -> None:
    """The other goes on, and takes it in again; at first the DNS leads nowhere."""
    plan0, plan1 = planned("job", 2, "meet")
    first, second = cluster.start(plan0), cluster.start(plan1)
    for pod in (first, second):
        pod.hears("has called all")
    since = second.output.count
    first.kill()
    second.hears("lost worker0")
    stale = f"asked {plan0.full_name}: {first.address}"
    cluster.names.hears(stale, since=cluster.names.count)
    again = cluster.start(plan0)
    again.hears("has called all")
    assert again.hears("worker1 is at ") == second.address
    assert second.hears("worker0 is at ", since=since) == again.address


def test_two_restarted_pods_rejoin_the_third(cluster: SimulatedCluster) -> None:
    plan0, plan1, plan2 = planned("job", 3, "meet")
    pods = [cluster.start(plan) for plan in (plan0, plan1, plan2)]
    for pod in pods:
        pod.hears("has called all")
    since = pods[2].output.count
    for pod in pods[:2]:
        pod.kill()
    second, first = cluster.start(plan1), cluster.start(plan0)
    for pod in (first, second):
        assert pod.hears("worker2 is at ") == pods[2].address
        pod.hears("has called all")
    assert pods[2].hears("worker0 is at ", since=since) == first.address
    assert pods[2].hears("worker1 is at ", since=since) == second.address


def test_restarted_job_forms_a_new_group(cluster: SimulatedCluster) -> None:
    planned_pods = planned("job", 2, "meet")
    for _ in range(2):
        pods = [cluster.start(plan) for plan in planned_pods]
        for pod in pods:
            pod.hears("has called all")
            assert pod.hears("worker0 is at ") == pods[0].address
        for pod in pods:
            pod.kill()


def test_restarted_job_set_forms_a_new_group(cluster: SimulatedCluster) -> None:
    for attempt in range(2):
        planned_pods = planned("jobset", 2, "meet", attempt=attempt)
        pods = [cluster.start(plan) for plan in planned_pods]
        for pod in pods:
            assert pod.hears("restart ") == str(attempt)
            pod.hears("has called all")
            assert pod.hears("worker0 is at ") == pods[0].address
        for pod in pods:
            pod.kill()


@pytest.mark.parametrize("first_rank", [0, 1])
def test_headless_name_that_grows_gives_one_store(
    cluster: SimulatedCluster, first_rank: int
) -> None:
    """Each hosts a store while it sees itself alone.

    The pod that starts first has the lower address, whose store remains.
    """
    variables = {"MASTER_ADDR": "trainer"}
    plans = [
        dataclasses.replace(plan, variables={**plan.variables, **variables})
        for plan in planned("job", 2, "meet")
    ]
    pods = []
    for plan in plans if first_rank == 0 else reversed(plans):
        cluster.publish_group("trainer")
        pod = cluster.start(plan)
        cluster.publish_group("trainer", pod)
        cluster.listens(pod, 29_500)
        pods.append(pod)
    cluster.publish_group("trainer", *pods)
    for pod in pods:
        pod.hears("has called all")


def test_process_1_without_a_signal_handler_is_killed_after_grace(
    cluster: SimulatedCluster,
) -> None:
    """Why the page asks for a handler: nobody tells such a program anything."""
    (plan,) = planned("job", 1, "meet", grace_s=1)
    pod = cluster.start(plan)
    pod.hears("has called all")
    assert pod.terminate() is None
