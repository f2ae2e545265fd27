"""Variables of MPI's launchers: Open MPI's mpirun, and launchers with PMI (MPICH).

Processes of one host meet on loopback.  Open MPI names its run, and the port comes
from that name; MPICH does not, so the caller passes the id of the process that started
all of them on this host.

Source: the man page of Open MPI's mpirun, "Exported Environment Variables"; the sets
captured from Open MPI 4.1.4 and MPICH 4.0.2 in tests/unit/core/environment.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from asyncrpc.core.environment.values import (
    Field,
    LaunchValue,
    Reading,
    Starts,
    Variables,
    port_of_text,
)

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
