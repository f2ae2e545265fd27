"""Programs start on Slurm as elsewhere, with a secret of their own."""

from __future__ import annotations

import re
import stat
import sys
from pathlib import Path

from tests.clusters.slurm.cluster import SlurmCluster
from tests.clusters.slurm.jobs import ENDLESS, NODES, TRAINING, Job, local_run, losses


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
