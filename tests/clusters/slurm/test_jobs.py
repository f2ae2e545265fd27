"""Jobs on Slurm: programs start as elsewhere, lose a node, and are told to end."""

from __future__ import annotations

import re
import stat
import sys
from pathlib import Path

import pytest
import torch

from tests.clusters.slurm.cluster import SlurmCluster
from tests.clusters.slurm.jobs import (
    ENDLESS,
    NODES,
    PROGRAMS,
    TRAINING,
    Job,
    local_run,
    losses,
)


def test_srun_starts_the_programs_of_asyncrpc_run_and_torchrun(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    """The program and its result are the same, whatever starts it."""
    secret = tmp_path / "secret"
    secret.touch(0o600)
    secret.write_text("a secret of this cluster\n")
    program = [sys.executable, TRAINING, "--steps", "100"]
    with_secret = f"--export=ALL,ASYNCRPC_SECRET_FILE={secret}"
    printed = cluster.run("srun", *NODES, f"--chdir={tmp_path}", with_secret, *program)
    assert sorted(re.findall(r"^rank . starts at step 0$", printed, re.MULTILINE)) == [
        "rank 0 starts at step 0",
        "rank 1 starts at step 0",
    ]
    expected = losses(printed)
    assert len(expected) == 3
    for number, starter in enumerate(
        (
            ["-m", "asyncrpc", "run", "--nproc", "2", "--threads", "1"],
            ["-m", "torch.distributed.run", "--nproc-per-node", "2"],
        )
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        assert losses(local_run(folder, *starter, steps="100")) == expected


def test_a_secret_that_others_can_read_is_refused(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("a secret of this cluster\n")
    secret.chmod(0o644)
    options = [*NODES, "--secret-file", str(secret)]
    job = Job(cluster, tmp_path, options, TRAINING)
    job.wait_state("FAILED")
    job.wait_printed(r"ASYNCRPC_SECRET_FILE: .*0644.*chmod 600", times=2)


def test_script_makes_its_own_secret(cluster: SlurmCluster, tmp_path: Path) -> None:
    job = Job(cluster, tmp_path, [*NODES], TRAINING, "--steps", ENDLESS)
    job.wait_printed(r"^step 50:")
    (secret,) = tmp_path.glob(".asyncrpc-secret-*")
    assert secret.name == f".asyncrpc-secret-{job.number}"
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    assert len(bytes.fromhex(secret.read_text())) == 32
    cluster.run("scancel", "--signal=TERM", job.number)
    job.wait_state("FAILED")
    assert not secret.exists()


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
            *("scontrol", "update", f"NodeName={node.name}", "State=DOWN"),
            "Reason=it smokes",
        )
    elif way == "killed":
        cluster.kill_processes(node)
    else:
        cluster.cut_off(node)


def test_requeued_job_continues_from_its_checkpoint(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    """First the program ends for a signal, then the administrator requeues it."""
    job = Job(cluster, tmp_path, [*NODES, "--requeue"], TRAINING, "--steps", ENDLESS)
    job.wait_printed(r"^step 50:")
    cluster.run("scancel", "--signal=TERM", job.number)  # to its tasks, not the script
    (first,) = job.wait_printed(r"^saved step (\d+)$")
    job.start_again()
    job.wait_printed(rf"^rank . starts at step {first}$", times=2)
    job.wait_printed(rf"^step {int(first) // 50 * 50 + 50}:")

    cluster.run("scontrol", "requeue", job.number)  # SIGTERM, then KillWait
    *_, second = job.wait_printed(r"^saved step (\d+)$", times=2)
    assert int(second) > int(first)
    job.start_again()
    job.wait_printed(rf"^rank . starts at step {second}$", times=2)
    assert job.wait_state("RUNNING")["Restarts"] == "2"
    saved = torch.load(tmp_path / "training.pt", weights_only=True)

    cluster.end_jobs()  # two cores have enough to do
    undisturbed = tmp_path / "undisturbed"
    undisturbed.mkdir()
    starter = ["-m", "asyncrpc", "run", "--nproc", "2", "--threads", "1"]
    local_run(undisturbed, *starter, steps=second)
    expected = torch.load(undisturbed / "training.pt", weights_only=True)
    assert saved["steps"] == expected["steps"] == int(second)
    for name, parameter in expected["network"].items():
        torch.testing.assert_close(saved["network"][name], parameter)


def test_a_job_that_is_cancelled_saves_and_is_not_started_again(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    job = Job(cluster, tmp_path, [*NODES, "--requeue"], TRAINING, "--steps", ENDLESS)
    job.wait_printed(r"^step 50:")
    cluster.run("scancel", job.number)
    job.wait_printed(r"^saved step (\d+)$")
    job.wait_state("CANCELLED")
    cluster.wait_for(lambda: not cluster.run("squeue", "-h"), "the job is gone")
    assert job.wait_state("CANCELLED")["Restarts"] == "0"


def test_announced_time_limit_requeues_a_saved_job(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    """Slurm sends the signal within a minute: by then the limit is half an hour off."""
    options = [*NODES, "--requeue", "--time", "60", "--grace", str(29 * 60)]
    job = Job(cluster, tmp_path, options, TRAINING, "--steps", ENDLESS)
    job.wait_printed(r"^step 50:")
    cluster.run("scontrol", "update", f"JobId={job.number}", "TimeLimit=30")
    (saved,) = job.wait_printed(r"^saved step (\d+)$")
    assert job.wait_state("PENDING")["Restarts"] == "1"
    job.start_again()
    job.wait_printed(rf"^rank . starts at step {saved}$", times=2)


def test_time_limit_leaves_kill_wait_to_save(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    """Without `--grace` the limit sends SIGTERM, and 30 s later SIGKILL."""
    job = Job(cluster, tmp_path, [*NODES, "--time", "60"], TRAINING, "--steps", ENDLESS)
    job.wait_printed(r"^step 50:")
    cluster.run("scontrol", "update", f"JobId={job.number}", "TimeLimit=1")
    job.wait_printed(r"^saved step (\d+)$")
    job.wait_state("TIMEOUT")


def test_a_restart_is_a_new_incarnation_of_the_same_name(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    """A worker that outlives the job sees its workers leave, and come again."""
    where = f"tcp://{cluster.nodes[0].address}:7000"
    serving = tmp_path / "serving"
    serving.mkdir()
    secret = tmp_path / "secret"
    secret.touch(0o600)
    secret.write_text("a secret of both jobs")
    options = ["--secret-file", str(secret)]
    joining = str(PROGRAMS / "joining.py")
    server = Job(cluster, serving, options, joining, "serve", where)
    assert server.wait_state("RUNNING")["NodeList"] == cluster.nodes[0].name
    server.wait_printed("^server listens$")
    job = Job(cluster, tmp_path, [*options, "--requeue"], joining, "join", where)
    job.wait_printed("^trainer0 has joined after 0 restarts$")
    server.wait_printed("^trainer0 joined in life 1$")
    cluster.run("scancel", "--signal=TERM", job.number)
    server.wait_printed("^trainer0 left in life 1$")
    job.start_again()
    job.wait_printed("^trainer0 has joined after 1 restarts$")
    server.wait_printed("^trainer0 (joined|restarted) in life 2$")
