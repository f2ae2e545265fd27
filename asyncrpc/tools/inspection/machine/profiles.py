"""Prepares the trace of torch's profiler to be shown with a timeline.

The profiler shows calls as ranges of the thread that made them, where the calls of
several tasks overlap.  A viewer drops overlapping ranges of a track: so the calls get
tracks of their own.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, TypeAlias

from asyncrpc.tools.inspection.machine.spans import CALLS, NS_PER_US, TimelineSpan
from asyncrpc.tools.inspection.machine.tracks import nested

_NUMBERS: Final = ("pid", "tid")
# As `runtime.calls.profiling` names them.
_CALL: Final = re.compile(r"rpc_(async|remote|run)#")

_Event: TypeAlias = Mapping[str, Any]


def first_free_number(events: Iterable[_Event]) -> int:
    """Return a number above those of all processes and threads."""
    used = (event.get(field) for event in events for field in _NUMBERS)
    return 1 + max((number for number in used if type(number) is int), default=0)


def shift_to_profile(profile: Mapping[str, Any], *, zero_wall_ns: int) -> int:
    """Return what to add to the times of a timeline to get those of a profile."""
    return zero_wall_ns - int(profile.get("baseTimeNanoseconds", 0))


def calls_apart(events: Sequence[_Event]) -> list[_Event]:
    """Return the events of a profile, with overlapping calls on tracks of their own."""
    by_thread: dict[tuple[Any, Any], list[_Event]] = defaultdict(list)
    for event in events:
        if event.get("ph") == "X" and "ts" in event:
            by_thread[event.get("pid"), event.get("tid")].append(event)
    number = first_free_number(events)
    moved: dict[int, _Event] = {}
    titles: list[_Event] = []
    for (pid, tid), thread_events in by_thread.items():
        calls = [event for event in thread_events if _is_call(event)]
        if not calls or _is_nested(thread_events):
            continue
        for row, lane in enumerate(nested(map(_span_of, calls)), 1):
            track = {"pid": pid, "tid": number}
            named = {"name": f"calls of thread {tid} #{row}"}
            titles.append({"ph": "M", **track, "name": "thread_name", "args": named})
            for span in lane:
                event = span.more["event"]
                moved[id(event)] = {**event, **track}
            number += 1
    return [*(moved.get(id(event), event) for event in events), *titles]


def _is_call(event: _Event) -> bool:
    name = event.get("name")
    return isinstance(name, str) and _CALL.match(name) is not None


def _span_of(event: _Event) -> TimelineSpan:
    began_ns = round(event["ts"] * NS_PER_US)
    ended_ns = began_ns + round(event.get("dur", 0) * NS_PER_US)
    return TimelineSpan(CALLS, "", began_ns, ended_ns, "", {"event": event})


def _is_nested(events: Iterable[_Event]) -> bool:
    """Return whether no two events overlap unless one contains the other."""
    within: list[int] = []  # the ends of the open spans, the innermost last
    spans = [(span.began_ns, -span.ended_ns) for span in map(_span_of, events)]
    for began_ns, minus_end_ns in sorted(spans):
        while within and within[-1] <= began_ns:
            within.pop()
        if within and -minus_end_ns > within[-1]:
            return False
        within.append(-minus_end_ns)
    return True
