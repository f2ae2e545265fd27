"""What docs/how-to/run-on-slurm.md says to type is typed here."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

from tests.clusters.hanging import HANGS_S
from tests.clusters.slurm.cluster import SlurmCluster
from tests.clusters.slurm.jobs import TRAINING
from tests.commands import REPOSITORY

PAGE: Final = (REPOSITORY / "docs/how-to/run-on-slurm.md").read_text("utf-8")
BLOCKS: Final = re.findall(r"^```console\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def typed(block: str, cluster: SlurmCluster, folder: Path) -> str:
    """Type the commands of a block; return what they print."""
    shutil.copy(TRAINING, folder)
    commands = "\n".join(re.findall(r"^\$ (.*)$", block, re.MULTILINE))
    path = f"{Path(sys.executable).parent}:{cluster.environ['PATH']}"
    done = subprocess.run(
        ["/bin/bash", "-e", "-c", commands],
        cwd=folder,
        env={**cluster.environ, "PATH": path},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        encoding="utf-8",
        timeout=HANGS_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_srun_command_of_the_page_trains(cluster: SlurmCluster, tmp_path: Path) -> None:
    printed = typed(BLOCKS[0], cluster, tmp_path)
    assert "rank 0 starts at step 0" in printed
    assert "rank 1 starts at step 0" in printed
    assert re.search(r"^accuracy on held-out digits: 9", printed, re.MULTILINE)


def test_batch_job_of_the_page_completes(cluster: SlurmCluster, tmp_path: Path) -> None:
    (job,) = re.findall(
        r"Submitted batch job (\d+)", typed(BLOCKS[1], cluster, tmp_path)
    )
    known = cluster.wait_state(job, "COMPLETED", "FAILED")
    printed = (tmp_path / f"train.sbatch-{job}.out").read_text()
    assert known["JobState"] == "COMPLETED", printed
    assert "saved step 300" in printed
    assert len(BLOCKS) == 2
