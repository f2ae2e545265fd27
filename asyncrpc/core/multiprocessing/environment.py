"""The environment of a started process: the same for `launch` and `asyncrpc run`.

The variables are torchrun's, so that `env://` rendezvous works in asyncrpc, in
torch.distributed and in programs written for torchrun, plus the cluster's secret.

Source: torch/distributed/run.py, "Environment Variables";
torch/distributed/rendezvous.py, `_create_c10d_store`.
"""

from __future__ import annotations

import os
import secrets
from typing import Final

from asyncrpc.core.arguments import check_count
from asyncrpc.core.environment.torchrun import LAUNCHER_VARIABLE
from asyncrpc.core.options import ONE_HOST_VARIABLE

SECRET_VARIABLE: Final = "ASYNCRPC_SECRET"  # noqa: S105  the name, not the secret
SECRET_FILE_VARIABLE: Final = "ASYNCRPC_SECRET_FILE"  # noqa: S105  likewise
THREADS_MAX: Final = 4096  # of torch in a process: more than the cores of any host
_SECRET_BYTES: Final = 32  # as long as the hash of the HMAC that proves it


def new_secret() -> str:
    """Make a cluster secret: 256 random bits, in hexadecimal."""
    return secrets.token_hex(_SECRET_BYTES)


def process_environment(
    *,
    rank: int,
    nprocs: int,
    secret: str,
    store_port: int | None,
    is_alone: bool = False,
) -> dict[str, str]:
    """Return the variables of one process.

    Args:
        rank: index of the process; all of them are on this host.
        store_port: the port on loopback at which the parent serves the rendezvous
            store; None if it does not.
    """
    variables = {
        SECRET_VARIABLE: secret,
        SECRET_FILE_VARIABLE: "",  # an inherited file holds another secret
        LAUNCHER_VARIABLE: "asyncrpc",
        "RANK": str(rank),
        "WORLD_SIZE": str(nprocs),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(nprocs),
    }
    variables[ONE_HOST_VARIABLE] = "1" if is_alone else ""
    if store_port is not None:
        variables |= {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store_port),
            # The store is served already: rank 0 connects to it like any other.
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
    return variables


def usable_cores() -> int:
    """Return the number of cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def threads_each(
    nprocs: int, requested: int | None, name: str = "threads_per_process"
) -> int:
    """Return how many threads torch should use in each of `nprocs` processes.

    More threads than cores are the most common reason for a slow program: by default
    every process would start as many as there are cores.

    Args:
        requested: the number of threads in each; None: an equal share of the cores.
    """
    if requested is None:
        return max(1, usable_cores() // nprocs)
    check_count(name, requested, at_least=1, at_most=THREADS_MAX)
    return requested
