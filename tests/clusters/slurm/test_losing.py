"""A lost node is known by name at once; the program decides what follows."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.clusters.slurm.cluster import SlurmCluster
from tests.clusters.slurm.jobs import PROGRAMS, Job


@pytest.mark.parametrize("way", ["set down", "killed", "cut off"])
def test_survivors_name_a_lost_node_and_continue(
    way: str, cluster: SlurmCluster, tmp_path: Path
) -> None:
    options = ["--nodes", "3", "--survive"]
    job = Job(cluster, tmp_path, options, str(PROGRAMS / "watching.py"), "go-on")
    job.wait_printed(r"^worker\d watches$", times=3)
    lose(way, cluster)
    for name in ("worker0", "worker2"):
        job.wait_printed(f"^{name} saw that worker1 is lost$")
    job.wait_printed("^worker0 goes on with worker2$")


def test_program_lost_with_its_node_restarts_elsewhere(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    watching = str(PROGRAMS / "watching.py")
    job = Job(cluster, tmp_path, ["--nodes", "2", "--requeue"], watching, "end")
    nodes = job.wait_state("RUNNING")["NodeList"]
    assert nodes == "node[1-2]"
    job.wait_printed(r"^worker\d watches$", times=2)
    lose("killed", cluster)
    job.wait_printed("^worker0 saw that worker1 is lost$")
    job.wait_state("PENDING", "COMPLETING")
    job.start_again()
    job.wait_printed(r"^worker\d watches$", times=4)
    assert job.wait_state("RUNNING")["NodeList"] == "node[1,3]"


def lose(way: str, cluster: SlurmCluster) -> None:
    """Lose the second node in one of three ways."""
    node = cluster.nodes[1]
    if way == "set down":
        cluster.run(
            "scontrol",
            "update",
            f"NodeName={node.name}",
            "State=DOWN",
            "Reason=it smokes",
        )
    elif way == "killed":
        cluster.kill_processes(node)
    else:
        cluster.cut_off(node)
