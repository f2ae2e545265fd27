"""Methods of referenced values, called as functions, so that a profiler shows them.

Unless a profiler runs, methods are called without these.

Source: torch.distributed.rpc.rref_proxy, for the names, which profilers show.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from asyncrpc.compat.rpc.functions import async_execution
from asyncrpc.runtime.calls.modes import Mode, mode_of


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
    Mode.ASYNC_EXECUTION: _local_invoke_async_execution,
}


def invoking(method: Any) -> Callable[..., Any] | None:
    """Return what calls a method of a referenced value; None: that is on the loop."""
    return _INVOKING.get(mode_of(method))
