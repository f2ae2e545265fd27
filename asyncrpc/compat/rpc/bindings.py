"""The names of torch's C++ module, which torch's Python calls, and programs too.

What is neither a call nor the agent stays torch's: constants, records, and switches of
its profiler and of TorchScript, which do not depend on who makes the calls.

Source: torch._C._distributed_rpc, version 2.13.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._C._distributed_rpc import (
    _DEFAULT_INIT_METHOD,
    _DEFAULT_NUM_WORKER_THREADS,
    _DEFAULT_RPC_TIMEOUT_SEC,
    _UNSET_RPC_TIMEOUT,
    RemoteProfilerManager,
    RpcBackendOptions,
    WorkerInfo,
    _disable_jit_rref_pickle,
    _enable_jit_rref_pickle,
    _set_profiler_node_id,
    _TensorPipeRpcBackendOptionsBase,
)

from asyncrpc.compat.rpc import agent as agents
from asyncrpc.compat.rpc import api
from asyncrpc.compat.rpc.agent import Agent as RpcAgent
from asyncrpc.compat.rpc.api import (
    _delete_all_user_and_unforked_owner_rrefs,
    _get_current_rpc_agent,
    _is_current_rpc_agent_set,
    get_rpc_timeout,
)
from asyncrpc.compat.rpc.functions import async_execution
from asyncrpc.compat.rpc.internal import _run_pickled, _run_pickled_async
from asyncrpc.compat.rpc.rref import RRef

__all__ = [
    "_DEFAULT_INIT_METHOD",
    "_DEFAULT_NUM_WORKER_THREADS",
    "_DEFAULT_RPC_TIMEOUT_SEC",
    "_UNSET_RPC_TIMEOUT",
    "PyRRef",
    "RemoteProfilerManager",
    "RpcAgent",
    "RpcBackendOptions",
    "TensorPipeAgent",
    "WorkerInfo",
    "_TensorPipeRpcBackendOptionsBase",
    "_cleanup_python_rpc_handler",
    "_delete_all_user_and_unforked_owner_rrefs",
    "_destroy_rref_context",
    "_disable_jit_rref_pickle",
    "_enable_jit_rref_pickle",
    "_get_current_rpc_agent",
    "_invoke_remote_builtin",
    "_invoke_remote_python_udf",
    "_invoke_remote_torchscript",
    "_invoke_rpc_builtin",
    "_invoke_rpc_python_udf",
    "_invoke_rpc_torchscript",
    "_is_current_rpc_agent_set",
    "_reset_current_rpc_agent",
    "_rref_context_get_debug_info",
    "_set_and_start_rpc_agent",
    "_set_profiler_node_id",
    "_set_rpc_timeout",
    "enable_gil_profiling",
    "get_rpc_timeout",
]

TensorPipeAgent = RpcAgent
PyRRef = RRef  # torch's base class in C++

# --- the agent -----------------------------------------------------------------------


def _set_and_start_rpc_agent(agent: RpcAgent) -> None:
    """Make a running agent that of the process."""
    agents.set_current(agent)


def _reset_current_rpc_agent() -> None:
    """Forget the agent of the process."""
    agents.reset_current()


def _set_rpc_timeout(timeout: float) -> None:
    agents.current().rpc_timeout_s = timeout


def enable_gil_profiling(flag: bool) -> None:  # noqa: FBT001  (torch's signature)
    """Do nothing: no C++ code waits for the GIL here, as in torch."""
    agents.current().shows_gil_wait = flag


def _rref_context_get_debug_info() -> dict[str, str]:
    agent = agents.current()
    return agent.host.do_at_once(agent.reference_figures)


def _destroy_rref_context(ignore_rref_leak: bool) -> None:  # noqa: FBT001
    """Refuse to go on if others refer to values here; they end with the worker."""
    agent = agents.current()
    api._check_leaks(agent, is_ignored=ignore_rref_leak)  # noqa: SLF001


def _cleanup_python_rpc_handler() -> None:
    """Do nothing: asyncrpc keeps no Python objects for C++ code."""


# --- calls ---------------------------------------------------------------------------


def _invoke_rpc_builtin(
    dst: WorkerInfo, op_name: str, timeout: float, *args: Any, **kwargs: Any
) -> torch.futures.Future[Any]:
    return api.rpc_async(dst, _run_builtin, (op_name, args, kwargs), timeout=timeout)


def _invoke_remote_builtin(
    dst: WorkerInfo, op_name: str, timeout: float, *args: Any, **kwargs: Any
) -> RRef[Any]:
    return api.remote(dst, _run_builtin, (op_name, args, kwargs), timeout=timeout)


def _run_builtin(op_name: str, args: Any, kwargs: Any) -> Any:
    """Run an operator, `aten::add` say."""
    namespace, _, name = op_name.partition("::")
    return getattr(getattr(torch.ops, namespace), name)(*args, **kwargs)


def _invoke_rpc_python_udf(
    dst: WorkerInfo,
    pickled: bytes,
    tensors: list[Any],
    timeout: float,
    is_async_execution: bool,  # noqa: FBT001  (torch's signature)
) -> torch.futures.Future[Any]:
    run = _run_pickled_async if is_async_execution else _run_pickled
    return api.rpc_async(dst, run, (pickled, tensors), timeout=timeout)


def _invoke_remote_python_udf(
    dst: WorkerInfo,
    pickled: bytes,
    tensors: list[Any],
    timeout: float,
    is_async_execution: bool,  # noqa: FBT001  (torch's signature)
) -> RRef[Any]:
    run = _run_pickled_async if is_async_execution else _run_pickled
    return api.remote(dst, run, (pickled, tensors), timeout=timeout)


def _invoke_rpc_torchscript(  # noqa: PLR0917  (torch's signature)
    dst: str,
    name: str,
    args: Any,
    kwargs: Any,
    timeout: float,
    is_async_execution: bool,  # noqa: FBT001
) -> torch.futures.Future[Any]:
    run = _script_runner(is_async=is_async_execution)
    return api.rpc_async(dst, run, (name, args, kwargs), timeout=timeout)


def _invoke_remote_torchscript(
    dst: str,
    name: str,
    timeout: float,
    is_async_execution: bool,  # noqa: FBT001  (torch's signature)
    *args: Any,
    **kwargs: Any,
) -> RRef[Any]:
    run = _script_runner(is_async=is_async_execution)
    return api.remote(dst, run, (name, args, kwargs), timeout=timeout)


def _script_runner(*, is_async: bool) -> Callable[..., Any]:
    return _run_script_async if is_async else _run_script


def _run_script(name: str, args: Any, kwargs: Any) -> Any:
    """Run a TorchScript function that is compiled here, by its qualified name."""
    unit: Any = torch.jit._state._python_cu  # noqa: SLF001
    function = unit.find_function(name)
    if function is None:
        raise RuntimeError(
            f"no TorchScript function {name!r} is compiled here: import its module on "
            "the callee"
        )
    return function(*args, **kwargs)


@async_execution
def _run_script_async(name: str, args: Any, kwargs: Any) -> Any:
    return _run_script(name, args, kwargs)
