"""A timeline of a group in the format of Chrome's trace viewer, which Perfetto reads.

Each worker is a process of the timeline.  Its rows are kinds of events: what overlaps
is put on rows of its own, so that each row reads like a calendar.  Arrows go from a
call to the function that it runs, and so from gradient to gradient.

Source: the Trace Event Format, as Perfetto documents it.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple

from asyncrpc.ids import WorkerId
from asyncrpc.inspection.events import RecentEvents
from asyncrpc.trace.events import OK

US_PER_S: Final = 1e6
_NS_PER_S: Final = 1e9
_ROWS_MAX: Final = (
    64  # of one kind of one worker; what overlaps even more shares the last
)


class WorkerEvents(NamedTuple):
    """The events of one worker, and how its clock relates to that of the reader.

    Attributes:
        worker: who.
        recent: its events.
        offset_s: what to add to its clock to get the reader's.
        error_s: by how much that may be wrong.
    """

    worker: WorkerId
    recent: RecentEvents
    offset_s: float
    error_s: float


class TimelineSpan(NamedTuple):
    """Something that took time on a worker.

    Attributes:
        group: of rows, such as "calls".
        name: for people.
        began_s: by the worker's clock.
        ended_s: likewise.
        more: what else is known.
        key: of a call: both ends' lives and its number; None: of no call.
        is_caller: whether it is the caller's end.
    """

    group: str
    name: str
    began_s: float
    ended_s: float
    more: dict[str, Any]
    key: tuple[int, int, int] | None = None
    is_caller: bool = False


def timeline_of(
    workers: Sequence[WorkerEvents], *, zero_s: float
) -> list[dict[str, Any]]:
    """Return the events of a timeline.

    Args:
        workers: whose events they are.
        zero_s: what is 0 on the timeline, by the reader's clock.
    """
    told: list[dict[str, Any]] = []
    spans = {place: list(spans_of(one)) for place, one in enumerate(workers, 1)}
    both = _seen_at_both_ends(spans.values())
    for place, one in enumerate(workers, 1):
        told += _heading(place, one)
        shift_s = one.offset_s - zero_s
        told += _rows(place, spans[place], shift_s, both)
        told += _moments(place, one.recent, shift_s)
    return told


def spans_of(one: WorkerEvents) -> Iterator[TimelineSpan]:
    """Yield what took time on a worker."""
    me, recent = one.worker.incarnation, one.recent
    for call in recent.calls:
        more: dict[str, Any] = {"to": call.to.name, "outcome": call.outcome}
        if call.bytes_sent or call.bytes_received:
            more |= {"sent": call.bytes_sent, "received": call.bytes_received}
        key = (me, call.to.incarnation, call.call_id)
        title = _titled(call.function, call.outcome)
        yield TimelineSpan(
            "calls", title, call.began_s, call.at_s, more, key, is_caller=True
        )
    for served in recent.served:
        more = {"from": served.caller.name, "outcome": served.outcome}
        more["waited_us"] = round((served.began_s - served.came_s) * US_PER_S, 1)
        key = (served.caller.incarnation, me, served.call_id)
        title = _titled(served.function, served.outcome)
        yield TimelineSpan("serves", title, served.began_s, served.at_s, more, key)
    for stream in recent.received:
        more = {"from": stream.to.name, "items": stream.items}
        title = _titled(stream.function, stream.outcome)
        key = (me, stream.to.incarnation, stream.call_id)
        yield TimelineSpan(
            "streams", title, stream.began_s, stream.at_s, more, key, is_caller=True
        )
    for sent in recent.sent:
        more = {"to": sent.caller.name, "items": sent.items}
        title = _titled(sent.function, sent.outcome)
        key = (sent.caller.incarnation, me, sent.call_id)
        yield TimelineSpan("produces", title, sent.came_s, sent.at_s, more, key)
    yield from _training(recent)


def _training(recent: RecentEvents) -> Iterator[TimelineSpan]:
    for one in recent.passes:
        title = "backward pass" if one.is_committed else "backward pass: dropped"
        more: dict[str, Any] = {"context": str(one.context_id), "root": one.root}
        yield TimelineSpan("training", title, one.began_s, one.at_s, more)
    for step in recent.steps:
        title = _titled(f"{step.optimizer} step", step.outcome)
        more = {"owners": ", ".join(step.owners)}
        yield TimelineSpan("training", title, step.began_s, step.at_s, more)
    for collective in recent.collectives:
        title = _titled(collective.operation, collective.outcome)
        more = {
            "group": collective.group,
            "number": collective.number,
            "dtype": collective.dtype,
            "shape": str(collective.shape or ""),
        }
        yield TimelineSpan(
            "collectives", title, collective.began_s, collective.at_s, more
        )
    for bucket in recent.buckets:
        title, more = f"bucket {bucket.bucket}", {"bytes": bucket.nbytes}
        yield TimelineSpan("buckets", title, bucket.began_s, bucket.at_s, more)


def _titled(name: str, outcome: str) -> str:
    shown = name or "?"
    return shown if outcome == OK else f"{shown}: {outcome}"


def _seen_at_both_ends(
    spans: Iterable[Sequence[TimelineSpan]],
) -> set[tuple[int, int, int]]:
    ends: tuple[set[tuple[int, int, int]], ...] = (set(), set())
    for of_worker in spans:
        for span in of_worker:
            if span.key is not None:
                ends[span.is_caller].add(span.key)
    return ends[0] & ends[1]


def _heading(place: int, one: WorkerEvents) -> list[dict[str, Any]]:
    error_us = one.error_s * US_PER_S
    clock = f" (clock to within {error_us:.0f} us)" if one.error_s else ""
    name = f"{one.worker.name}{clock}"
    return [
        {"ph": "M", "pid": place, "name": "process_name", "args": {"name": name}},
        {
            "ph": "M",
            "pid": place,
            "name": "process_sort_index",
            "args": {"sort_index": place},
        },
    ]


def _rows(
    place: int,
    spans: Sequence[TimelineSpan],
    shift_s: float,
    both: set[tuple[int, int, int]],
) -> Iterator[dict[str, Any]]:
    """Yield the spans of a worker, each group on as many rows as overlap."""
    tid = 0
    for group in dict.fromkeys(span.group for span in spans):
        mine = sorted(
            (span for span in spans if span.group == group),
            key=lambda span: (span.began_s, -span.ended_s),
        )
        placed = rows_for([(span.began_s, span.ended_s) for span in mine])
        rows = max(placed) + 1
        for row in range(rows):
            title = group if rows == 1 else f"{group} {row + 1}"
            yield _named_row(place, tid + row + 1, title)
        for span, row in zip(mine, placed, strict=True):
            at = {"pid": place, "tid": tid + row + 1}
            yield from _shown(span, at, shift_s, both)
        tid += rows


def _named_row(place: int, tid: int, title: str) -> dict[str, Any]:
    at = {"pid": place, "tid": tid}
    return {"ph": "M", **at, "name": "thread_name", "args": {"name": title}}


def _shown(
    span: TimelineSpan,
    at: dict[str, int],
    shift_s: float,
    both: set[tuple[int, int, int]],
) -> Iterator[dict[str, Any]]:
    ts = round((span.began_s + shift_s) * US_PER_S, 3)
    dur = round((span.ended_s - span.began_s) * US_PER_S, 3)
    yield {
        "ph": "X",
        **at,
        "ts": ts,
        "dur": dur,
        "name": span.name,
        "cat": span.group,
        "args": span.more,
    }
    if span.key in both:
        arrow = {**at, "ts": ts, "cat": "call", "name": "call", "id": _arrow(span.key)}
        if span.is_caller:
            yield {"ph": "s", **arrow}
        else:
            yield {"ph": "f", "bp": "e", **arrow}


def _arrow(key: tuple[int, int, int] | None) -> str:
    return "" if key is None else f"{key[0]:x}-{key[1]:x}-{key[2]}"


def rows_for(intervals: Sequence[tuple[float, float]]) -> list[int]:
    """Return a row for each interval, on which it overlaps no other.

    As few rows as there can be, the lowest that is free for each.

    Args:
        intervals: begin and end, sorted by the begin.
    """
    ends: list[
        tuple[float, int]
    ] = []  # when the last interval of a row ends, which row
    free: list[int] = []
    rows, used = [], 0
    for began, ended in intervals:
        while ends and ends[0][0] <= began:
            heapq.heappush(free, heapq.heappop(ends)[1])
        if free:
            row = heapq.heappop(free)
        elif used < _ROWS_MAX:
            row, used = used, used + 1
        else:
            row = _ROWS_MAX - 1
            rows.append(row)
            continue
        heapq.heappush(ends, (ended, row))
        rows.append(row)
    return rows


def _moments(
    place: int, recent: RecentEvents, shift_s: float
) -> Iterator[dict[str, Any]]:
    """Yield what has no length: changes of links, members and memory."""
    for link in recent.links:
        more = {"reason": link.reason} if link.reason else {}
        yield _moment(
            place, link.at_s, shift_s, f"link to {link.peer.name} {link.change}", more
        )
    for member in recent.membership:
        title = f"{member.member.name} {member.change}"
        yield _moment(place, member.at_s, shift_s, title, {})
    held: dict[str, int] = {}
    for memory in recent.memory:
        sign = 1 if memory.change == "taken" else -1
        held[memory.what] = held.get(memory.what, 0) + sign * memory.nbytes
        yield {
            "ph": "C",
            "pid": place,
            "ts": round((memory.at_s + shift_s) * US_PER_S, 3),
            "name": f"memory: {memory.what}, MiB",
            "args": {"MiB": round(max(0, held[memory.what]) / (1 << 20), 3)},
        }


def _moment(
    place: int, at_s: float, shift_s: float, title: str, more: dict[str, Any]
) -> dict[str, Any]:
    return {
        "ph": "i",
        "s": "p",
        "pid": place,
        "tid": 0,
        "ts": round((at_s + shift_s) * US_PER_S, 3),
        "name": title,
        "args": more,
    }


def beside_profile(
    events: Sequence[dict[str, Any]], profile: dict[str, Any], *, zero_wall_ns: int
) -> dict[str, Any]:
    """Put a timeline into the trace that torch's profiler has exported.

    Args:
        events: the timeline.
        profile: what `torch.profiler.profile.export_chrome_trace` wrote.
        zero_wall_ns: what is 0 on the timeline, in nanoseconds since 1970.

    Returns:
        The profile, with the timeline's events by the profile's own time.
    """
    base_ns = profile.get("baseTimeNanoseconds", 0)
    shift_us = (zero_wall_ns - base_ns) / _NS_PER_S * US_PER_S
    moved = [
        {**one, "ts": one["ts"] + shift_us} if "ts" in one else one for one in events
    ]
    known = {one.get("pid") for one in profile.get("traceEvents", ())}
    if known & {
        one["pid"] for one in moved
    }:  # a process that is numbered like a worker
        moved = [{**one, "pid": f"asyncrpc {one['pid']}"} for one in moved]
    return {**profile, "traceEvents": [*profile.get("traceEvents", ()), *moved]}
