"""Checks that every queue makes on a new request."""

from __future__ import annotations

import asyncio
from contextvars import Context
from typing import Any

from asyncrpc.core.calls.context import current_deadline, current_worker_var
from asyncrpc.core.loop.loops import check_loop
from asyncrpc.errors import NotStartedError
from asyncrpc.extend import CallTracer, Deadline, tracer_of
from asyncrpc.serving.batching import refusals
from asyncrpc.serving.batching.machine.overload import ServiceQueue


def entered_loop(
    noun: str, loop: asyncio.AbstractEventLoop | None, *, is_closing: bool
) -> asyncio.AbstractEventLoop:
    """Return the loop that a batcher was entered on, which must be this one.

    Args:
        loop: the loop that it was entered on; None: it was not entered.
    """
    if loop is None:
        raise NotStartedError(f"the {noun} has not been entered; use `async with`")
    check_loop(f"the {noun}", loop, "it")
    if is_closing:
        raise refusals.closed("batcher")
    return loop


def tracer_in(context: Context) -> CallTracer | None:
    """Return the tracer of the current worker; None: its calls are not traced."""
    worker = context.get(current_worker_var)
    return None if worker is None else tracer_of(worker)


def deadline_here(queue: ServiceQueue[Any], name: str, now_s: float) -> Deadline | None:
    """Return the deadline of a new request; None: it has no limit."""
    deadline = current_deadline()
    if deadline is not None and deadline.at_s <= now_s:
        queue.counts.expired += 1
        raise refusals.expired(deadline, name)
    return deadline
