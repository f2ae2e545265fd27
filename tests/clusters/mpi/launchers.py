"""Both launchers of MPI, as Debian has them side by side."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from tests.clusters.hanging import HANGS_S

ROOT: Final = Path(__file__).resolve().parents[3]
LAUNCHERS: Final = ("mpirun.openmpi", "mpirun.mpich")
# Our containers are run by root, and have fewer cores than the tests have processes.
_FOR_OPEN_MPI: Final = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    # Bound to a core, a process waits for what else runs on it.
    "OMPI_MCA_hwloc_base_binding_policy": "none",
}
_OF_LAUNCHERS: Final = (
    "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "TORCHELASTIC_", "SLURM_", "PMI",
    "OMPI_COMM_", "MPI_", "ASYNCRPC_",
)  # fmt: skip
_running: Final[list[subprocess.Popen[str]]] = []


def started(
    launcher: str, *command: str, environ: Mapping[str, str] | None = None
) -> subprocess.Popen[str]:
    """Start a launcher with its own arguments, as no other has been there before."""
    bare = {
        name: text
        for name, text in os.environ.items()
        if not name.startswith(_OF_LAUNCHERS)
    }
    process = subprocess.Popen(
        [launcher, *command],
        env={
            **bare,
            **_FOR_OPEN_MPI,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            **(environ or {}),
        },
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    _running.append(process)
    return process


def end_all() -> None:
    """End launchers that a failed test has left; each ends its processes on SIGTERM."""
    for process in _running:
        if process.poll() is None:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=HANGS_S)
            process.kill()
            process.communicate()
    _running.clear()


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Wait for the end; return exit code, output and errors."""
    output, errors = process.communicate(timeout=HANGS_S)
    return process.returncode, output, errors


def python(*arguments: str) -> tuple[str, ...]:
    return (sys.executable, *arguments)
