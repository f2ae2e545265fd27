"""The example saves when it is told to end, and goes on at its next start.

The tests of clusters run it on Slurm.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.examples.programs import PROGRAM_S, REPOSITORY

EXAMPLE = str(REPOSITORY / "examples" / "preemptible_training.py")
RUN = (sys.executable, "-m", "asyncrpc", "run", "--nproc", "2", "--grace", "600")


def started(folder: Path, *options: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*RUN, EXAMPLE, "--grace", "600", *options],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        encoding="utf-8",
    )


@pytest.mark.slow
def test_preempted_training_continues_from_its_checkpoint(tmp_path: Path) -> None:
    with started(tmp_path, "--steps", "1000000000") as running:
        assert running.stdout is not None
        for line in running.stdout:
            if "step 50:" in line:
                running.send_signal(signal.SIGTERM)
                break
        output, _ = running.communicate(timeout=PROGRAM_S)
    assert running.returncode == 75
    (saved,) = re.findall(r"saved step (\d+)", output)
    with started(tmp_path, "--steps", str(int(saved) + 60)) as again:
        output, _ = again.communicate(timeout=PROGRAM_S)
    assert again.returncode == 0
    for rank in (0, 1):
        assert f"[{rank}] rank {rank} starts at step {saved}\n" in output
    assert f"saved step {int(saved) + 60}\n" in output
