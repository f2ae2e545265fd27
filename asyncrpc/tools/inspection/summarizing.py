"""Makes the summary of a worker: on its loop, and in a fraction of a millisecond.

It reads only the events of the last seconds, the newest first, and at most `EVENTS_MAX`
of each kind.
"""

from __future__ import annotations

import heapq
import os
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Final, Protocol

from asyncrpc.core.identity import WorkerIdentity
from asyncrpc.core.loop.clock import wall_ns
from asyncrpc.core.trace.events import CallEnded
from asyncrpc.core.trace.recorder import FlightRecorder
from asyncrpc.tools.inspection.events import KIND_NAMES, RecentEvents, is_own
from asyncrpc.tools.inspection.machine.rates import percentile, rates_of
from asyncrpc.tools.inspection.summaries import (
    LINKS_MAX,
    UNKNOWN_BYTES,
    LinkSummary,
    WorkerSummary,
)

WINDOW_S: Final = 5.0  # the time over which rates are computed
EVENTS_MAX: Final = 500  # of each kind
TRAINING_KINDS: Final = ("passes", "steps", "collectives")
_KINDS: Final = ("calls", "served", *TRAINING_KINDS)
_STATM: Final = "/proc/self/statm"
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")


class SharedBytes(Protocol):
    """The memory that a worker shares with peers."""

    @property
    def own_bytes(self) -> int:
        """Return the bytes of its slabs."""


class SummarizedWorker(Protocol):
    """The parts of a worker that a summary is made of.

    Attributes:
        recorder: has its last events.
    """

    recorder: FlightRecorder

    @property
    def identity(self) -> WorkerIdentity:
        """Who the worker is."""

    @property
    def is_draining(self) -> bool:
        """Return whether its shutdown has begun."""

    @property
    def active(self) -> int:
        """How many calls it serves."""

    @property
    def references(self) -> Any:
        """Its references; None if it can have none."""

    @property
    def memory(self) -> SharedBytes:
        """Return the memory that it shares."""

    @property
    def directory(self) -> Any:
        """Return the links of the worker."""


def summary_of(
    worker: SummarizedWorker, *, running_s: float, lag_s: float, tasks: int
) -> WorkerSummary:
    """Return the summary of a worker; called on its loop."""
    recent = newest_events(worker.recorder)
    links = worker.directory.links
    summaries = [summary for _, summary in link_summaries(links, recent, LINKS_MAX)]
    references = worker.references
    return WorkerSummary(
        os.getpid(),
        os.uname().nodename,
        running_s,
        worker.is_draining,
        rates_of(recent, window_s=WINDOW_S, remembered_max=EVENTS_MAX),
        median_s(recent.passes),
        median_s(recent.steps),
        lag_s,
        resident_bytes(),
        worker.memory.own_bytes,
        0 if references is None else references.values_held,
        tasks,
        sum(len(link.pending) for link in links),
        worker.active,
        summaries,
        max(0, len(links) - len(summaries)),
    )


def resident_bytes() -> int:
    """Return the memory of this process, in bytes; `UNKNOWN_BYTES`."""
    try:
        descriptor = os.open(_STATM, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:  # not Linux
        return UNKNOWN_BYTES
    try:
        return int(os.read(descriptor, 256).split()[1]) * _PAGE_BYTES
    finally:
        os.close(descriptor)


def newest_events(
    recorder: FlightRecorder, kinds: Sequence[str] = _KINDS
) -> RecentEvents:
    """Return the events of the last seconds that rates are made of."""
    now_s = recorder.now_s()
    events = {
        name: getattr(recorder, name).newest(now_s - WINDOW_S, EVENTS_MAX)
        if name in kinds
        else []
        for name in KIND_NAMES
    }
    return RecentEvents(now_s, wall_ns(), [], **events)


def median_s(events: Sequence[Any]) -> float:
    """Return the median duration of some events; nan if there are none."""
    return percentile(sorted(event.at_s - event.began_s for event in events), 0.5)


def link_summaries(
    links: Sequence[Any], recent: RecentEvents, at_most: int
) -> list[tuple[Any, LinkSummary]]:
    """Return the busiest links: those with most calls, ended or not."""
    ended = defaultdict[str, list[CallEnded]](list)
    for call in recent.calls:
        if not is_own(call):
            ended[call.to.name].append(call)

    def work(link: Any) -> tuple[bool, int]:
        is_broken: bool = link.connection.is_broken
        return is_broken, len(link.pending) + len(ended.get(link.peer.name, ()))

    over_s = WINDOW_S
    if len(recent.calls) == EVENTS_MAX:  # older ones were not read
        over_s = max(recent.now_s - recent.calls[0].at_s, 1e-9)
    return [
        (link, _link(link, ended.get(link.peer.name, ()), over_s))
        for link in heapq.nlargest(at_most, links, key=work)
    ]


def _link(link: Any, ended: Sequence[CallEnded], over_s: float) -> LinkSummary:
    nbytes = sum(call.bytes_sent + call.bytes_received for call in ended)
    return LinkSummary(
        link.peer.name,
        link.connection.is_broken,
        len(link.pending),
        len(ended) / over_s,
        nbytes / over_s,
        median_s(ended),
    )
