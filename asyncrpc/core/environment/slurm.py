"""Slurm's variables: of a task that srun started, or of the allocation around it.

The batch script and the shell of salloc have SLURM_PROCID=0 and the SLURM_NTASKS of
the allocation, although no tasks have been started: only a step starts tasks.

Source: the man pages of srun and sbatch, "OUTPUT ENVIRONMENT VARIABLES"; sets captured
from slurm-wlm 22.05 are in tests/unit/core/environment.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from asyncrpc.core.environment.host_lists import expand_counts, first_host
from asyncrpc.core.environment.values import (
    Field,
    Reading,
    Starts,
    Variables,
    port_of_job,
)

SLURM: Final = "Slurm"
# The batch script, salloc's shell and the like have step ids from here on.
_FIRST_SPECIAL_STEP: Final = 0xFFFF_FFF0


def read(environ: Mapping[str, str]) -> Reading | None:
    """Return Slurm's values for this process."""
    variables = Variables(environ, SLURM)
    step = variables.number("SLURM_STEP_ID", "SLURM_STEPID")
    rank = variables.number("SLURM_PROCID")
    if step is None or step >= _FIRST_SPECIAL_STEP or rank is None:
        return read_allocation(environ)
    variables.take_number(Field.RANK, "SLURM_PROCID")
    variables.take_number(
        Field.WORLD_SIZE, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS"
    )
    variables.take_number(Field.LOCAL_RANK, "SLURM_LOCALID")
    node = variables.take_number(Field.NODE, "SLURM_NODEID")
    _take_local_size(variables, node or 0)
    variables.take_number(Field.NODES, "SLURM_STEP_NUM_NODES", "SLURM_NNODES")
    _take_host(variables, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    job_name, job = _job(variables)
    if job is not None:
        step_name = "SLURM_STEP_ID" if variables.text("SLURM_STEP_ID") else ""
        port = port_of_job(job, step)
        variables.add(Field.PORT, port, job_name, step_name, is_derived=True)
        variables.add(Field.RUN_ID, f"{job}.{step}", job_name, step_name)
    variables.take_number(Field.RESTART, "SLURM_RESTART_COUNT")
    return variables.reading(Starts.PROCESSES)


def read_allocation(environ: Mapping[str, str]) -> Reading | None:
    """Return Slurm's values for the job, if another launcher starts the processes.

    They have no rank, unless the job has only one task: the script itself.
    """
    variables = Variables(environ, SLURM)
    job_name, job = _job(variables)
    if job is None:
        return None
    tasks = variables.number("SLURM_NTASKS", "SLURM_NPROCS")
    is_only = tasks == 1 and variables.number("SLURM_PROCID") == 0
    if is_only:
        variables.take_number(Field.RANK, "SLURM_PROCID")
        variables.take_number(Field.WORLD_SIZE, "SLURM_NTASKS", "SLURM_NPROCS")
    variables.take_number(Field.NODE, "SLURM_NODEID")
    variables.take_number(Field.NODES, "SLURM_JOB_NUM_NODES", "SLURM_NNODES")
    _take_host(variables, "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    variables.add(Field.PORT, port_of_job(job), job_name, is_derived=True)
    variables.add(Field.RUN_ID, str(job), job_name)
    variables.take_number(Field.RESTART, "SLURM_RESTART_COUNT")
    hint = ""
    if not is_only:
        hint = (
            f"this process runs in Slurm job {job}, but not in one of its tasks: start "
            "the program by srun"
        )
    return variables.reading(Starts.NOTHING, hint)


def _job(variables: Variables) -> tuple[str, int | None]:
    name = "SLURM_JOB_ID" if variables.text("SLURM_JOB_ID") else "SLURM_JOBID"
    return name, variables.number(name)


def _take_host(variables: Variables, *names: str) -> None:
    """Add the first host of the first of these lists that is set."""
    for name in names:
        if hosts := variables.text(name):
            variables.add(Field.HOST, first_host(hosts), name, is_derived=True)
            return


def _take_local_size(variables: Variables, node: int) -> None:
    for name in ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"):
        text = variables.text(name)
        counts = expand_counts(text) if text else []
        if node < len(counts):
            variables.add(Field.LOCAL_WORLD_SIZE, counts[node], name)
            return
