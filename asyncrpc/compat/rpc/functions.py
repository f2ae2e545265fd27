"""A decorator that sets how a function runs on the callee."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from asyncrpc.core.calls import modes

__all__ = ["async_execution"]

F = TypeVar("F", bound=Callable[..., Any])


def async_execution(fn: F) -> F:
    """Mark a function that returns a `torch.futures.Future` of its result.

    The callee's thread is free once the function has returned; the answer is sent when
    the future is done.  As in torch, `staticmethod` and `classmethod` come above this
    decorator.

    Source: torch.distributed.rpc.functions.async_execution.
    """
    return modes.async_execution(fn)
