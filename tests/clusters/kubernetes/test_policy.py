"""The NetworkPolicy of a manifest: members meet, and nobody else connects to them."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

from asyncrpc.clusters.manifest.kubernetes.kinds import KINDS
from asyncrpc.clusters.manifest.kubernetes.workload import Workload
from tests.clusters.kubernetes.cluster import Pod, SimulatedCluster
from tests.clusters.kubernetes.controllers import NAMESPACE, plans
from tests.clusters.kubernetes.policy import enforce

KNOCK = """
import socket, sys
try:
    socket.create_connection((sys.argv[1], 29500), 2.0).close()
except OSError as error:
    sys.exit(f"kept out: {error}")
print("let in")
"""


def objects(name: str) -> list[dict[str, Any]]:
    program = ("-m", "tests.clusters.kubernetes.programs", "meet")
    return KINDS["job"](
        Workload(
            name=name,
            image="registry.example/trainer:1",
            command=(sys.executable, *program),
            workers=2,
            namespace=NAMESPACE,
        )
    )


def knock(source: Pod, target: Pod) -> str:
    """Try to connect from one pod to the meeting point of another."""
    done = subprocess.run(
        [
            *("nsenter", "-t", str(source.host.pid), "-n"),
            *(sys.executable, "-c", KNOCK, target.address),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout + done.stderr


def test_members_meet_behind_the_policy_and_strangers_are_kept_out(
    cluster: SimulatedCluster,
) -> None:
    ours, others = objects("trainer"), objects("stranger")
    (policy,) = [
        manifest["spec"] for manifest in ours if manifest["kind"] == "NetworkPolicy"
    ]
    started = []
    for each in (ours, others):
        (job,) = [resource for resource in each if resource["kind"] == "Job"]
        labels = job["spec"]["template"]["metadata"]["labels"]
        started += [(cluster.start(plan), labels) for plan in plans(each)]
        enforce(policy, started, cluster.node_address)
    members = [pod for pod, _ in started[:2]]
    strangers = [pod for pod, _ in started[2:]]
    for pod in [*members, *strangers]:
        pod.hears("has called all")
    assert "let in" in knock(members[1], members[0])
    assert "kept out" in knock(strangers[0], members[0])
    # Nobody keeps them out where there is no policy.
    assert "let in" in knock(members[0], strangers[0])
