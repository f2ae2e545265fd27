"""Events for tests of timelines, and what is found in one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any, Final

from asyncrpc.core.ids import ContextId, Incarnation, MessageId, WorkerId
from asyncrpc.core.trace.events import (
    BackwardPassEnded,
    BackwardSegmentEnded,
    CallEnded,
    CallServed,
)
from asyncrpc.tools.inspection.events import KIND_NAMES, NamedTask, RecentEvents
from asyncrpc.tools.inspection.machine.spans import WorkerEvents
from asyncrpc.tools.inspection.machine.timeline import Timeline

A: Final = WorkerId("a", Incarnation(1))
B: Final = WorkerId("b", Incarnation(2))
CONTEXT: Final = ContextId(A.incarnation, 1)

Told = list[dict[str, Any]]


def recent(*tasks: NamedTask, **events: list[Any]) -> RecentEvents:
    events_by_kind = {name: events.get(name, []) for name in KIND_NAMES}
    return RecentEvents(100.0, 0, list(tasks), **events_by_kind)


def worker(
    who: WorkerId, *tasks: NamedTask, offset_s: float = 0.0, **events: list[Any]
) -> WorkerEvents:
    return WorkerEvents(who, recent(*tasks, **events), offset_s, 0.0)


def call(
    began_s: float,
    ended_s: float,
    call_id: int = 1,
    *,
    to: WorkerId = B,
    task: str = "",
) -> CallEnded:
    return CallEnded(ended_s, began_s, to, "add", call_id, "ok", 8, 4, task)


def served(
    came_s: float, ended_s: float, call_id: int = 1, caller: WorkerId = A
) -> CallServed:
    return CallServed(ended_s, came_s, came_s, caller, "add", call_id, "ok")


def passed(
    began_s: float, ended_s: float, task: str = "", *, is_committed: bool = True
) -> BackwardPassEnded:
    return BackwardPassEnded(ended_s, began_s, CONTEXT, "a", is_committed, 5, task)


def segment(
    began_s: float,
    ended_s: float,
    *,
    fed_by: Iterable[MessageId] = (),
    feeds: Iterable[MessageId] = (),
) -> BackwardSegmentEnded:
    messages = tuple(fed_by), tuple(feeds)
    return BackwardSegmentEnded(
        *(ended_s, began_s, CONTEXT, "a", 5, 3), *messages, 0, "ok"
    )


def events_of(*workers: WorkerEvents, zero_s: float = 0.0) -> Told:
    return list(Timeline(workers, zero_s=zero_s).events())


def of_phase(events: Told, phase: str) -> Told:
    return [event for event in events if event["ph"] == phase]


def tracks(events: Told) -> dict[str, list[str]]:
    """Return the names of the spans of each track, by the track's title."""
    titles = {
        event["tid"]: event["args"]["name"]
        for event in events
        if event["name"] == "thread_name"
    }
    names: dict[str, list[str]] = {title: [] for title in titles.values()}
    for span in of_phase(events, "X"):
        names[titles[span["tid"]]].append(span["name"])
    return names


def check(events: Told) -> None:
    """Check what the format demands: spans nest, arrows have both ends in spans."""
    by_track: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for event in of_phase(events, "X"):
        began, long = round(event["ts"] * 1000), round(event["dur"] * 1000)
        by_track[event["pid"], event["tid"]].append((began, began + long))
    for spans in by_track.values():
        within: list[tuple[int, int]] = []
        assert spans == sorted(spans, key=lambda span: (span[0], -span[1]))
        for span in spans:
            while within and within[-1][1] <= span[0]:
                within.pop()
            assert not within or span[1] <= within[-1][1]
            within.append(span)
    starts = {arrow["id"]: arrow for arrow in of_phase(events, "s")}
    ends = {arrow["id"]: arrow for arrow in of_phase(events, "f")}
    assert len(starts) == len(of_phase(events, "s"))
    assert len(ends) == len(of_phase(events, "f"))
    assert starts.keys() == ends.keys()
    for event in (*starts.values(), *ends.values()):
        at = round(event["ts"] * 1000)
        spans = by_track[event["pid"], event["tid"]]
        assert any(began <= at <= ended for began, ended in spans)
