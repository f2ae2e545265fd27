"""Programs on a real Slurm: started, requeued, told to end, and with a node lost."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
from pathlib import Path

from asyncrpc.cli.main import main
from tests.clusters.slurm.cluster import WITHIN_S, SlurmCluster

REPOSITORY = Path(__file__).parents[3]
TRAINING = str(REPOSITORY / "examples" / "preemptible_training.py")
PROGRAMS = Path(__file__).parent / "programs"
ENDLESS = "1000000000"
NODES = ("--nodes", "2")


class Job:
    """A batch job made by `asyncrpc manifest slurm`."""

    def __init__(
        self, cluster: SlurmCluster, folder: Path, options: list[str], *program: str
    ) -> None:
        script = folder / "job.sbatch"
        made = ["manifest", "slurm", "--file", str(script), "--output", "job.out"]
        assert main([*made, *options, sys.executable, *program]) == 0
        self.cluster, self.output = cluster, folder / "job.out"
        where = f"--chdir={folder}"
        cluster.run("sbatch", "--test-only", where, str(script))
        self.number = cluster.submit(script, where)

    def printed(self) -> str:
        """Return what the job has printed."""
        return self.output.read_text() if self.output.exists() else ""

    def wait_printed(self, pattern: str, times: int = 1) -> list[str]:
        """Wait until lines are printed that match; return what its groups found."""
        self.cluster.wait_for(
            lambda: len(re.findall(pattern, self.printed(), re.MULTILINE)) >= times,
            f"{times} x {pattern!r} in:\n{self.printed()}",
        )
        return re.findall(pattern, self.printed(), re.MULTILINE)

    def wait_state(self, *states: str) -> dict[str, str]:
        """Wait for a state; return what Slurm says of the job."""
        return self.cluster.wait_state(self.number, *states)

    def start_again(self) -> None:
        """Let it begin again now."""
        self.cluster.start_again(self.number)


def local_run(folder: Path, *starter: str, steps: str) -> str:
    """Train on this host alone, undisturbed; return what is printed."""
    done = subprocess.run(
        [sys.executable, *starter, TRAINING, "--steps", steps],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        encoding="utf-8",
        timeout=WITHIN_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return re.sub(r"^\[\d\] ", "", done.stdout, flags=re.MULTILINE)


def losses(printed: str) -> list[str]:
    return re.findall(r"^step \d+: loss .*$|^accuracy.*$", printed, re.MULTILINE)


# --- starting -------------------------------------------------------------------------


def test_srun_starts_what_asyncrpc_run_and_torchrun_start(
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


def test_the_script_makes_a_secret_of_its_own(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    job = Job(cluster, tmp_path, [*NODES], TRAINING, "--steps", ENDLESS)
    job.wait_printed(r"^step 50:")
    (secret,) = tmp_path.glob(".asyncrpc-secret-*")
    assert secret.name == f".asyncrpc-secret-{job.number}"
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    assert len(bytes.fromhex(secret.read_text())) == 32
    cluster.run("scancel", "--signal=TERM", job.number)
    job.wait_state("FAILED")
    assert not secret.exists()


# --- starting again ----------------------------------------------------------------


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
