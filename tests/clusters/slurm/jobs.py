"""Batch jobs as `asyncrpc manifest slurm` makes them, and the same program at home."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Final

from asyncrpc.tools.cli.main import main
from tests.clusters.hanging import HANGS_S
from tests.clusters.slurm.cluster import SlurmCluster
from tests.commands import REPOSITORY, printed_by

TRAINING: Final = str(REPOSITORY / "examples" / "preemptible_training.py")
PROGRAMS: Final = Path(__file__).parent / "programs"
ENDLESS: Final = "1000000000"
NODES: Final = ("--nodes", "2")


class Job:
    """A batch job made by `asyncrpc manifest slurm`."""

    def __init__(
        self, cluster: SlurmCluster, folder: Path, options: list[str], *program: str
    ) -> None:
        script = folder / "job.sbatch"
        command = ["manifest", "slurm", "--file", str(script), "--output", "job.out"]
        assert main([*command, *options, sys.executable, *program]) == 0
        self.cluster, self.output = cluster, folder / "job.out"
        where = f"--chdir={folder}"
        cluster.run("sbatch", "--test-only", where, str(script))
        self.number = cluster.submit(script, where)

    def printed(self) -> str:
        return self.output.read_text() if self.output.exists() else ""

    def wait_printed(self, pattern: str, times: int = 1) -> list[str]:
        """Wait until lines are printed that match; return what its groups found."""
        what = f"{times} x {pattern!r} of job {self.number}"

        def is_printed() -> bool:
            state = self.cluster.job(self.number)["JobState"]
            printed = self.printed()
            if len(re.findall(pattern, printed, re.MULTILINE)) >= times:
                return True
            is_over = state in {"COMPLETED", "FAILED", "NODE_FAIL"}
            assert not is_over, f"{state}: {what}:\n{printed}\n{self.cluster.logs()}"
            return False

        self.cluster.wait_for(is_printed, what)
        return re.findall(pattern, self.printed(), re.MULTILINE)

    def wait_state(self, *states: str) -> dict[str, str]:
        """Wait for a state; return what Slurm says of the job."""
        return self.cluster.wait_state(self.number, *states)

    def start_again(self) -> None:
        self.cluster.start_again(self.number)


def local_run(folder: Path, *starter: str, steps: str) -> str:
    """Train on this host alone, undisturbed; return what is printed."""
    command = [sys.executable, *starter, TRAINING, "--steps", steps]
    environ = {"OMP_NUM_THREADS": "1"}
    printed = printed_by(command, cwd=folder, environ=environ, timeout_s=HANGS_S)
    return re.sub(r"^\[\d\] ", "", printed, flags=re.MULTILINE)


def losses(printed: str) -> list[str]:
    """Return the lines that tell how well the training goes."""
    return re.findall(r"^step \d+: loss .*$|^accuracy.*$", printed, re.MULTILINE)
