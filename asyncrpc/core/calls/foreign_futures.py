"""Futures of torch and of threads, as something that a coroutine can await."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import torch

from asyncrpc.core.devices.streams import order_default_streams
from asyncrpc.core.loop.threads import outcome_to


def as_awaitable(value: Any) -> Any:
    """Return what a marked function returned as something to await, or None."""
    kind = type(value)  # what it says of itself may be wrong, or raise
    if issubclass(kind, Awaitable):
        return value
    if issubclass(kind, concurrent.futures.Future):
        ours = when_done(value, value.result)
        ours.add_done_callback(lambda done: done.cancelled() and value.cancel())
        return ours
    # What `then` returns is of the base class, which is written in C++.
    if issubclass(kind, torch._C.Future):  # noqa: SLF001
        return when_done(value, partial(_value_of, value))
    return None


def _value_of(future: Any) -> Any:
    """Return what a future of torch has, in a callback of it.

    torch runs that on streams of its own, after what was begun on the stream that was
    current when the future was set.
    """
    order_default_streams()
    return future.value()


def when_done(future: Any, outcome_of: Callable[[], Any]) -> asyncio.Future[Any]:
    """Return a future of this loop for one that completes in any thread."""
    loop = asyncio.get_running_loop()
    ours: asyncio.Future[Any] = loop.create_future()
    finish = outcome_to(ours)

    def tell(result: Any, error: BaseException | None) -> None:
        # Not as for a job: it is what the function waited for that was cancelled.
        if issubclass(type(error), asyncio.CancelledError) and not ours.done():
            ours.set_exception(error)  # type: ignore[arg-type]  # it is not None
        else:
            finish(result, error)

    def on_done(_done: Any) -> None:
        result: Any = None
        error: BaseException | None = None
        try:
            result = outcome_of()
        except concurrent.futures.CancelledError:
            error = asyncio.CancelledError()
        except BaseException as raised:  # noqa: BLE001  (handed on)
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(tell, result, error)

    future.add_done_callback(on_done)
    return ours
