"""Programs that Slurm tells to end save, and go on at their next start."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.clusters.slurm.cluster import SlurmCluster
from tests.clusters.slurm.jobs import ENDLESS, NODES, PROGRAMS, TRAINING, Job, local_run


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
