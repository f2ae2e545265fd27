"""Proxies of referenced values, whose methods run on the owner.

A method is called directly.  Under a profiler a helper function calls it, as in torch,
so that its range has torch's name.

Source: torch.distributed.rpc.rref_proxy.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch

from asyncrpc.compat.rpc import agent as agents
from asyncrpc.compat.rpc import profiling
from asyncrpc.compat.rpc.constants import UNSET_RPC_TIMEOUT
from asyncrpc.compat.rpc.functions import async_execution
from asyncrpc.core.calls.context import forget_deadline
from asyncrpc.core.calls.futures import CallFuture
from asyncrpc.core.calls.modes import Mode, mode_of
from asyncrpc.core.rref.handle import RRef as Handle
from asyncrpc.core.rref.handle import service_of

if TYPE_CHECKING:
    from asyncrpc.compat.rpc.rref import RRef


def _local_invoke(rref: Any, func_name: str, args: Any, kwargs: Any) -> Any:
    return getattr(rref.to_here(timeout=0), func_name)(*args, **kwargs)


@async_execution
def _local_invoke_async_execution(
    rref: Any, func_name: str, args: Any, kwargs: Any
) -> Any:
    return getattr(rref.to_here(timeout=0), func_name)(*args, **kwargs)


_INVOKING: Final[Mapping[Mode, Callable[..., Any]]] = {
    Mode.THREAD: _local_invoke,
    Mode.COROUTINE: _local_invoke,  # which returns the coroutine
    Mode.ONE_STEP: _local_invoke,
    Mode.ASYNC_EXECUTION: _local_invoke_async_execution,
}


def invoking(method: Any) -> Callable[..., Any] | None:
    """Return the function that calls a method; None if the method runs on the loop."""
    return _INVOKING.get(mode_of(method))


class RRefProxy:
    """Methods of a referenced value, called by one of the functions for calls.

    Attributes:
        rpc_api: `rpc_sync`, `rpc_async` or `remote`.
        rpc_timeout: seconds, as for that function.
    """

    def __init__(
        self,
        rref: RRef[Any],
        rpc_api: Callable[..., Any],
        timeout: float = UNSET_RPC_TIMEOUT,
    ) -> None:
        self.rref = rref
        self.rpc_api = rpc_api
        self.rpc_timeout = timeout

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """Return a function that calls a method; whether it exists, the call says."""
        return partial(_invoke_rpc, self.rref, self.rpc_api, name, self.rpc_timeout)


def _invoke_rpc(
    rref: RRef[Any],
    rpc_api: Callable[..., Any],
    name: str,
    timeout: float,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Call a method of a value, as `rpc_api` calls."""
    direct = _DIRECT.get(rpc_api)
    kind: type | None = getattr(rref, "_type", None)
    if kind is None and direct is not _remote:
        # The call itself waits for the value, and raises its error.
        kind = getattr(rref, "_made_of", None)
    # The usual case, without a step between.
    is_known = kind is not None and hasattr(kind, name)
    if is_known and direct is not None and not profiling.is_on():
        return direct(rref, name, args, kwargs, timeout)
    start = partial(_start, rref, rpc_api, name, timeout, args, kwargs)
    if kind is None and direct is _async:
        kinds = rref._get_type(timeout=timeout, blocking=False)  # noqa: SLF001
        return _after(kinds, start)
    if kind is None:
        kind = rref._get_type(timeout=timeout)  # noqa: SLF001
    if direct is _async and not hasattr(kind, name):
        return _failed(partial(start, kind))
    return start(kind)


def _start(  # noqa: PLR0917  (the call, piece by piece)
    rref: RRef[Any],
    rpc_api: Callable[..., Any],
    name: str,
    timeout: float,
    args: Any,
    kwargs: Any,
    kind: type,
) -> Any:
    """Call a method of a value of some type."""
    method, direct = getattr(kind, name), _DIRECT.get(rpc_api)
    is_shown = profiling.is_on() and invoking(method) is not None
    if direct is not None and not is_shown:
        return direct(rref, name, args, kwargs, timeout)
    # By a helper function, as torch: a profiler shows it, or the program has replaced
    # the function for calls.
    owner, helper = rref.owner(), invoking(method) or _local_invoke
    return rpc_api(owner, helper, args=(rref, name, args, kwargs), timeout=timeout)


def _failed(fail: Callable[[], object]) -> torch.futures.Future[Any]:
    """Return a future that raises what a function raises."""
    future: torch.futures.Future[Any] = torch.futures.Future()
    try:
        fail()
    except Exception as error:  # noqa: BLE001  (of the program's class)
        future.set_exception(error)
    return future


def _after(
    kinds: torch.futures.Future[type],
    start: Callable[[type], torch.futures.Future[Any]],
) -> torch.futures.Future[Any]:
    """Return the future of a call that starts once the type of a value is known.

    It starts in this thread's autograd context: outside, its gradients would be lost.
    """
    result: torch.futures.Future[Any] = torch.futures.Future()
    context = contextvars.copy_context()

    def end(done: torch.futures.Future[Any]) -> None:
        try:
            result.set_result(done.value())
        except Exception as error:  # noqa: BLE001  (it is the call's)
            result.set_exception(error)

    def begin(known: torch.futures.Future[type]) -> None:
        try:
            context.run(start, known.value()).add_done_callback(end)
        except Exception as error:  # noqa: BLE001  (it is the call's)
            result.set_exception(error)

    kinds.add_done_callback(begin)
    return result


def _method(
    rref: RRef[Any], name: str, args: Any, kwargs: Any, timeout: float
) -> Callable[[], CallFuture[Any]]:
    agent = agents.current()

    def start() -> CallFuture[Any]:
        forget_deadline()
        service = service_of(rref)
        return service.start_method(rref, name, args, kwargs, agent.limit_s(timeout))

    return start


def _sync(rref: RRef[Any], name: str, args: Any, kwargs: Any, timeout: float) -> Any:
    return agents.current().result_of(_method(rref, name, args, kwargs, timeout))


def _async(rref: RRef[Any], name: str, args: Any, kwargs: Any, timeout: float) -> Any:
    return agents.current().future(_method(rref, name, args, kwargs, timeout))


def _remote(rref: RRef[Any], name: str, args: Any, kwargs: Any, timeout: float) -> Any:
    agent = agents.current()

    def start() -> Handle[Any]:
        forget_deadline()
        service = service_of(rref)
        return service.remote_method(rref, name, args, kwargs, agent.limit_s(timeout))

    from asyncrpc.compat.rpc.rref import start_creation  # noqa: PLC0415  (which needs this)

    return start_creation(agent, start, timeout)


# The functions for calls, by name, and what calls a method directly in their place.
# `api`, which defines them, adds them.
APIS: Final[dict[str, Callable[..., Any]]] = {}
_DIRECT: Final[dict[Callable[..., Any], Callable[..., Any]]] = {}


def add_apis(**functions: Callable[..., Any]) -> None:
    """Make the functions for calls known to proxies."""
    direct = {"rpc_sync": _sync, "rpc_async": _async, "remote": _remote}
    APIS.update(functions)
    _DIRECT.update({functions[name]: call for name, call in direct.items()})
