"""What a running function can ask: its worker, its deadline, the call it serves.

All are context variables, so every task has its own, and a thread that runs a function
for a call sees the call's.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from asyncrpc.core.arguments import check_seconds, wrong
from asyncrpc.core.loop.clock import Deadline
from asyncrpc.core.loop.loops import loop_for

if TYPE_CHECKING:
    from asyncrpc.core.calls.inbound import InboundCall


class PassEnding(NamedTuple):
    """The end of what a hook has begun within a distributed backward pass.

    Attributes:
        parameters: whose gradients it may set.
        end: called in a thread when no further gradient of the pass comes here.
        give_up: called on the loop if the pass fails before.
    """

    parameters: Sequence[Any]
    end: Callable[[], None]
    give_up: Callable[[], None]


@dataclass(slots=True)
class PassPart:
    """This worker's part of a distributed backward pass, as hooks on parameters see it.

    Autograd runs it in segments.

    Attributes:
        keeps_graph: whether the graph is kept for another pass.
        endings: what hooks have begun in its segments, and end after the last.
    """

    parameters: Sequence[Any] = ()
    keeps_graph: bool = False
    endings: tuple[PassEnding, ...] = ()
    is_over: bool = False


# A `Worker`: a class that these modules must not know.
current_worker_var: Final[ContextVar[Any]] = ContextVar("asyncrpc_worker", default=None)
current_call_var: Final[ContextVar[InboundCall | None]] = ContextVar(
    "asyncrpc_call", default=None
)
deadline_var: Final[ContextVar[Deadline | None]] = ContextVar(
    "asyncrpc_deadline", default=None
)
# Set while autograd, in this thread, runs a segment of a distributed pass.
part_of_pass_var: Final[ContextVar[PassPart | None]] = ContextVar(
    "asyncrpc_part_of_pass", default=None
)

_GRACE_S: Final = 0.005


def cancelled() -> bool:
    """Return whether the caller of the running function no longer wants its result.

    For plain functions, which run in threads and cannot be interrupted: a long loop
    asks now and then, and returns early.  Always False outside a call.

    Thread safety: may be called from the thread that runs the function.
    """
    call = current_call_var.get()
    return call is not None and call.is_cancelled


@asynccontextmanager
async def deadline(timeout_s: float | None) -> AsyncIterator[None]:
    """Limit everything awaited inside, and every call made inside, on all workers.

    The limit travels with each call as the time that is left, so that nested calls on
    other workers stop at it too.  Deadlines nest; the earliest one counts.

    Args:
        timeout_s: seconds from now; 0 is already over, None adds no limit.

    Raises:
        TimeoutError: `timeout_s` passed.  A call that was cut off raises
            `DeadlineExceededError`, which is a `TimeoutError` too.
        UsageError: `timeout_s` is negative, infinite, or not a number.

    Cancellation:
        Passes through.

    Example:
        >>> async with asyncrpc.deadline(2.0):
        ...     loss = await worker.peer("ps").call(step, batch)
    """
    if timeout_s is None:
        yield
        return
    check_seconds("timeout_s", timeout_s, at_least=0)
    if math.isinf(timeout_s):
        wanted = "a finite number of seconds, or None for no limit"
        raise wrong("timeout_s", wanted, timeout_s)
    loop = loop_for("asyncrpc.deadline")
    limit = Deadline.after(timeout_s, loop.time())
    token = deadline_var.set(earlier(limit, current_deadline()))
    # Calls watch the deadline themselves, and their errors say more: give them a
    # moment, counted from when the loop runs the timer, which may be late.
    scope = asyncio.timeout(None)
    timer = loop.call_at(limit.at_s, lambda: scope.reschedule(loop.time() + _GRACE_S))
    try:
        async with scope:
            yield
    finally:
        timer.cancel()
        with suppress(ValueError):  # a task with variables of its own ends it
            deadline_var.reset(token)


def current_deadline() -> Deadline | None:
    """Return the enclosing deadline, unless what it limited is over."""
    limit = deadline_var.get()
    return None if limit is None or limit.is_lifted else limit


def earlier(limit: Deadline, outer: Deadline | None) -> Deadline:
    """Return the earlier of two deadlines; they may be of different classes."""
    return limit if outer is None or limit.at_s <= outer.at_s else outer


def effective_deadline(timeout_s: float | None, now_s: float) -> Deadline | None:
    """Return the earlier of the enclosing deadline and `timeout_s` from now."""
    outer = current_deadline()
    if timeout_s is None or timeout_s == math.inf:
        return outer
    return earlier(Deadline.after(timeout_s, now_s), outer)


def forget_deadline() -> None:
    """Hide the enclosing deadline from this context from here on."""
    if deadline_var.get() is not None:  # each change costs a copy of what varies
        deadline_var.set(None)
