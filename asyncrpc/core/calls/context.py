"""What a running function can ask: its worker, its deadline, the call it serves.

All are context variables, so every task has its own, and a thread that runs a function
for a call sees the call's.

`Deadlines` ends calls at their deadlines, with one timer for all calls that have one
timeout.  Most calls of a program have the same timeout, and so their deadlines come in
the order in which they began: a queue, whose front is the next to pass.  A call that is
answered leaves the queue, and no timer is touched: that takes 0.2 us, a timer of its
own 0.9 us and two objects more for Python's collector of cycles.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, TypeAlias, TypeVar

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


T = TypeVar("T")

# A timer that is so late tells that this process stood still, stopped perhaps: answers
# may have come meanwhile, and what has come is read first, for a while.  Turns of the
# loop are counted, too: in so many it reads, however little processor time it gets.
_LATE_S: Final = 0.05
_READING_S: Final = 0.05
_TURNS: Final = 10
QUEUES_MAX: Final = 32  # timeouts at once; each call with another one has a timer
_SLACK_S: Final = 0.001  # the resolution of event loops


class Deadlines(Generic[T]):
    """Watches the deadlines of calls."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, expire: Callable[[T], None]
    ) -> None:
        """Watch deadlines.

        Args:
            expire: ends a call at its deadline, or up to a millisecond before or
                after, and later if this process stood still; the call is not watched
                any more then.
        """
        self._loop = loop
        self._expire = expire
        self._queues: dict[int, _DeadlineQueue[T]] = {}  # by timeout; each has a timer

    def watch(self, call: T, deadline: Deadline) -> Watch:
        """End a call at its deadline, unless the returned watch is stopped before."""
        at_s = deadline.at_s
        # To hundredths of a second: what has travelled has lost some nanoseconds.
        timeout = int(deadline.allowed_s * 100 + 0.5)
        queue = self._queues.get(timeout)
        if queue is None:
            if len(self._queues) >= QUEUES_MAX:
                return _DeadlineTimer(self._loop, at_s, partial(self._expire, call))
            queue = self._queues[timeout] = _DeadlineQueue()
            self._arm(queue, timeout, at_s)
        elif at_s < queue.last_s - _SLACK_S:  # it may have come with less time left
            return _DeadlineTimer(self._loop, at_s, partial(self._expire, call))
        queue.last_s = max(queue.last_s, at_s)
        queue.ends[call] = at_s
        return queue

    def close(self) -> None:
        """Stop watching all calls."""
        queues, self._queues = self._queues, {}
        for queue in queues.values():
            queue.timer.cancel()

    def _arm(self, queue: _DeadlineQueue[T], timeout: int, at_s: float) -> None:
        queue.due_s = at_s
        queue.timer = self._loop.call_at(at_s, self._on_timer, queue, timeout)

    def _on_timer(self, queue: _DeadlineQueue[T], timeout: int) -> None:
        """End the calls whose deadlines have passed, and wait for the next one."""
        ends, now_s = queue.ends, self._loop.time() + _SLACK_S
        if queue.turns or now_s - queue.due_s > _LATE_S:
            queue.turns = (queue.turns or _TURNS) - 1
            self._arm(queue, timeout, now_s + _READING_S / _TURNS)
            queue.due_s = math.inf  # once: other lateness is not waited out
            return
        due: list[T] = []
        for call, at_s in ends.items():
            if at_s > now_s:
                self._arm(queue, timeout, at_s)
                break
            due.append(call)
        else:
            del self._queues[timeout]
            del queue.timer  # it refers to the queue; no cycle is to be left
        for call in due:
            if ends.pop(call, None) is not None:  # the end of another may have ended it
                self._end(call)

    def _end(self, call: T) -> None:
        try:
            self._expire(call)
        except Exception as error:  # noqa: BLE001  (the others are to end, too)
            text = "a call whose deadline had passed could not be ended"
            self._loop.call_exception_handler({"message": text, "exception": error})


class _DeadlineQueue(Generic[T]):
    """Calls with one timeout, in the order of their deadlines."""

    __slots__ = ("due_s", "ends", "last_s", "timer", "turns")

    due_s: float
    timer: asyncio.TimerHandle

    def __init__(self) -> None:
        self.ends: dict[T, float] = {}
        self.last_s = 0.0
        self.turns = 0  # in which to read first what came while the process stood still

    def stop(self, call: T) -> None:
        """Stop watching a call."""
        self.ends.pop(call, None)


class _DeadlineTimer:
    """The timer of one call."""

    __slots__ = ("_at_s", "_expire", "_loop", "_timer")

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        at_s: float,
        expire: Callable[[], None],
    ) -> None:
        self._loop, self._at_s, self._expire = loop, at_s, expire
        self._timer = loop.call_at(at_s, self._on_timer)

    def _on_timer(self) -> None:
        is_late = self._loop.time() - self._at_s > _LATE_S
        self._after(_TURNS if is_late else 0)

    def _after(self, turns: int) -> None:
        if turns:
            at_s = self._loop.time() + _READING_S / _TURNS
            self._timer = self._loop.call_at(at_s, self._after, turns - 1)
        else:
            self._expire()

    def stop(self, _call: Any) -> None:
        """Stop watching the call."""
        self._timer.cancel()


# What a call keeps while its deadline is watched.
Watch: TypeAlias = _DeadlineQueue[Any] | _DeadlineTimer
