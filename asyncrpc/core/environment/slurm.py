"""Slurm's variables: of a task that srun started, or of the allocation around it.

The batch script and the shell of salloc have SLURM_PROCID=0 and the SLURM_NTASKS of
the allocation, although no tasks have been started: only a step starts tasks.

Slurm's lists: of hosts (`gpu[01-03,7],login`), and of numbers (`3(x2),1`).

Slurm's own program for them, `scontrol show hostnames`, is often missing in containers.

Source: the man page of scontrol, "show hostlist"; slurm.conf, "NodeName".

Source: the man pages of srun and sbatch, "OUTPUT ENVIRONMENT VARIABLES"; sets captured
from slurm-wlm 22.05 are in tests/unit/core/environment.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from typing import Final

from asyncrpc.core.environment.values import (
    Field,
    Reading,
    Starts,
    Variables,
    port_of_job,
)
from asyncrpc.errors import UsageError

HOSTS_MAX: Final = 1 << 16  # Slurm's own MAX_RANGE for one list
_COUNT: Final = re.compile(r"([0-9]+)(?:\(x([0-9]+)\))?", re.ASCII)
_RANGE: Final = re.compile(r"([0-9]+)(?:-([0-9]+))?", re.ASCII)
_PART: Final = re.compile(r"\[([^\[\]]*)\]|([^\[\]]+)")


def expand_hosts(text: str) -> list[str]:
    """Return the hosts of a list, in its order.

    Args:
        text: names with commas between them; each with any number of ranges in
            brackets, whose numbers keep their width: `a[08-10]` is a08, a09, a10.
    """
    hosts: list[str] = []
    for host in _split(text):
        alternatives = [list(_alternatives(part, text)) for part in _parts(host, text)]
        size = 1
        for several in alternatives:
            size *= len(several)
        if len(hosts) + size > HOSTS_MAX:
            raise _refused(text, f"has more than {HOSTS_MAX} hosts")
        hosts += map("".join, itertools.product(*alternatives))
    return hosts


def first_host(text: str) -> str:
    """Return the first host of a list."""
    hosts = expand_hosts(text)
    if not hosts:
        raise _refused(text, "has no host")
    return hosts[0]


def expand_counts(text: str) -> list[int]:
    """Return the numbers of a list such as `3(x2),1`: 3, 3, 1."""
    counts: list[int] = []
    for item in text.split(","):
        matched = _COUNT.fullmatch(item.strip())
        if matched is None:
            raise UsageError(f"{text!r} is not a list of Slurm's, such as '3(x2),1'")
        times = int(matched[2] or 1)
        if len(counts) + times > HOSTS_MAX:
            raise _refused(text, f"has more than {HOSTS_MAX} numbers")
        counts += [int(matched[1])] * times
    return counts


def _split(text: str) -> Iterator[str]:
    """Split at the commas that are outside of brackets."""
    depth, start = 0, 0
    for at, character in enumerate(text):
        if character == "[":
            depth += 1
        elif character == "]":
            depth -= 1
        if not 0 <= depth <= 1:
            raise _refused(text, "has brackets that do not match")
        if character == "," and not depth:
            if text[start:at].strip():
                yield text[start:at].strip()
            start = at + 1
    if depth:
        raise _refused(text, "has brackets that do not match")
    if text[start:].strip():
        yield text[start:].strip()


def _parts(host: str, text: str) -> list[re.Match[str]]:
    parts = list(_PART.finditer(host))
    if "".join(part.group() for part in parts) != host:
        raise _refused(text, "has brackets that do not match")
    return parts


def _alternatives(part: re.Match[str], text: str) -> Iterator[str]:
    """Yield the alternatives for one part of a name."""
    if part[2] is not None:
        yield part[2]
        return
    for number_range in part[1].split(","):
        matched = _RANGE.fullmatch(number_range)
        if matched is None:
            raise _refused(text, f"has the range {number_range!r}, not like 1 or 01-16")
        first, last = matched[1], matched[2] or matched[1]
        if not int(first) <= int(last) < int(first) + HOSTS_MAX:
            raise _refused(
                text, f"has the range {number_range!r}, which is empty or too long"
            )
        for number in range(int(first), int(last) + 1):
            yield str(number).zfill(len(first))


def _refused(text: str, why: str) -> UsageError:
    short = text if len(text) <= 100 else f"{text[:100]}..."  # noqa: PLR2004
    return UsageError(f"the list of hosts {short!r} {why}")


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
