"""How a function is to run on the callee."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from asyncrpc.runtime.calls import modes

__all__ = ["async_execution"]

F = TypeVar("F", bound=Callable[..., Any])


def async_execution(fn: F) -> F:
    """Mark a function that returns a `torch.futures.Future` of its result.

    The callee's thread is free once it has returned; the answer goes out when the
    future is done.  The order with `staticmethod` and `classmethod` is torch's: they
    come first, this below them.

    Args:
        fn: the function.

    Returns:
        The same function.

    Source: torch.distributed.rpc.functions.async_execution.
    """
    return modes.async_execution(fn)
