"""Where a use runs that the current worker, or its event loop, is no place for."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from typing import Any, Final

from asyncrpc.runtime.calls.context import current_worker_var

SEQUENCES: Final = {"an empty list", "a list of numbers", "a list of text"}


def in_thread(function: Callable[..., Any]) -> Callable[..., Awaitable[Any]]:
    """Return what runs a blocking function in a thread without an event loop."""

    @functools.wraps(function)
    async def use(*args: Any, **kwargs: Any) -> Any:
        return await asyncio.to_thread(function, *args, **kwargs)

    return use


def without_worker(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return what calls a function as a program does that has no worker yet."""

    @functools.wraps(function)
    def use(*args: Any, **kwargs: Any) -> Any:
        current_worker_var.set(None)
        return function(*args, **kwargs)

    return use
