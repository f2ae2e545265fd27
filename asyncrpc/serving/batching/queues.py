"""What all queues of requests share: arguments, checks, a timer, and their errors."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextvars import Context
from typing import Any, Final, Literal, TypeAlias, TypeVar

import numpy as np
import torch

from asyncrpc.core.arguments import (
    check_above,
    check_count,
    check_duration,
    check_text,
    listed,
    wrong,
)
from asyncrpc.core.calls.context import current_deadline, current_worker_var
from asyncrpc.core.loop.loops import check_loop
from asyncrpc.errors import (
    CallError,
    DeadlineExceededError,
    NotStartedError,
    Outcome,
    OverloadedError,
    RejectedError,
    UsageError,
)
from asyncrpc.extend import CallTracer, Deadline, tracer_of
from asyncrpc.serving.batching.machine.fair_queue import QueuedRequest
from asyncrpc.serving.batching.machine.overload import (
    DropReason,
    QueueRefusal,
    ServiceQueue,
)

WAITING_MAX: Final = 1024  # about a second of load for a batch of 32 in 30 ms
PRIORITY_STEP_S: Final = 1.0  # a less important request waits a second longer
Overflow: TypeAlias = Literal["newest", "oldest"]
OVERFLOWS: Final = ("newest", "oldest")
PRIORITY_MAX: Final = 100  # more levels than programs need; each level costs time
NAME_CHARACTERS_MAX: Final = 100


def check_queue(
    waiting_max: object,
    max_queue_age_s: Any,
    standing_queue_age_s: Any,
    priority_step_s: object,
) -> None:
    """Raise UsageError unless these are valid options of a queue."""
    check_count("waiting_max", waiting_max, at_least=1)
    check_duration("priority_step_s", priority_step_s)
    if max_queue_age_s is not None:
        check_age("max_queue_age_s", max_queue_age_s)
    if standing_queue_age_s is None:
        return
    check_age("standing_queue_age_s", standing_queue_age_s)
    if max_queue_age_s is None or standing_queue_age_s > max_queue_age_s:
        raise UsageError(
            f"standing_queue_age_s ({standing_queue_age_s:g}) needs max_queue_age_s and"
            f" must not exceed it ({max_queue_age_s})"
        )


def check_age(name: str, value: Any) -> None:
    """Raise UsageError unless an argument is a finite number of seconds above 0."""
    check_duration(name, value)
    check_above(name, value, 0)


def check_request(priority: object, client: object) -> None:
    """Raise UsageError unless these are valid options of a request."""
    if type(priority) is not int or not -PRIORITY_MAX <= priority <= PRIORITY_MAX:
        wanted = f"an integer between {-PRIORITY_MAX} and {PRIORITY_MAX}"
        raise wrong("priority", wanted, priority)
    if client is not None:
        hashable("client", client)


def hashable(name: str, value: Any) -> Hashable:
    """Return a value that can be a key."""
    try:
        hash(value)
    except Exception as error:  # the value's own code
        raise wrong(name, "hashable, such as a string or a tuple", value) from error
    key: Hashable = value
    return key


def name_of(function: object) -> str:
    """Return the name of a function, for people."""
    return str(getattr(function, "__qualname__", type(function).__name__))


def checked_answers(whose: str, answers: Any, count: int, asked: str) -> list[Any]:
    """Return what a function of many answers, if there is one for each, in order.

    Only what has an order of its own is taken for answers: a set has none, a dict's
    length is that of its keys, a string's that of its letters, and a named tuple's that
    of its fields.
    """
    if isinstance(answers, torch.Tensor | np.ndarray):
        is_ordered = answers.ndim > 0
    elif isinstance(answers, tuple):
        is_ordered = type(answers) is tuple
    else:
        is_ordered = isinstance(answers, Sequence) and not isinstance(
            answers, str | bytes | bytearray | memoryview
        )
    if not is_ordered:
        kind = type(answers)
        raise UsageError(
            f"{whose} must return a list with one answer for each of the {count}"
            f" {asked}, in order, or a tensor or array with that many rows, not an"
            f" object of type {kind.__module__}.{kind.__qualname__}"
        )
    if len(answers) != count:
        raise UsageError(
            f"{whose} returned {len(answers)} answers to {count} {asked}; it must "
            "return one for each, in order"
        )
    return list(answers)


def chosen_name(name: object, function: object) -> str:
    """Return the name that was given, or that of the function."""
    if name is None:
        return name_of(function)[:NAME_CHARACTERS_MAX]
    check_text("name", name, at_most=NAME_CHARACTERS_MAX)
    return str(name)


def batches_of(name: str, value: Iterable[Any], size_max: int) -> list[list[Any]]:
    """Return the batches that were given for warming up."""
    wanted = "batches: sequences of items"
    batches = [
        listed(f"each of {name}", batch, wanted)
        for batch in listed(name, value, wanted)
    ]
    for batch in batches:
        if not 1 <= len(batch) <= size_max:
            raise UsageError(
                f"each batch of {name} must have 1 to {size_max} items (max_size), "
                f"not {len(batch)}"
            )
    return batches


def checked_callable(name: str, value: Callable[..., Any] | None) -> None:
    """Raise UsageError unless an argument can be called, or is None."""
    if value is not None and not callable(value):
        raise wrong(name, "callable, or None", value)


def check_model(model: object) -> None:
    """Raise UsageError unless an object has the functions of a `SequenceModel`."""
    for method in ("enter", "step", "leave"):
        try:
            function = getattr(model, method, None)
        except Exception:  # noqa: BLE001  (the object's own code)
            function = None
        if not callable(function):
            wanted = "an object with functions `enter`, `step` and `leave`"
            raise wrong("model", wanted, model)


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
        raise closed("batcher")
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
        raise expired(deadline, name)
    return deadline


class WakeTimer:
    """Calls a function at the time for which it was last set."""

    def __init__(self, wake: Callable[[float], None]) -> None:
        self._wake = wake
        self._timer: asyncio.Handle | None = None
        self._at_s = 0.0  # kept here: a fired handle of uvloop does not know its time

    def set(self, at_s: float | None, context: contextvars.Context) -> None:
        """Wake at a time of the running loop; this replaces the time set before.

        Args:
            at_s: when; None: never.
        """
        if self._timer is not None:
            if self._at_s == at_s:
                return
            self._timer.cancel()
            self._timer = None
        if at_s is not None:
            loop = asyncio.get_running_loop()
            self._at_s = at_s
            self._timer = loop.call_at(at_s, self._on_time, at_s, context=context)

    def _on_time(self, at_s: float) -> None:
        self._timer = None
        self._wake(at_s)


T = TypeVar("T")

_WORDS: Final = {
    DropReason.TOO_OLD: "it waited {age_s:.3g} s, longer than max_queue_age_s allows",
    DropReason.EVICTED: "too many requests wait, and another one took its place: of a "
    "higher priority, of a client that has less than its share, or newer",
}


def closed(noun: str, outcome: Outcome = Outcome.NOT_EXECUTED) -> RejectedError:
    """Return the error of a request to a closed batcher or limiter."""
    return RejectedError(f"the {noun} is closed", outcome=outcome)


def admitted(
    queue: ServiceQueue[T], request: QueuedRequest[T], now_s: float
) -> QueuedRequest[T] | None:
    """Let a request wait; return the request that it has displaced."""
    outcome = queue.offer(request, now_s)
    if isinstance(outcome, QueueRefusal):
        raise OverloadedError(
            f"{outcome.problem}; try again in {outcome.retry_after_s:.3g} s",
            retry_after_s=outcome.retry_after_s,
        )
    return outcome


def expired(deadline: Deadline, function: str) -> DeadlineExceededError:
    """Return the error of a request whose deadline passed before it ran."""
    return DeadlineExceededError(
        function=function,
        to="",
        outcome=Outcome.NOT_EXECUTED,
        timeout_s=deadline.allowed_s,
    )


def dropped(
    reason: DropReason,
    *,
    deadline: Deadline | None,
    name: str,
    age_s: float,
    retry_after_s: float,
) -> CallError:
    """Return the error of a request that waited, and will not run."""
    if reason is DropReason.EXPIRED and deadline is not None:
        return expired(deadline, name)
    return OverloadedError(
        f"{_WORDS[reason].format(age_s=age_s)}; try again in {retry_after_s:.3g} s",
        retry_after_s=retry_after_s,
    )
