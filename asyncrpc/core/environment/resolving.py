"""The placement of a process, from all values in its environment.

Launchers are nested: `mpirun` in a batch script of Slurm, torchrun in a pod.  The
innermost one that started this process gives its rank; the outer ones count nodes, so
that their ranks are not a contradiction.  All other values must agree.

The order: the program, torchrun, Kubeflow, Slurm, Open MPI, MPICH, SkyPilot,
LeaderWorkerSet, indexed Job.  A value that is stated comes before one that is derived.

Kubeflow has one pod per node, and sets what torchrun takes its options from.  SkyPilot
and Kubernetes start one command per node.  MPI's processes of one host meet on
loopback: Open MPI names its run, and the port comes from that name; MPICH does not, so
the caller passes the id of the process that started all of them on this host.

Source: kubeflow/trainer, pkg/runtime/framework/plugins/torch; torchrun reads
`PET_<OPTION>` (torch/distributed/argparse_util.py);
SkyPilot, "Environment variables"; kubernetes-sigs/lws, api/leaderworkerset/v1;
Kubernetes, "Indexed Job for Parallel Processing with Static Work Assignment";
the man page of Open MPI's mpirun, "Exported Environment Variables"; the sets
captured from Open MPI 4.1.4 and MPICH 4.0.2 in tests/unit/core/environment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

from asyncrpc.core.environment import slurm, torchrun
from asyncrpc.core.environment.placement import GivenPlace, LaunchPlacement
from asyncrpc.core.environment.values import (
    PORT_MAX,
    Field,
    LaunchValue,
    Reading,
    Starts,
    Variables,
    port_of_text,
)
from asyncrpc.errors import UsageError

OPEN_MPI: Final = "Open MPI"
MPICH: Final = "MPICH"
_LOOPBACK: Final = "127.0.0.1"
_SEVERAL_HOSTS: Final = (
    "mpirun does not say on which host rank 0 is: give it -x MASTER_ADDR=<that host> "
    "-x MASTER_PORT=<a free port> (MPICH: -genv MASTER_ADDR <host>)"
)


def read_open_mpi(environ: Mapping[str, str]) -> Reading | None:
    """Return the values of Open MPI's mpirun."""
    variables = Variables(environ, OPEN_MPI)
    rank = variables.take_number(Field.RANK, "OMPI_COMM_WORLD_RANK")
    size = variables.take_number(Field.WORLD_SIZE, "OMPI_COMM_WORLD_SIZE")
    variables.take_number(Field.LOCAL_RANK, "OMPI_COMM_WORLD_LOCAL_RANK")
    local_size = variables.take_number(
        Field.LOCAL_WORLD_SIZE, "OMPI_COMM_WORLD_LOCAL_SIZE"
    )
    if rank is None or size is None:
        return None
    is_one_host = local_size == size
    if is_one_host:
        names = ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE")
        variables.add(Field.HOST, _LOOPBACK, *names, is_derived=True)
    for name in ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"):
        if run := variables.text(name):
            variables.add(Field.PORT, port_of_text(run), name, is_derived=True)
            variables.add(Field.RUN_ID, run, name)
            break
    return variables.reading(Starts.PROCESSES, "" if is_one_host else _SEVERAL_HOSTS)


def read_pmi(
    environ: Mapping[str, str], *, launcher_pid: int | None = None
) -> Reading | None:
    """Return the values of MPICH's mpirun (hydra), or of another launcher with PMI."""
    variables = Variables(environ, MPICH)
    rank = variables.take_number(Field.RANK, "PMI_RANK", "MV2_COMM_WORLD_RANK")
    size = variables.take_number(Field.WORLD_SIZE, "PMI_SIZE", "MV2_COMM_WORLD_SIZE")
    variables.take_number(
        Field.LOCAL_RANK, "MPI_LOCALRANKID", "MV2_COMM_WORLD_LOCAL_RANK"
    )
    local_size = variables.take_number(
        Field.LOCAL_WORLD_SIZE, "MPI_LOCALNRANKS", "MV2_COMM_WORLD_LOCAL_SIZE"
    )
    if rank is None or size is None:
        return None
    is_one_host = local_size == size
    if is_one_host:
        names = ("PMI_SIZE", "MPI_LOCALNRANKS")
        variables.add(Field.HOST, _LOOPBACK, *names, is_derived=True)
        if launcher_pid is not None:
            variables.values.append(_port_of(launcher_pid))
    return variables.reading(Starts.PROCESSES, "" if is_one_host else _SEVERAL_HOSTS)


def _port_of(launcher_pid: int) -> LaunchValue:
    origin = f"the launcher's process {launcher_pid}"
    port = port_of_text(str(launcher_pid))
    return LaunchValue(Field.PORT, port, origin, MPICH, is_derived=True)


SKYPILOT: Final = "SkyPilot"
LEADER_WORKER_SET: Final = "LeaderWorkerSet"
INDEXED_JOB: Final = "indexed Job"
POD_PORT: Final = 29_500  # torchrun's; a pod has all ports to itself


