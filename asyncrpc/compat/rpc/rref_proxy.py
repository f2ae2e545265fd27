"""Functions that call methods of referenced values, so that a profiler shows them.

Without a profiler, methods are called directly.

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
    """Return the function that calls a method; None if the method runs on the loop."""
    return _INVOKING.get(mode_of(method))
