"""The placement of a process, from all values in its environment.

Launchers are nested: `mpirun` in a batch script of Slurm, torchrun in a pod.  The
innermost one that started this process gives its rank; the outer ones count nodes, so
that their ranks are not a contradiction.  All other values must agree.

The order: the program, torchrun, Kubeflow, Slurm, Open MPI, MPICH, SkyPilot,
LeaderWorkerSet, indexed Job.  A value that is stated comes before one that is derived.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

from asyncrpc.core.environment import cloud, kubeflow, mpi, slurm, torchrun
from asyncrpc.core.environment.placement import GivenPlace, LaunchPlacement
from asyncrpc.core.environment.values import Field, LaunchValue, Reading, Starts
from asyncrpc.errors import UsageError

Reader = Callable[[Mapping[str, str]], Reading | None]

# In the order in which they are asked.
READERS: Final[Mapping[str, Reader]] = {
    torchrun.TORCHRUN: torchrun.read,
    kubeflow.KUBEFLOW: kubeflow.read,
    slurm.SLURM: slurm.read,
    mpi.OPEN_MPI: mpi.read_open_mpi,
    mpi.MPICH: mpi.read_pmi,
    cloud.SKYPILOT: cloud.read_skypilot,
    cloud.LEADER_WORKER_SET: cloud.read_leader_worker_set,
    cloud.INDEXED_JOB: cloud.read_indexed_job,
}
# The order of nesting, the innermost first: srun starts mpirun's daemons, and either
# starts torchrun, never the other way round.
_INNERMOST: Final = (*torchrun.NAMES, mpi.OPEN_MPI, mpi.MPICH, slurm.SLURM)
_OF_PROCESSES: Final = frozenset(
    {Field.RANK, Field.WORLD_SIZE, Field.LOCAL_RANK, Field.LOCAL_WORLD_SIZE}
)
_MUST_AGREE: Final = _OF_PROCESSES | {Field.HOST, Field.PORT}
_SUBJECTS: Final = {
    Field.RANK: "the rank of this process",
    Field.WORLD_SIZE: "the number of processes",
    Field.LOCAL_RANK: "the rank of this process on its host",
    Field.LOCAL_WORLD_SIZE: "the number of processes on this host",
    Field.HOST: "the host of the meeting point",
    Field.PORT: "the port of the meeting point",
}


def read_all(
    environ: Mapping[str, str], *, launcher_pid: int | None = None
) -> list[Reading]:
    """Return the values of all launchers that have set variables, in a fixed order."""
    readings = [
        mpi.read_pmi(environ, launcher_pid=launcher_pid)
        if reader is mpi.read_pmi
        else reader(environ)
        for reader in READERS.values()
    ]
    return [reading for reading in readings if reading is not None]


def resolve(
    environ: Mapping[str, str],
    stated_place: GivenPlace | None = None,
    *,
    launcher_pid: int | None = None,
) -> LaunchPlacement:
    """Find the placement of this process.

    Args:
        stated_place: the values given by the program; they take precedence.
    """
    readings = read_all(environ, launcher_pid=launcher_pid)
    starter = _innermost(readings)
    inner = [
        reading for reading in readings if not _is_outer(reading, starter, readings)
    ]
    outer = [
        _as_outer(reading, environ) for reading in readings if reading not in inner
    ]
    first = (stated_place or GivenPlace()).reading()
    values: dict[Field, LaunchValue] = {}
    for value in [] if first is None else first.values:
        values[value.field] = value
    for field in Field:
        stated = [value for value in _stated(field, inner) if not value.is_derived]
        if field not in values:
            _check_agreement(field, stated)
        candidates = [*stated, *_stated(field, inner)]
        if field not in _OF_PROCESSES:
            candidates += _stated(field, outer)
        if candidates:
            values.setdefault(field, candidates[0])
    _name_by_rank(values)
    return LaunchPlacement(
        values,
        launcher=_launcher(starter, inner),
        is_started=starter is not None,
        outer=tuple(reading.launcher for reading in outer),
        hints=tuple(reading.hint for reading in inner if reading.hint),
    )


def _innermost(readings: Sequence[Reading]) -> Reading | None:
    """Return the launcher that started this process, among its siblings."""
    started = [
        reading
        for reading in readings
        if reading.starts is Starts.PROCESSES and not _is_of_slurm(reading, readings)
    ]
    return min(
        started, key=lambda reading: _INNERMOST.index(reading.launcher), default=None
    )


def _is_outer(
    reading: Reading, starter: Reading | None, readings: Sequence[Reading]
) -> bool:
    """Return whether a launcher is around the one that started the processes."""
    if starter is None or reading is starter:
        return False
    if reading.launcher == slurm.SLURM or reading.starts is Starts.NODES:
        return True
    if reading.starts is Starts.NOTHING:
        return False  # variables set by hand are not outer ones: they must agree
    if _is_of_slurm(reading, readings):
        return starter.launcher != slurm.SLURM
    return starter.launcher in torchrun.NAMES


def _is_of_slurm(reading: Reading, readings: Sequence[Reading]) -> bool:
    """Return whether Slurm's own PMI plugin has set these values for a task of srun.

    MPICH's mpirun tells how many processes are on this host; Slurm's plugin does not.
    """
    is_brief = reading.get(Field.LOCAL_WORLD_SIZE) is None
    return (
        reading.launcher == mpi.MPICH
        and is_brief
        and any(
            other.launcher == slurm.SLURM and other.starts is Starts.PROCESSES
            for other in readings
        )
    )


def _as_outer(reading: Reading, environ: Mapping[str, str]) -> Reading:
    """Return the values of a launcher inside of which another starts the processes.

    The Slurm step in which the inner launcher runs does not count: on the host of
    mpirun there is no step.  All processes see the same job.
    """
    if reading.launcher != slurm.SLURM:
        return reading
    return slurm.read_allocation(environ) or reading


def _stated(field: Field, readings: Sequence[Reading]) -> Iterator[LaunchValue]:
    for reading in readings:
        value = reading.get(field)
        if value is not None:
            yield value


def _check_agreement(field: Field, stated: Sequence[LaunchValue]) -> None:
    """Raise UsageError unless all values of a field are the same."""
    if field not in _MUST_AGREE:
        return
    for other in stated[1:]:
        first = stated[0]
        if other.content != first.content:
            raise UsageError(
                f"{first.origin} ({first.launcher}) and {other.origin} "
                f"({other.launcher}) disagree on {_SUBJECTS[field]}: unset the "
                "variable that is left over from another launcher, or correct the one "
                "that is wrong"
            )


def _name_by_rank(values: dict[Field, LaunchValue]) -> None:
    rank = values.get(Field.RANK)
    if rank is not None and Field.NAME not in values:
        name = f"worker{rank.content}"
        values[Field.NAME] = LaunchValue(
            Field.NAME, name, rank.origin, rank.launcher, is_derived=True
        )


def _launcher(starter: Reading | None, inner: Sequence[Reading]) -> str:
    if starter is not None:
        return starter.launcher
    nodes = [reading for reading in inner if reading.get(Field.RANK) is not None]
    return nodes[0].launcher if nodes else ""
