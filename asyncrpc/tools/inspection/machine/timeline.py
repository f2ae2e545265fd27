"""A timeline of a group in the format of Chrome's trace viewer, which Perfetto reads.

Each worker is a process of the timeline, each of its tasks a track; see `tracks`.
Arrows go from a call to the function that it runs, and from the backward segment that
computed a gradient to the one that takes it.  Omitted arrows are counted.

Times are whole nanoseconds until they are written: otherwise rounding could make the
end of a span overlap the beginning of the next.

Source: the Trace Event Format, as Perfetto documents it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from asyncrpc.core.trace.ring import RECENT_MAX
from asyncrpc.tools.inspection.events import KIND_NAMES
from asyncrpc.tools.inspection.machine.arrows import ArrowEnd, Arrows
from asyncrpc.tools.inspection.machine.spans import (
    NS_PER_US,
    SpanReader,
    TimelineSpan,
    WorkerEvents,
)
from asyncrpc.tools.inspection.machine.tracks import Track, tracks_of

US_PER_S: Final = 1e6
_MIB: Final = 1 << 20


class Timeline:
    """The events of a timeline, made on demand.

    Attributes:
        spans: how many were made so far.
        arrows: how many there are, each with both of its ends.
        calls_alone: calls of which only one end is known: they have no arrow.
        full: names of the workers whose older events were pushed out.
        error_s: by how much the clock of a worker may be wrong.
        backwards_s: by how much, by the clocks, a call ran before it was made or after
            it was answered: the clocks differ by at least as much.
    """

    def __init__(
        self,
        workers: Sequence[WorkerEvents],
        *,
        zero_s: float,
        first: int = 1,
        shift_ns: int = 0,
    ) -> None:
        """Prepare.

        Args:
            first: number of the first process and track; the lower numbers are taken
                in the same file.
        """
        self._workers = workers
        self._zero_s = zero_s - shift_ns / 1e9
        self._first = first
        self._tid = first + len(workers) - 1
        self._arrows = Arrows(workers)
        self.spans = 0
        self.arrows = len(self._arrows)
        self.calls_alone = self._arrows.calls_alone
        self.full = [events.worker.name for events in workers if _is_full(events)]
        self.error_s = max((events.error_s for events in workers), default=0.0)
        self.backwards_s = self._arrows.backwards_s

    def events(self) -> Iterator[dict[str, Any]]:
        """Yield the events."""
        for place, events in enumerate(self._workers):
            yield from self._of_worker(self._first + place, events)

    def _of_worker(self, pid: int, events: WorkerEvents) -> Iterator[dict[str, Any]]:
        yield from _heading(pid, events)
        reader = SpanReader(events, zero_s=self._zero_s)
        running = {task.name: task.coroutine for task in events.recent.tasks}
        for row, track in enumerate(tracks_of(reader.spans(), running)):
            self._tid += 1
            yield from self._of_track(pid, self._tid, row, track)
        yield from _moments(pid, reader)

    def _of_track(
        self, pid: int, tid: int, row: int, track: Track
    ) -> Iterator[dict[str, Any]]:
        at = {"pid": pid, "tid": tid}
        yield {"ph": "M", **at, "name": "thread_name", "args": {"name": track.title}}
        order = {"sort_index": row}
        yield {"ph": "M", **at, "name": "thread_sort_index", "args": order}
        for span in track.spans:
            self.spans += 1
            yield _shown(span, at)
            for arrow in self._arrows.at(span):
                yield _arrow_end(arrow, span, at)


def _shown(span: TimelineSpan, at: Mapping[str, int]) -> dict[str, Any]:
    task = {"task": span.task} if span.task else {}
    return {
        "ph": "X",
        **at,
        "ts": span.began_ns / NS_PER_US,
        "dur": (span.ended_ns - span.began_ns) / NS_PER_US,
        "name": span.name,
        "cat": span.group,
        "args": {**span.more, **task},
    }


def _arrow_end(
    arrow: ArrowEnd, span: TimelineSpan, at: Mapping[str, int]
) -> dict[str, Any]:
    """Return one end of an arrow; viewers attach it to the span open at its time."""
    at_ns = span.began_ns
    if arrow.is_start and span.segment is not None:  # a gradient leaves at the end
        at_ns = max(span.began_ns, span.ended_ns - 1)
    common = {
        **at,
        "ts": at_ns / NS_PER_US,
        "cat": arrow.name,
        "name": arrow.name,
        "id": arrow.number,
    }
    return {"ph": "s", **common} if arrow.is_start else {"ph": "f", "bp": "e", **common}


def _is_full(events: WorkerEvents) -> bool:
    return any(len(getattr(events.recent, kind)) >= RECENT_MAX for kind in KIND_NAMES)


def _heading(pid: int, events: WorkerEvents) -> Iterator[dict[str, Any]]:
    error_us = events.error_s * US_PER_S
    clock = f" (clock to within {error_us:.0f} us)" if events.error_s else ""
    rank = f"rank {events.rank}: " if events.rank >= 0 else ""
    named = {"name": f"{rank}{events.worker.name}{clock}"}
    yield {"ph": "M", "pid": pid, "name": "process_name", "args": named}
    order = {"sort_index": pid}
    yield {"ph": "M", "pid": pid, "name": "process_sort_index", "args": order}


def _moments(pid: int, reader: SpanReader) -> Iterator[dict[str, Any]]:
    """Yield events without a length: changes of links, members and memory."""
    recent = reader.worker.recent
    for link in recent.links:
        more = {"reason": link.reason} if link.reason else {}
        title = f"link to {link.peer.name} {link.change}"
        yield _moment(pid, reader.time_ns(link.at_s), title, more)
    for member in recent.membership:
        title = f"{member.member.name} {member.change}"
        yield _moment(pid, reader.time_ns(member.at_s), title, {})
    held: dict[str, int] = {}
    for memory in recent.memory:
        sign = 1 if memory.change == "taken" else -1
        held[memory.what] = held.get(memory.what, 0) + sign * memory.nbytes
        yield {
            "ph": "C",
            "pid": pid,
            "ts": reader.time_ns(memory.at_s) / NS_PER_US,
            "name": f"memory: {memory.what}, MiB",
            "args": {"MiB": round(max(0, held[memory.what]) / _MIB, 3)},
        }


def _moment(
    pid: int, at_ns: int, title: str, more: Mapping[str, Any]
) -> dict[str, Any]:
    return {
        "ph": "i",
        "s": "p",
        "pid": pid,
        "tid": 0,
        "ts": at_ns / NS_PER_US,
        "name": title,
        "args": more,
    }