def read_skypilot(environ: Mapping[str, str]) -> Reading | None:
    """Return SkyPilot's values for the node, which is one process."""
    variables = Variables(environ, SKYPILOT)
    rank = variables.take_number(Field.RANK, "SKYPILOT_NODE_RANK")
    addresses = variables.text("SKYPILOT_NODE_IPS").split()
    if rank is None:
        return None
    variables.take_number(Field.NODE, "SKYPILOT_NODE_RANK")
    variables.take_number(Field.WORLD_SIZE, "SKYPILOT_NUM_NODES")
    variables.take_number(Field.NODES, "SKYPILOT_NUM_NODES")
    if addresses:
        first = LaunchValue(
            Field.HOST, addresses[0], "the first of SKYPILOT_NODE_IPS", SKYPILOT
        )
        variables.values.append(first)
    if run := variables.take_text(Field.RUN_ID, "SKYPILOT_TASK_ID"):
        port = port_of_text(run)
        variables.add(Field.PORT, port, "SKYPILOT_TASK_ID", is_derived=True)
    return variables.reading(Starts.NODES)


def read_leader_worker_set(environ: Mapping[str, str]) -> Reading | None:
    """Return a LeaderWorkerSet's values for the pod, which is one process."""
    variables = Variables(environ, LEADER_WORKER_SET)
    variables.take_number(Field.RANK, "LWS_WORKER_INDEX")
    variables.take_number(Field.WORLD_SIZE, "LWS_GROUP_SIZE")
    variables.take_number(Field.NODE, "LWS_WORKER_INDEX")
    variables.take_number(Field.NODES, "LWS_GROUP_SIZE")
    if variables.take_text(Field.HOST, "LWS_LEADER_ADDRESS"):
        names = ("LWS_LEADER_ADDRESS",)
        variables.add(Field.PORT, POD_PORT, *names, is_derived=True)
    return variables.reading(Starts.NODES)


def read_indexed_job(environ: Mapping[str, str]) -> Reading | None:
    """Return an indexed Job's values for the pod; the Job may be part of a JobSet.

    It tells neither the number of pods nor their names.
    """
    variables = Variables(environ, INDEXED_JOB)
    rank = variables.take_number(Field.RANK, "JOB_COMPLETION_INDEX")
    if rank is None:
        return None
    variables.take_number(Field.NODE, "JOB_COMPLETION_INDEX")
    variables.take_number(Field.RESTART, "JOBSET_RESTART_ATTEMPT")
    variables.add(Field.PORT, POD_PORT, "JOB_COMPLETION_INDEX", is_derived=True)
    hint = (
        "an indexed Job gives only its index: set WORLD_SIZE to its completions and "
        "MASTER_ADDR to <job>-0.<headless service> in the pod's template"
    )
    return variables.reading(Starts.NODES, hint)


KUBEFLOW: Final = "Kubeflow"


def read_kubeflow(environ: Mapping[str, str]) -> Reading | None:
    """Return Kubeflow's values for the pod, which is one process."""
    variables = Variables(environ, KUBEFLOW)
    processes = variables.text("PET_NPROC_PER_NODE")
    # "auto", "cpu" and "gpu" are for torchrun to count.
    is_one = not processes.isdecimal() or int(processes) == 1
    node = variables.take_number(Field.NODE, "PET_NODE_RANK")
    nodes = variables.text("PET_NNODES")
    # Elastic jobs say 1:4; then torchrun alone knows how many there are.
    is_fixed = nodes.isdecimal()
    if is_fixed:
        variables.take_number(Field.NODES, "PET_NNODES")
    if is_one and node is not None:
        variables.take_number(Field.RANK, "PET_NODE_RANK")
        if is_fixed:
            variables.take_number(Field.WORLD_SIZE, "PET_NNODES")
        variables.add(Field.LOCAL_RANK, 0, "PET_NODE_RANK", is_derived=True)
        variables.add(Field.LOCAL_WORLD_SIZE, 1, "PET_NODE_RANK", is_derived=True)
    variables.take_text(Field.HOST, "PET_MASTER_ADDR")
    variables.take_number(Field.PORT, "PET_MASTER_PORT", at_most=PORT_MAX)
    variables.take_text(Field.RUN_ID, "PET_RDZV_ID")
    hint = ""
    if not is_one:
        hint = (
            f"PET_NPROC_PER_NODE={processes} asks for several processes in each pod: "
            "start the program by torchrun, which reads it"
        )
    elif nodes and not is_fixed:
        hint = (
            f"PET_NNODES={nodes} leaves the number of nodes open: start the program by "
            "torchrun, which finds it out"
        )
    return variables.reading(Starts.NODES, hint)


Reader = Callable[[Mapping[str, str]], Reading | None]

# In the order in which they are asked.
READERS: Final[Mapping[str, Reader]] = {
    torchrun.TORCHRUN: torchrun.read,
    KUBEFLOW: read_kubeflow,
    slurm.SLURM: slurm.read,
    OPEN_MPI: read_open_mpi,
    MPICH: read_pmi,
    SKYPILOT: read_skypilot,
    LEADER_WORKER_SET: read_leader_worker_set,
    INDEXED_JOB: read_indexed_job,
}
# The order of nesting, the innermost first: srun starts mpirun's daemons, and either
# starts torchrun, never the other way round.
_INNERMOST: Final = (*torchrun.NAMES, OPEN_MPI, MPICH, slurm.SLURM)
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
        read_pmi(environ, launcher_pid=launcher_pid)
        if reader is read_pmi
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
        reading.launcher == MPICH
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
