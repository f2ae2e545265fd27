"""`asyncrpc manifest slurm`: the batch script that `sbatch` takes.

The script starts one program on all nodes with `srun`, and asks for another start if
the program was told to end and has saved (exit code 75, see `asyncrpc.Preemption`).

Source: the manual pages of sbatch and srun, Slurm 22.05; since that version srun takes
`--cpus-per-task` from SRUN_CPUS_PER_TASK, and not from the job.
"""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Iterator
from typing import Final

from asyncrpc.clusters.preemption.machine.preempting import EXIT_SAVED
from asyncrpc.errors import UsageError

HELP: Final = "a batch script for Slurm's sbatch"

# What sbatch takes as --time; the man page's list.
_TIME: Final = re.compile(
    r"\d+(:\d\d(:\d\d)?)?|\d+-\d+(:\d\d(:\d\d)?)?|UNLIMITED", re.ASCII
)
GRACE_MAX_S: Final = 65535  # of sbatch --signal

_MAKE_FILE: Final = """\
# A secret of this job, readable only by its owner: workers prove that they know it.
export ASYNCRPC_SECRET_FILE="$PWD/.asyncrpc-secret-$SLURM_JOB_ID"
(umask 077 && od -An -N32 -tx1 /dev/urandom | tr -d ' \\n' > "$ASYNCRPC_SECRET_FILE")
trap 'rm -f "$ASYNCRPC_SECRET_FILE"' EXIT
"""
_NO_END: Final = """\
# Slurm signals the end to this shell as well: it waits for the end of the program.
trap : TERM
"""
_REQUEUE: Final = """\
# {code}: the program was told to end, and has saved.  Any other code is its own.  A
# cancelled job is not started again: its state is COMPLETING.
state=$(scontrol show job --oneliner "$SLURM_JOB_ID")
if [ "$code" -eq {code} ] && [[ $state =~ JobState=RUNNING|Reason=TimeLimit ]]; then
    scontrol requeue "$SLURM_JOB_ID" && sleep 600  # which the requeue ends
fi
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this target."""
    parser.description = (
        "Write a batch script that starts PROGRAM on every node with srun.  Its"
        " workers find one another by env://, with a secret of the job's own."
    )
    _add_size(parser)
    _add_end(parser)
    _add_names(parser)
    _add_environment(parser)
    parser.add_argument("program", metavar="PROGRAM", help="such as python")
    parser.add_argument(
        "arguments", nargs=argparse.REMAINDER, metavar="...", help="its arguments"
    )


def _add_size(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("size").add_argument
    add("--nodes", type=int, default=1, metavar="N", help="number of nodes")
    add("--tasks-per-node", type=int, default=1, metavar="N", help="processes on each")
    add("--cpus-per-task", type=int, metavar="N", help="cores of each process")
    add("--gpus-per-node", type=int, metavar="N", help="GPUs of each node")


def _add_end(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("end and restart").add_argument
    add("--time", metavar="LIMIT", help="such as 30 (minutes) or 1-12:00:00")
    add(
        "--grace",
        type=int,
        metavar="S",
        help="seconds before the time limit at which SIGTERM is sent to the program",
    )
    add(
        "--requeue",
        action="store_true",
        help="start the job again if a node fails, if another job needs its nodes, or "
        f"if the program ends with code {EXIT_SAVED}",
    )
    add(
        "--survive",
        action="store_true",
        help="continue if a node fails; the program's other workers must be able to",
    )


def _add_names(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("names").add_argument
    add("--job-name", metavar="NAME", help="of the job")
    add("--partition", metavar="NAME", help="of the cluster")
    add("--account", metavar="NAME", help="which is charged")
    add("--output", metavar="PATH", help="of the job's output; %%j is its number")


def _add_environment(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("environment of the program").add_argument
    add(
        "--module",
        action="append",
        default=[],
        dest="modules",
        metavar="NAME",
        help="`module load` it; may be repeated",
    )
    add("--venv", metavar="PATH", help="virtual environment to use")
    add("--interface", metavar="NAME", help="network interface, such as ib0")
    add(
        "--secret-file",
        metavar="PATH",
        help="file with the cluster's secret, mode 600, on all nodes; default: each "
        "start of the job makes one in the directory that it was submitted from",
    )


def manifest(arguments: argparse.Namespace) -> str:
    """Return the batch script."""
    _check(arguments)
    lines = [
        "#!/bin/bash",
        *(f"#SBATCH {directive}" for directive in _directives(arguments)),
    ]
    return "\n".join([*lines, "", *_body(arguments), ""])


def _directives(arguments: argparse.Namespace) -> Iterator[str]:
    if arguments.job_name:
        yield f"--job-name={shlex.quote(arguments.job_name)}"
    yield f"--nodes={arguments.nodes}"
    yield f"--ntasks-per-node={arguments.tasks_per_node}"
    for name in ("cpus-per-task", "gpus-per-node", "partition", "account", "time"):
        value = getattr(arguments, name.replace("-", "_"))
        if value is not None:
            yield f"--{name}={shlex.quote(str(value))}"
    if arguments.grace is not None:
        yield f"--signal=TERM@{arguments.grace}"
    yield "--requeue" if arguments.requeue else "--no-requeue"
    if arguments.requeue:
        yield "--open-mode=append"
    if arguments.survive:
        yield "--no-kill"
    yield f"--output={shlex.quote(arguments.output or '%x-%j.out')}"


def _body(arguments: argparse.Namespace) -> Iterator[str]:
    for module in arguments.modules:
        yield f"module load {shlex.quote(module)}"
    if arguments.venv:
        yield f"source {shlex.quote(arguments.venv.rstrip('/') + '/bin/activate')}"
    if arguments.interface:
        yield f"export ASYNCRPC_INTERFACE={shlex.quote(arguments.interface)}"
    if arguments.cpus_per_task:
        yield 'export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"'
        yield 'export OMP_NUM_THREADS="$SLURM_CPUS_PER_TASK"'
    if arguments.secret_file:
        yield f"export ASYNCRPC_SECRET_FILE={shlex.quote(arguments.secret_file)}"
    else:
        yield _MAKE_FILE
    yield _NO_END
    survive = ["--no-kill"] if arguments.survive else []
    yield shlex.join(["srun", *survive, arguments.program, *arguments.arguments])
    yield "code=$?"
    if arguments.requeue:
        yield _REQUEUE.format(code=EXIT_SAVED)
    yield 'exit "$code"'


def _check(arguments: argparse.Namespace) -> None:
    for name in ("nodes", "tasks_per_node", "cpus_per_task", "gpus_per_node"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise UsageError(f"--{name.replace('_', '-')} must be at least 1")
    if arguments.time is not None and not _TIME.fullmatch(arguments.time):
        raise UsageError(
            "--time must be minutes, [hours:]minutes:seconds or"
            f" days-hours[:minutes[:seconds]], not {arguments.time!r}"
        )
    if arguments.grace is not None:
        if not 1 <= arguments.grace <= GRACE_MAX_S:
            raise UsageError(f"--grace must be 1 to {GRACE_MAX_S} seconds")
        if arguments.time is None:
            raise UsageError("--grace counts back from the limit: give --time as well")
    for name, value in vars(arguments).items():
        if isinstance(value, str) and not value.isprintable():
            raise UsageError(f"--{name.replace('_', '-')} must be one printable line")
