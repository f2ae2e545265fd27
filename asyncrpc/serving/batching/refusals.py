"""The errors of requests that did not run."""

from __future__ import annotations

from typing import Final, TypeVar

from asyncrpc.errors import (
    CallError,
    DeadlineExceededError,
    Outcome,
    OverloadedError,
    RejectedError,
)
from asyncrpc.extend import Deadline
from asyncrpc.serving.batching.machine.fair_queue import QueuedRequest
from asyncrpc.serving.batching.machine.overload import (
    DropReason,
    QueueRefusal,
    ServiceQueue,
)

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
