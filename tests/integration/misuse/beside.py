"""Where a use runs that the current worker, or its event loop, is no place for."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from typing import Any, Final

from asyncrpc.core.calls.context import current_worker_var
from asyncrpc.core.loop.loops import running_loop

SEQUENCES: Final = {"an empty list", "a list of numbers", "a list of text"}


def in_thread(function: Callable[..., Any]) -> Callable[..., Awaitable[Any]]:
    """Return what runs a blocking function in a thread without an event loop.

    Where no loop runs, it is run at once.
    """

    @functools.wraps(function)
    async def use(*args: Any, **kwargs: Any) -> Any:
        if running_loop() is None:
            return function(*args, **kwargs)
        return await asyncio.to_thread(function, *args, **kwargs)

    return use


def giving(value: Any) -> Callable[[], Any]:
    """Return what is called for a value: how that is entered, or iterated over."""
    return lambda: value


def without_worker(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return what calls a function as a program does that has no worker yet."""

    @functools.wraps(function)
    def use(*args: Any, **kwargs: Any) -> Any:
        current_worker_var.set(None)
        return function(*args, **kwargs)

    return use
