"""Many small requests in one remote call.

A request waits until a batch is full or the oldest of it has waited long enough; while
as many batches run as may, the next one gathers, so batches grow with the load.

Invariants: every request gets one answer or one error, never another's; a batch works
as long as anybody waits for it, and no longer.

Source: E. Crankshaw et al., "Clipper: A Low-Latency Online Prediction Serving System",
NSDI 2017, section 4.3 (delayed batching).
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import islice
from types import TracebackType
from typing import Any, Final, Generic, Self, TypeVar

from asyncrpc.arguments import check_callable, check_count, check_duration
from asyncrpc.clock import Deadline
from asyncrpc.errors import NotStartedError, Outcome, RejectedError, UsageError
from asyncrpc.runtime.calls.context import current_worker_var, deadline_var
from asyncrpc.runtime.extensions import CallTracer
from asyncrpc.runtime.loops import loop_for
from asyncrpc.runtime.threads import settable

A = TypeVar("A")
B = TypeVar("B")

WAITING_MAX: Final = 1024  # about a second of load for a batch of 32 in 30 ms


@dataclass(slots=True, eq=False)  # a member is itself, whatever its item equals
class _BatchItem(Generic[A, B]):
    """One request."""

    item: A
    answer: asyncio.Future[B]
    came_s: float
    deadline: Deadline | None
    trace: Any = None  # of whom asks, as the tracer of its worker tells it
    batch: _Batch[A, B] | None = None


@dataclass(slots=True, eq=False)
class _Batch(Generic[A, B]):
    """Requests that run as one call."""

    members: Sequence[_BatchItem[A, B]]
    task: asyncio.Task[None] | None = None

    def cancel_if_unwanted(self) -> None:
        if self.task and all(member.answer.done() for member in self.members):
            self.task.cancel()


class Batcher(Generic[A, B]):
    """A function of many items, called with one item at a time.

    An asynchronous context manager; in an application, enter it after the worker.  The
    function runs in the context in which the batcher was entered, so with the worker
    that was current there; its deadline is the latest of its members'.

    Example:
        >>> async def predict(rows: list[torch.Tensor]) -> torch.Tensor:
        ...     return await model.rpc_async().forward(torch.stack(rows))
        >>> async with Batcher(predict, max_size=32, max_wait_s=0.005) as batched:
        ...     logits = await batched(row)
    """

    def __init__(
        self,
        function: Callable[[list[A]], Awaitable[Collection[B]]],
        max_size: int,
        max_wait_s: float,
        *,
        waiting_max: int = WAITING_MAX,
        batches_max: int = 1,
    ) -> None:
        """Describe a batcher; `async with` starts it.

        Args:
            function: gets 1 to `max_size` items and returns as many answers, in order;
                a tensor `(items, ...)` counts as its rows.
            max_size: items in a batch.
            max_wait_s: seconds that an item waits for others while nothing else holds
                it back; 0 sends it at once.
            waiting_max: items that may wait; more are rejected.
            batches_max: batches that may run at the same time.

        Raises:
            UsageError: an argument is of another kind, or out of its range.
        """
        check_callable("function", function)
        check_count("max_size", max_size, at_least=1)
        check_duration("max_wait_s", max_wait_s)
        check_count("waiting_max", waiting_max, at_least=1)
        check_count("batches_max", batches_max, at_least=1)
        self._function = function
        self._max_size = max_size
        self._max_wait_s = max_wait_s
        self._waiting_max = waiting_max
        self._batches_max = batches_max
        self._waiting: dict[_BatchItem[A, B], None] = {}  # ordered; O(1) to leave
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_closing = False

    async def __aenter__(self) -> Self:
        """Be ready for requests on this loop.

        Raises:
            UsageError: no event loop runs here.
        """
        self._loop = loop_for("a Batcher")
        self._context = contextvars.copy_context()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Answer what has come, and take no more; at once if the block raised.

        Cancellation:
            What runs is cancelled and its members are given a `RejectedError`.
        """
        self._is_closing = True
        try:
            if error is None:
                self._pump()
                while self._tasks:
                    await asyncio.wait(self._tasks)  # the program's function ends them
        finally:
            await self._abort()

    async def __call__(self, item: A) -> B:
        """Return the function's answer to one item.

        Args:
            item: goes into a batch with others.

        Returns:
            The answer at the item's place.

        Raises:
            RejectedError: too many items wait, or the batcher has been closed.
            UsageError: the function returned more or fewer answers than it got items;
                or this is another event loop than the one it was entered on.
            NotStartedError: the batcher has not been entered.
            Exception: what the function raised; every member of the batch gets it.

        Cancellation:
            The item leaves its batch; the others stay.  A batch whose requests have all
            gone is cancelled, and so is its call.
        """
        member = self._join(item)
        try:
            return (
                await member.answer
            )  # the end of its batch, or `_abort`, completes it
        except asyncio.CancelledError:
            self._leave(member)
            raise

    @property
    def waiting(self) -> int:
        """How many items wait for a batch."""
        return len(self._waiting)

    def _join(self, item: A) -> _BatchItem[A, B]:
        if self._loop is None:
            raise NotStartedError("the Batcher has not been entered; use `async with`")
        if loop_for("a Batcher") is not self._loop:
            raise UsageError("the Batcher was entered on another event loop than this")
        if self._is_closing:
            raise _rejected("the batcher is closed")
        if len(self._waiting) >= self._waiting_max:
            raise _rejected(
                f"{len(self._waiting)} items wait for a batch, the limit (waiting_max)"
            )
        loop = self._loop
        member = _BatchItem[A, B](
            item, loop.create_future(), loop.time(), deadline_var.get()
        )
        if (tracer := self._tracer) is not None:
            member.trace = tracer.here()
        self._waiting[member] = None
        self._pump()
        return member

    def _leave(self, member: _BatchItem[A, B]) -> None:
        self._waiting.pop(member, None)
        if member.batch is not None:
            member.batch.cancel_if_unwanted()
        if member.answer.done() and not member.answer.cancelled():
            member.answer.exception()  # it came in the same turn: mark it as read

    def _pump(self, *, is_due: bool = False) -> None:
        """Start what is due; set the clock for what will be."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._waiting and len(self._tasks) < self._batches_max:
            if not (is_due or self._is_due()):
                self._set_timer()
                return
            self._start()
            is_due = False

    def _is_due(self) -> bool:
        return (
            self._is_closing
            or len(self._waiting) >= self._max_size
            or self._now_s() >= self._due_s()
        )

    def _due_s(self) -> float:
        return next(iter(self._waiting)).came_s + self._max_wait_s

    def _now_s(self) -> float:
        assert self._loop is not None
        return self._loop.time()

    def _set_timer(self) -> None:
        assert self._loop is not None
        # uvloop rounds to milliseconds and may be early, hence `is_due`.
        due = partial(self._pump, is_due=True)
        self._timer = self._loop.call_at(self._due_s(), due, context=self._context)

    def _start(self) -> None:
        assert self._loop is not None
        batch = _Batch(list(islice(self._waiting, self._max_size)))
        for member in batch.members:
            del self._waiting[member]
            member.batch = batch
        # In a context of its own: the request that completes a batch must not lend it
        # its deadline, or its autograd context.
        task = self._loop.create_task(self._run(batch), context=self._context.copy())
        batch.task = task
        self._tasks.add(task)
        task.add_done_callback(partial(self._on_ended, batch), context=self._context)

    async def _run(self, batch: _Batch[A, B]) -> None:
        deadline_var.set(_latest(batch.members))
        try:
            with self._shown(batch.members):
                answers = await self._function(
                    [member.item for member in batch.members]
                )
                _check_count(answers, len(batch.members))
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # noqa: BLE001  (theirs who asked)
            for member in batch.members:
                if not member.answer.done():
                    member.answer.set_exception(settable(error))
        else:
            for member, answer in zip(batch.members, answers, strict=True):
                if not member.answer.done():
                    member.answer.set_result(answer)

    @property
    def _tracer(self) -> CallTracer | None:
        """What shows the calls of its worker in traces; None: nothing does."""
        worker = self._context.get(current_worker_var)
        return None if worker is None else worker.parts.tracer

    def _shown(
        self, members: Sequence[_BatchItem[A, B]]
    ) -> AbstractContextManager[None]:
        """Return a context in which a batch runs, and is shown in traces."""
        tracer = self._tracer
        if tracer is None:
            return nullcontext()
        name = getattr(self._function, "__qualname__", type(self._function).__name__)
        return tracer.batch(str(name), [member.trace for member in members])

    def _on_ended(self, batch: _Batch[A, B], task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        _fail(batch.members, "the batch was cancelled", Outcome.UNKNOWN)
        self._pump()

    async def _abort(self) -> None:
        """End what is left, and wait for it."""
        _fail(tuple(self._waiting), "the batcher is closed", Outcome.NOT_EXECUTED)
        self._waiting.clear()
        if self._timer is not None:
            self._timer.cancel()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)


def _latest(members: Sequence[_BatchItem[Any, Any]]) -> Deadline | None:
    """Return the deadline after which no request waits; None if one has no limit."""
    limits = [member.deadline for member in members if member.deadline is not None]
    return max(limits) if len(limits) == len(members) else None


def _check_count(answers: Collection[Any], items: int) -> None:
    if len(answers) != items:
        raise UsageError(
            f"the function of a Batcher returned {len(answers)} answers to {items} "
            "items; it must return one for each, in order"
        )


def _fail(members: Sequence[_BatchItem[Any, Any]], why: str, outcome: Outcome) -> None:
    for member in members:
        if not member.answer.done():
            member.answer.set_exception(_rejected(why, outcome))


def _rejected(why: str, outcome: Outcome = Outcome.NOT_EXECUTED) -> RejectedError:
    return RejectedError(why, outcome=outcome)
