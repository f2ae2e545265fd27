"""The figures of queues of requests, at one moment."""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from asyncrpc.core.calls.context import current_worker_var
from asyncrpc.extend import host_of
from asyncrpc.serving.batching.machine.overload import ServiceQueue


@dataclass(frozen=True, slots=True)
class QueueStats:
    """A queue of requests, and how its requests have ended.

    Every request is counted in one of `waiting`, `running`, `answered`, `failed`,
    `left`, `refused`, `expired`, `shed` or `evicted`.

    Attributes:
        waiting: requests that wait.
        oldest_s: seconds that the oldest of these has waited.
        running: requests that run.
        turns: batches, sequences or blocks that have ended.
        turn_s: mean seconds that a turn took recently.
        turn_requests: mean number of requests in a turn recently.
        capacity_per_s: requests per second that these allow; 0: not known yet.
        answered: requests that were answered.
        failed: requests that got an error of the program.
        left: requests whose callers went away.
        refused: requests that were not let in, as too many were waiting.
        expired: requests whose deadlines passed while they waited.
        shed: requests that waited too long.
        evicted: requests that were displaced by others in a full queue.
    """

    waiting: int
    oldest_s: float
    running: int
    turns: int
    turn_s: float
    turn_requests: float
    capacity_per_s: float
    answered: int
    failed: int
    left: int
    refused: int
    expired: int
    shed: int
    evicted: int


@dataclass(frozen=True, slots=True)
class GenerationStats:
    """A batcher of sequences, and how its requests have ended.

    Attributes:
        requests: waiting, running and ended ones; a turn is a whole sequence.
        paused: sequences whose consumers are behind.
        memory_held: the most that all sequences inside take.
        steps: number of steps made.
        step_s: mean seconds of a step recently.
        items: number of items generated.
        items_per_s: items per second while the model works, by the last steps.
    """

    requests: QueueStats
    paused: int
    memory_held: int
    steps: int
    step_s: float
    items: int
    items_per_s: float


@dataclass(slots=True)
class EndCounts:
    """How the requests that were let in have ended.

    Attributes:
        failed: they got an error of the program.
        left: their callers went away.
    """

    answered: int = 0
    failed: int = 0
    left: int = 0


def stats_of(
    queue: ServiceQueue[Any], ends: EndCounts, running: int, now_s: float
) -> QueueStats:
    """Return the figures of a queue now."""
    rate, counts = queue.rate, queue.counts
    return QueueStats(
        waiting=len(queue.waiting),
        oldest_s=queue.age_s(now_s),
        running=running,
        turns=rate.ended,
        turn_s=rate.turn_s,
        turn_requests=rate.requests if rate.ended else 0.0,
        capacity_per_s=rate.per_s(),
        answered=ends.answered,
        failed=ends.failed,
        left=ends.left,
        refused=counts.refused,
        expired=counts.expired,
        shed=counts.shed,
        evicted=counts.evicted,
    )


def figures_of(stats: QueueStats | GenerationStats) -> Mapping[str, float]:
    """Return the figures of a queue as metrics take them: flat, by name."""
    figures: dict[str, float] = asdict(stats)
    requests: Any = figures.pop("requests", {})
    return {**requests, **figures}


def show(
    name: str, read: Callable[[], Mapping[str, float]], context: contextvars.Context
) -> Callable[[], None]:
    """Show the figures of a queue among the metrics of the current worker.

    Args:
        name: of the queue; a number is appended if another queue has it.
        read: returns the figures; called from any thread.
        context: in which the worker is current; unless it runs, nothing is shown.
    """
    worker = context.get(current_worker_var)
    if worker is None or worker.is_closed:
        return _nothing
    queues = host_of(worker).queues
    number, own = 1, name
    while own in queues:
        number += 1
        own = f"{name}-{number}"
    queues[own] = read
    return lambda: _hide(queues, own)


def _hide(queues: dict[str, Any], name: str) -> None:
    queues.pop(name, None)


def _nothing() -> None:
    """Do nothing: no figures are shown."""
