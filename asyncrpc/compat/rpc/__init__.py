"""torch.distributed.rpc's names: calls that block, over asyncrpc's worker.

    import asyncrpc.compat.rpc as rpc

    rpc.init_rpc("worker0", rank=0, world_size=2)
    y = rpc.rpc_sync("worker1", torch.add, args=(torch.ones(2), 1))
    rpc.shutdown()

Source: torch.distributed.rpc, version 2.13.
"""

from __future__ import annotations

import logging
import numbers
from typing import Any

from torch._C._distributed_c10d import Store

from asyncrpc.compat.rpc import (
    agent as _agent,
)
from asyncrpc.compat.rpc import (
    api,
    backend_registry,
    constants,
    functions,
    internal,
    options,
    starting,
)
from asyncrpc.compat.rpc.agent import Agent as RpcAgent
from asyncrpc.compat.rpc.api import (
    AllGatherStates,
    RRef,
    _get_current_rpc_agent,
    _is_current_rpc_agent_set,
    _wait_all,
    get_rpc_timeout,
    get_worker_info,
    remote,
    rpc_async,
    rpc_sync,
    shutdown,
)
from asyncrpc.compat.rpc.backend_registry import (
    BackendValue,
    backend_registered,
    construct_rpc_backend_options,
    init_backend,
    register_backend,
)
from asyncrpc.compat.rpc.options import (
    RpcBackendOptions,
    TensorPipeRpcBackendOptions,
    WorkerInfo,
)

__all__ = [  # noqa: F822  (BackendType is looked up by `__getattr__`)
    "AllGatherStates",
    "BackendType",
    "BackendValue",
    "PyRRef",
    "RRef",
    "RpcAgent",
    "RpcBackendOptions",
    "TensorPipeAgent",
    "TensorPipeRpcBackendOptions",
    "WorkerInfo",
    "_is_current_rpc_agent_set",
    "_wait_all",
    "api",
    "backend_registered",
    "backend_registry",
    "constants",
    "construct_rpc_backend_options",
    "functions",
    "get_rpc_timeout",
    "get_worker_info",
    "init_backend",
    "init_rpc",
    "internal",
    "is_available",
    "options",
    "register_backend",
    "remote",
    "rpc_async",
    "rpc_sync",
    "shutdown",
]

# torch's base classes in C++.
TensorPipeAgent = RpcAgent
PyRRef = RRef

_is_tensorpipe_available = True
_DEFAULT_INIT_METHOD = constants.DEFAULT_INIT_METHOD
_DEFAULT_NUM_WORKER_THREADS = constants.DEFAULT_NUM_WORKER_THREADS
_DEFAULT_RPC_TIMEOUT_SEC = constants.DEFAULT_RPC_TIMEOUT_SEC
_UNSET_RPC_TIMEOUT = constants.UNSET_RPC_TIMEOUT

logger = logging.getLogger(__name__)


def __getattr__(name: str) -> Any:
    """Look up the enum of backends, which is replaced when one is added."""
    if name == "BackendType":
        return backend_registry.BackendType
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def is_available() -> bool:
    """Return whether RPC can be used: always."""
    return True


def init_rpc(
    name: str,
    backend: Any = None,
    rank: int = -1,
    world_size: int | None = None,
    rpc_backend_options: RpcBackendOptions | None = None,
) -> None:
    """Start RPC in this process; block until every worker of the group has started.

    Args:
        name: name of the worker, unique in the group.
        backend: a member of `BackendType`; None: the backend that the options are for.
        rank: rank of this worker; -1 takes it from the environment.
        world_size: number of workers; None: workers may join and leave.
        rpc_backend_options: default timeout, threads, and the address of the store.

    Raises:
        TypeError: the backend or the options have the wrong type.
        ValueError: the rank is missing.
        RuntimeError: RPC already runs, or the name is not unique.

    Source: torch.distributed.rpc.init_rpc.
    """
    types = backend_registry.BackendType
    if backend is not None and not isinstance(backend, types):
        raise TypeError("Argument backend must be a member of BackendType")
    given = rpc_backend_options
    if given is not None and not isinstance(given, RpcBackendOptions):
        raise TypeError(
            "Argument rpc_backend_options must be an instance of RpcBackendOptions"
        )
    if backend is None:
        backend = types.TENSORPIPE if given is None else _backend_of(given)
    if given is None:
        given = construct_rpc_backend_options(backend)
    if _agent.is_set():
        raise RuntimeError("RPC is already initialized")
    store, rank = starting.open_store(given, rank, world_size)
    _init_rpc_backend(backend, store, name, rank, world_size, given)


def _backend_of(given: RpcBackendOptions) -> Any:
    """Return the backend that the options belong to.

    Raises:
        TypeError: the options do not belong to a known backend.
    """
    for candidate in backend_registry.BackendType:
        if isinstance(given, type(construct_rpc_backend_options(candidate))):
            return candidate
    raise TypeError(f"Could not infer backend for options {given}")


def _init_rpc_backend(  # noqa: PLR0917  (torch's signature)
    backend: Any = None,
    store: Any = None,
    name: Any = None,
    rank: Any = -1,
    world_size: Any = None,
    rpc_backend_options: Any = None,
) -> None:
    """Start the agent of a backend, with an existing store.

    Raises:
        RuntimeError: an argument has the wrong type, or RPC already runs.
    """
    for value, kinds in (
        (backend, backend_registry.BackendType),
        (store, Store),
        (name, str),
        (rank, numbers.Integral),
        (world_size, (numbers.Integral, type(None))),
        (rpc_backend_options, RpcBackendOptions),
    ):
        if not isinstance(value, kinds):
            raise RuntimeError(  # noqa: TRY004  (torch's type)
                f"Argument {value} must be of type {kinds} but got type {type(value)}"
            )
    if _agent.is_set():
        raise RuntimeError("RPC is already initialized")
    made = backend_registry.init_backend(
        backend,
        store=store,
        name=name,
        rank=rank,
        world_size=world_size,
        rpc_backend_options=rpc_backend_options,
    )
    api._init_rpc_states(made)  # noqa: SLF001


# --- private names of torch that programs use ----------------------------------------


def _set_rpc_timeout(timeout: float) -> None:
    _agent.current().rpc_timeout_s = timeout


def _rref_context_get_debug_info() -> dict[str, str]:
    agent = _agent.current()
    return agent.host.do_at_once(agent.reference_figures)


def _get_debug_info() -> dict[str, str]:
    from asyncrpc.compat import autograd  # noqa: PLC0415  (which needs this)

    info = _rref_context_get_debug_info()
    info.update(_get_current_rpc_agent().get_debug_info())
    info.update({key: str(one) for key, one in autograd._get_debug_info().items()})  # noqa: SLF001
    return info


def enable_gil_profiling(flag: bool) -> None:  # noqa: FBT001  (torch's signature)
    """Do nothing: no C++ code waits for the GIL here, as in torch."""
    _agent.current().shows_gil_wait = flag
