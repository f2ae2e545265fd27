"""Backends by name: asyncrpc under torch's name, and those of programs.

Source: torch.distributed.rpc.backend_registry.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from asyncrpc.compat.rpc import constants, starting
from asyncrpc.compat.rpc.options import RpcBackendOptions, TensorPipeRpcBackendOptions


class BackendValue(NamedTuple):
    """The functions that make the options and the agent of a backend."""

    construct_rpc_backend_options_handler: Callable[..., Any]
    init_backend_handler: Callable[..., Any]


def _tensorpipe_construct_rpc_backend_options_handler(
    rpc_timeout: float,
    init_method: str,
    num_worker_threads: int = constants.DEFAULT_NUM_WORKER_THREADS,
    **kwargs: Any,
) -> TensorPipeRpcBackendOptions:
    return TensorPipeRpcBackendOptions(
        rpc_timeout=rpc_timeout,
        init_method=init_method,
        num_worker_threads=num_worker_threads,
        **kwargs,
    )


class _TorchEnum(enum.Enum):
    """A base that prints its members as torch does."""

    def __repr__(self) -> str:
        return f"BackendType.{self.name}"


def _enum_of(members: dict[str, BackendValue]) -> Any:
    return _TorchEnum("BackendType", members)  # type: ignore[call-arg]


_tensorpipe_init_backend_handler = starting.init_agent
_TENSORPIPE: Final = BackendValue(
    _tensorpipe_construct_rpc_backend_options_handler, _tensorpipe_init_backend_handler
)
BackendType: Any = _enum_of({"TENSORPIPE": _TENSORPIPE})


def backend_registered(backend_name: str) -> bool:
    """Return whether a backend has this name."""
    return backend_name in BackendType.__members__


def register_backend(
    backend_name: str,
    construct_rpc_backend_options_handler: Callable[..., Any],
    init_backend_handler: Callable[..., Any],
) -> Any:
    """Add a backend; return its member of `BackendType`, which is a new class.

    Raises:
        RuntimeError: a backend already has this name.
    """
    global BackendType  # noqa: PLW0603  (an enum cannot be extended)
    if backend_registered(backend_name):
        raise RuntimeError(f"RPC backend {backend_name}: already registered")
    known = {backend.name: backend.value for backend in BackendType}
    value = BackendValue(construct_rpc_backend_options_handler, init_backend_handler)
    BackendType = _enum_of({backend_name: value, **known})
    return BackendType[backend_name]


def construct_rpc_backend_options(
    backend: Any,
    rpc_timeout: float = constants.DEFAULT_RPC_TIMEOUT_SEC,
    init_method: str = constants.DEFAULT_INIT_METHOD,
    **kwargs: Any,
) -> RpcBackendOptions:
    """Return options of a backend."""
    options: RpcBackendOptions = backend.value.construct_rpc_backend_options_handler(
        rpc_timeout, init_method, **kwargs
    )
    return options


def init_backend(backend: Any, *args: Any, **kwargs: Any) -> Any:
    """Start the agent of a backend, and return it."""
    return backend.value.init_backend_handler(*args, **kwargs)
