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
from asyncrpc.compat.rpc.api import (
    AllGatherStates,
    RRef,
    _wait_all,
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
from asyncrpc.compat.rpc.bindings import *  # noqa: F403
from asyncrpc.compat.rpc.bindings import (
    PyRRef,
    RpcAgent,
    RpcBackendOptions,
    TensorPipeAgent,
    WorkerInfo,
    _get_current_rpc_agent,
    _is_current_rpc_agent_set,
    _rref_context_get_debug_info,
    get_rpc_timeout,
)
from asyncrpc.compat.rpc.options import TensorPipeRpcBackendOptions

__all__ = [
    "AllGatherStates",
    "BackendType",  # noqa: F405  (`__getattr__` looks it up)
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

_is_tensorpipe_available = True
method_factory, new_method = api.method_factory, api.new_method

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
    options = rpc_backend_options
    if options is not None and not isinstance(options, RpcBackendOptions):
        raise TypeError(
            "Argument rpc_backend_options must be an instance of RpcBackendOptions"
        )
    if backend is None:
        backend = types.TENSORPIPE if options is None else _backend_of(options)
    if options is None:
        options = construct_rpc_backend_options(backend)
    if _agent.is_set():
        raise RuntimeError("RPC is already initialized")
    store, rank = starting.open_store(options, rank, world_size)
    _init_rpc_backend(backend, store, name, rank, world_size, options)


def _backend_of(options: RpcBackendOptions) -> Any:
    """Return the backend that the options belong to."""
    for candidate in backend_registry.BackendType:
        if isinstance(options, type(construct_rpc_backend_options(candidate))):
            return candidate
    raise TypeError(f"Could not infer backend for options {options}")


def _init_rpc_backend(  # noqa: PLR0917  (torch's signature)
    backend: Any = None,
    store: Any = None,
    name: Any = None,
    rank: Any = -1,
    world_size: Any = None,
    rpc_backend_options: Any = None,
) -> None:
    """Start the agent of a backend, with an existing store."""
    _validate_rpc_args(backend, store, name, rank, world_size, rpc_backend_options)
    if _agent.is_set():
        raise RuntimeError("RPC is already initialized")
    agent = backend_registry.init_backend(
        backend,
        store=store,
        name=name,
        rank=rank,
        world_size=world_size,
        rpc_backend_options=rpc_backend_options,
    )
    api._init_rpc_states(agent)  # noqa: SLF001


# --- private names of torch that programs use ----------------------------------------


def _validate_rpc_args(  # noqa: PLR0917  (torch's signature)
    backend: Any,
    store: Any,
    name: Any,
    rank: Any,
    world_size: Any,
    rpc_backend_options: Any,
) -> None:
    """Check the types of what `init_rpc` makes an agent from."""
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


def _get_debug_info() -> dict[str, str]:
    from asyncrpc.compat import autograd  # noqa: PLC0415  (which needs this)

    info = _rref_context_get_debug_info()
    info.update(_get_current_rpc_agent().get_debug_info())
    info.update({key: str(value) for key, value in autograd._get_debug_info().items()})  # noqa: SLF001
    return info
