"""The arrows of a timeline, each between two spans, and what they say about clocks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple, TypeAlias

from asyncrpc.core.ids import MessageId
from asyncrpc.core.trace.events import (
    OK,
    CallEnded,
    CallServed,
    StreamReceived,
    StreamSent,
)
from asyncrpc.tools.inspection.machine.spans import (
    CALLS,
    STREAMS,
    CallKey,
    PassKey,
    SegmentKey,
    TimelineSpan,
    WorkerEvents,
    pass_of,
)

CALL: Final = "call"
GRADIENT: Final = "gradient"

_GradientKey: TypeAlias = tuple[PassKey, MessageId]
_Segments: TypeAlias = dict[_GradientKey, list[tuple[float, SegmentKey]]]


class ArrowEnd(NamedTuple):
    """One end of an arrow.

    Attributes:
        name: what it stands for: `CALL` or `GRADIENT`.
    """

    number: int
    name: str
    is_start: bool


class Arrows:
    """The arrows between the spans of all workers, each with both of its ends.

    Attributes:
        calls_alone: calls and streams of which only one end is known.
        backwards_s: by how much, by the clocks, a call was served before it was made,
            or answered before it was served; the clocks differ by at least as much.
    """

    def __init__(self, workers: Sequence[WorkerEvents]) -> None:
        calls = _calls_made(workers)
        self.backwards_s = 0.0
        self._calls: dict[CallKey, int] = {}
        served = 0
        for key, came_s, ended_s in _served(workers):
            served += 1
            call = calls.get(key)
            if call is not None:
                self._calls[key] = len(self._calls) + 1
                # For a call that was given up, the caller's end tells nothing.
                early_s = call.began_s - came_s
                late_s = ended_s - call.ended_s if call.is_answered else 0.0
                self.backwards_s = max(self.backwards_s, early_s, late_s)
        self.calls_alone = len(calls) + served - 2 * len(self._calls)
        self._starts: dict[SegmentKey, list[int]] = defaultdict(list)
        self._ends: dict[SegmentKey, list[int]] = defaultdict(list)
        first = len(self._calls) + 1
        self._count = len(self._calls)
        for number, (start, end) in enumerate(_gradients(workers), first):
            self._starts[start].append(number)
            self._ends[end].append(number)
            self._count += 1

    def __len__(self) -> int:
        """How many there are."""
        return self._count

    def at(self, span: TimelineSpan) -> Iterator[ArrowEnd]:
        """Yield the arrow ends at a span."""
        if span.key is not None and span.key in self._calls:
            is_start = span.group in (CALLS, STREAMS)
            yield ArrowEnd(self._calls[span.key], CALL, is_start)
        if span.segment is not None:
            for number in self._ends.get(span.segment, ()):
                yield ArrowEnd(number, GRADIENT, is_start=False)
            for number in self._starts.get(span.segment, ()):
                yield ArrowEnd(number, GRADIENT, is_start=True)


class _MadeCall(NamedTuple):
    """When a call was made and ended, by the reader's clock."""

    began_s: float
    ended_s: float
    is_answered: bool


def _calls_made(workers: Sequence[WorkerEvents]) -> dict[CallKey, _MadeCall]:
    """Return the calls and streams that were made."""
    by_key: dict[CallKey, _MadeCall] = {}
    for events in workers:
        me, shift_s = events.worker.incarnation, events.offset_s
        calls: list[CallEnded | StreamReceived] = [*events.recent.calls]
        calls += events.recent.received
        for call in calls:
            if call.call_id:  # otherwise it was never sent
                key = (me, call.to.incarnation, call.call_id)
                began_s, ended_s = call.began_s + shift_s, call.at_s + shift_s
                by_key[key] = _MadeCall(began_s, ended_s, call.outcome == OK)
    return by_key


def _served(
    workers: Sequence[WorkerEvents],
) -> Iterator[tuple[CallKey, float, float]]:
    """Yield served calls, when they arrived, and when they ended."""
    for events in workers:
        me, shift_s = events.worker.incarnation, events.offset_s
        served: list[CallServed | StreamSent] = [*events.recent.served]
        served += events.recent.sent
        for call in served:
            key = (call.caller.incarnation, me, call.call_id)
            yield key, call.came_s + shift_s, call.at_s + shift_s


def _gradients(
    workers: Sequence[WorkerEvents],
) -> Iterator[tuple[SegmentKey, SegmentKey]]:
    """Yield pairs of segments: the second takes a gradient that the first computed."""
    leave, enter = _by_gradient(workers)
    pairs: dict[tuple[SegmentKey, SegmentKey], None] = {}
    for key in enter.keys() & leave.keys():
        sources, takers = sorted(leave[key]), sorted(enter[key])
        # The gradients of one message's tensors may come from several segments.
        for began_s, taker in takers:
            before = [segment for ended_s, segment in sources if ended_s <= began_s]
            pairs[before[-1] if before else sources[0][1], taker] = None
    yield from sorted(pairs)


def _by_gradient(workers: Sequence[WorkerEvents]) -> tuple[_Segments, _Segments]:
    """Return the segments that gradients leave and enter, and when."""
    leave: _Segments = defaultdict(list)
    enter: _Segments = defaultdict(list)
    for events in workers:
        me, shift_s = events.worker.incarnation, events.offset_s
        for place, run in enumerate(events.recent.segments):
            for message in run.feeds:
                leave[pass_of(run), message].append((run.at_s + shift_s, (me, place)))
            for message in run.fed_by:
                enter[pass_of(run), message].append(
                    (run.began_s + shift_s, (me, place))
                )
    return leave, enter
