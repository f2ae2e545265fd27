"""The page on Kubernetes: its program, started by its command, does what the page says.

The pods are told to end as the kubelet does it, and say that they were not failures.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

from tests.clusters.kubernetes.cluster import SimulatedCluster
from tests.clusters.kubernetes.controllers import PodPlan, plans
from tests.clusters.kubernetes.page import command, objects_of, program

SAVED = 75


def planned(folder: Path) -> list[PodPlan]:
    """Return the pods of the page's command; the program is not in an image here."""
    pod_plans = plans(objects_of(command(), folder))
    return [dataclasses.replace(plan, spec=_local(plan)) for plan in pod_plans]


def _local(plan: PodPlan) -> dict[str, object]:
    container = plan.container
    assert container["command"] == ["python", "/app/squares.py"]
    container["command"] = [sys.executable, "-c", program()]
    return {**plan.spec, "containers": [container]}


def test_the_program_of_the_page_runs_and_drains(
    cluster: SimulatedCluster, tmp_path: Path
) -> None:
    plan0, plan1 = planned(tmp_path)
    first = cluster.start(plan0)
    # It waits for the other: alive, and not ready.
    while cluster.probe(first, "livenessProbe")[0] != 200:
        assert first.is_running
    status, text = cluster.probe(first, "readinessProbe")
    assert status == 503
    assert json.loads(text)["ready"] is False

    second = cluster.start(plan1)
    for pod in (first, second):
        assert pod.hears("worker1 of 2: ") == "1"
        assert cluster.probe(pod, "readinessProbe")[0] == 200
        assert cluster.probe(pod, "startupProbe")[0] == 200

    assert second.terminate() == SAVED
    assert "saved" in second.output.text
    assert cluster.probe(first, "readinessProbe")[0] == 200  # the other goes on

    again = cluster.start(plan1)  # the controller replaces the pod
    assert again.hears("worker0 of 2: ") == "0"
    assert first.terminate() == SAVED
    assert again.terminate() == SAVED
