"""Readings of a worker at one moment: open links, kept memory and the like.

They are taken when the metrics are read, in any thread, and without the event loop,
which may be blocked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Final, NamedTuple, TypeVar

from asyncrpc.core.lifecycle import WorkerState
from asyncrpc.core.parts import Parts
from asyncrpc.tools.observability import definitions as d
from asyncrpc.tools.observability.definitions import MetricDefinition

_LIVE: Final = frozenset({WorkerState.RUNNING, WorkerState.DRAINING})
_TRIES: Final = 10

T = TypeVar("T")


class MetricReading(NamedTuple):
    """A figure at one moment.

    Attributes:
        figure: in the unit of the metric.
    """

    metric: MetricDefinition
    values: tuple[str, ...]
    figure: float


def readings_of(parts: Parts) -> Iterator[MetricReading]:
    """Yield the readings of a worker; 0 for parts that it has no longer, or not yet.

    Thread safety: from any thread.
    """
    identity = parts.identity
    number = f"{identity.incarnation:016x}"
    named = (identity.name, str(identity.rank), str(identity.world_size), number)
    yield MetricReading(d.WORKER, named, 1)
    yield MetricReading(d.RUNNING, (), float(parts.lifecycle.is_running))
    yield MetricReading(d.REFUSED, (), parts.admission.refused)
    is_live = parts.lifecycle.state in _LIVE
    for metric, values, read in _OF_LIVE:
        yield MetricReading(metric, values, _steady(read, parts) if is_live else 0)
    yield from _of_queues(parts)
    for name, metric in d.COUNTERS.items():
        yield MetricReading(metric, (), getattr(parts.counters, name))


def _of_queues(parts: Parts) -> Iterator[MetricReading]:
    for queue in tuple(parts.queues):
        figures = _steady(partial(_figures, queue), parts)
        for name, figure in figures.items():
            if name in d.QUEUE_OUTCOMES:
                yield MetricReading(d.QUEUE_ENDED, (queue, name), figure)
            else:
                yield MetricReading(d.QUEUES[name], (queue,), figure)


def _figures(queue: str, parts: Parts) -> Mapping[str, float]:
    read = parts.queues.get(queue)  # it may have ended meanwhile
    return {} if read is None else read()


def _pending(parts: Parts) -> int:
    return sum(len(link.pending) for link in parts.directory.links)


def _references(parts: Parts) -> int:
    return 0 if parts.references is None else parts.references.values_held


def _links_in(parts: Parts, *, broken: bool) -> int:
    links = parts.directory.links
    return sum(link.connection.is_broken is broken for link in links)


_OF_LIVE: Final[
    tuple[tuple[MetricDefinition, tuple[str, ...], Callable[[Parts], float]], ...]
] = (
    (d.CLIENT_IN_FLIGHT, (), _pending),
    (d.SERVER_IN_FLIGHT, (), lambda parts: parts.active),
    (d.REFERENCES, (), _references),
    (d.LINKS, ("open",), lambda parts: _links_in(parts, broken=False)),
    (d.LINKS, ("broken",), lambda parts: _links_in(parts, broken=True)),
    (d.MEMBERS, (), lambda parts: len(parts.membership.known)),
    (d.SHARED_MEMORY, ("own",), lambda parts: parts.memory.own_bytes),
    (d.SHARED_MEMORY, ("peers",), lambda parts: parts.memory.borrowed_bytes),
    (d.RECEIVE_POOL, (), lambda parts: parts.receive_pool.kept_bytes),
    (d.CREDIT_LIMIT, (), lambda parts: parts.inbound_credit.budget.limit_bytes),
    (d.CREDIT_HELD, (), lambda parts: parts.inbound_credit.budget.held_bytes),
    (d.CREDIT_WAITING, (), lambda parts: parts.inbound_credit.budget.waiting),
)


def _steady(read: Callable[[Parts], T], parts: Parts) -> T:
    """Read something that the loop may change; try again if it did, which is rare."""
    for _ in range(_TRIES):
        try:
            return read(parts)
        except RuntimeError:  # a dictionary or deque changed during the iteration
            continue
    return read(parts)
