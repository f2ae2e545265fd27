"""Which span of a worker lies on which track of a timeline.

The spans of a task lie on its own track: a span within another is drawn below it.  A
task whose calls overlap has more than one track.  Spans without a task, or of a task
with a single span, share tracks by their kind: most served calls do, since each of them
has its own task.

On a track two spans either do not overlap, or one contains the other, as the format of
Chrome's viewer requires.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple, TypeAlias

from asyncrpc.tools.inspection.machine import spans as s
from asyncrpc.tools.inspection.machine.spans import TimelineSpan

OWN_MAX: Final = 64  # tasks of a worker that have their own tracks
# Work for other workers: usually each has its own task.
_FOR_OTHERS: Final = (s.SERVED, s.PRODUCED)
_ORDER: Final = (
    *(s.STEPS, s.CALLS, s.STREAMS, s.COLLECTIVES, s.BUCKETS),
    *(s.SERVED, s.PRODUCED, s.PASSES, s.SEGMENTS),
)
# The services of asyncrpc that send messages for a step or a pass.
_SENDERS: Final = {"optim": s.STEPS, "autograd": s.PASSES}
_TITLES: Final = {s.CALLS: "calls of short tasks", s.SEGMENTS: "backward passes"}
# A span, or spans of a task that lie within one, on as many lanes as overlap.
_Unit: TypeAlias = list[list[TimelineSpan]]
_BY_ASYNCIO: Final = re.compile(r"Task-\d+")


class Track(NamedTuple):
    """One row of a timeline.

    Attributes:
        spans: in the order of their beginnings, outer spans before inner ones.
    """

    title: str
    spans: list[TimelineSpan]


def tracks_of(spans: Iterable[TimelineSpan], running: Mapping[str, str]) -> list[Track]:
    """Return the tracks of a worker, in the order in which they are shown.

    Args:
        running: what its tasks run, by their names; without tasks that have ended.
    """
    by_task: dict[str, list[TimelineSpan]] = defaultdict(list)
    for span in adopted(list(spans), running):
        by_task[span.task].append(span)
    alone = by_task.pop("", [])
    lanes = {task: nested(mine) for task, mine in by_task.items()}
    own = _own_tasks(lanes, running)
    tracks: list[Track] = []
    for task in own:
        title = _title_of(task, running.get(task, ""))
        tracks += _numbered(title, lanes.pop(task))
    units = [[[span]] for span in alone]
    for of_task in lanes.values():
        units += _units(of_task)
    return tracks + list(_shared(units))


def adopted(
    spans: Sequence[TimelineSpan], running: Mapping[str, str]
) -> Iterator[TimelineSpan]:
    """Yield spans, with the messages of a step or pass moved to the task of the step.

    Unnamed tasks of asyncrpc send these messages.  A message belongs to the only step
    or pass around it; if there are several, it belongs to none.
    """
    holders = {group: _Holders(spans, group) for group in _SENDERS.values()}
    for span in spans:
        sender = _SENDERS.get(span.name.partition(".")[0])
        is_nobodys = not span.task or (
            _BY_ASYNCIO.fullmatch(span.task) and span.task not in running
        )
        task = ""
        if span.group == s.CALLS and sender is not None and is_nobodys:
            task = holders[sender].task_around(span)
        yield span._replace(task=task) if task else span


class _Holders:
    """The spans of a kind, each of which may hold others."""

    def __init__(self, spans: Iterable[TimelineSpan], group: str) -> None:
        self._spans = sorted(
            (span for span in spans if span.group == group), key=_by_begin
        )
        self._begins = [span.began_ns for span in self._spans]
        ends = (span.ended_ns for span in self._spans)
        self._ends = list(itertools.accumulate(ends, max))  # latest end up to each span

    def task_around(self, span: TimelineSpan) -> str:
        """Return the task of the holder around a span, if no other overlaps it."""
        at = bisect.bisect_right(self._begins, span.began_ns) - 1
        if at < 0 or span.ended_ns > self._spans[at].ended_ns:
            return ""
        begins_before_end = bisect.bisect_left(self._begins, span.ended_ns)
        overlaps_earlier = at > 0 and self._ends[at - 1] > span.began_ns
        if overlaps_earlier or begins_before_end > at + 1:
            return ""
        return self._spans[at].task


def nested(spans: Iterable[TimelineSpan]) -> list[list[TimelineSpan]]:
    """Return spans as lanes; on each lane they are disjoint or nested."""
    lanes: list[list[TimelineSpan]] = []
    open_spans: list[list[TimelineSpan]] = []  # of each lane, the innermost last
    # A lane that ends with a leaf takes no span before the leaf ends.
    busy: list[tuple[int, int]] = []  # when the leaf ends, which lane
    free: list[int] = []  # the other lanes, in order
    for span in sorted(spans, key=_by_begin):
        while busy and busy[0][0] <= span.began_ns:
            bisect.insort(free, heapq.heappop(busy)[1])
        for lane in free:
            inside = open_spans[lane]
            while inside and inside[-1].ended_ns <= span.began_ns:
                inside.pop()
            if not inside or span.ended_ns <= inside[-1].ended_ns:
                break
        else:
            lane = len(lanes)
            lanes.append([])
            open_spans.append([])
            free.append(lane)
        lanes[lane].append(span)
        open_spans[lane].append(span)
        if span.is_leaf:
            free.remove(lane)
            heapq.heappush(busy, (span.ended_ns, lane))
    return lanes


def _by_begin(span: TimelineSpan) -> tuple[int, int]:
    return span.began_ns, -span.ended_ns


def _own_tasks(
    lanes: Mapping[str, Sequence[Sequence[TimelineSpan]]], running: Mapping[str, str]
) -> list[str]:
    """Return the tasks that get their own tracks, by their beginnings."""
    tasks = [
        task
        for task, of_task in lanes.items()
        if of_task[0][0].group not in _FOR_OTHERS
        and (task in running or len(_apart(of_task[0])) > 1)
    ]
    tasks.sort(key=lambda task: -sum(map(len, lanes[task])))

    def by_title(task: str) -> tuple[bool, int]:
        is_named = _BY_ASYNCIO.fullmatch(task) is None  # named by the program
        return not is_named, lanes[task][0][0].began_ns

    return sorted(tasks[:OWN_MAX], key=by_title)


def _title_of(task: str, coroutine: str) -> str:
    if not coroutine:
        return task
    shown = coroutine.rpartition("<locals>.")[2]
    return f"{shown} ({task})" if _BY_ASYNCIO.fullmatch(task) else f"{task}: {shown}"


def _numbered(title: str, lanes: Sequence[list[TimelineSpan]]) -> Iterator[Track]:
    for number, lane in enumerate(lane for lane in lanes if lane):
        yield Track(f"{title} +{number}" if number else title, lane)


def _apart(lane: Sequence[TimelineSpan]) -> list[list[TimelineSpan]]:
    """Return the disjoint parts of a lane: each outer span with those it contains."""
    parts: list[list[TimelineSpan]] = []
    for span in lane:
        if parts and span.began_ns < parts[-1][0].ended_ns:
            parts[-1].append(span)
        else:
            parts.append([span])
    return parts


def _units(lanes: Sequence[Sequence[TimelineSpan]]) -> list[_Unit]:
    """Return the lanes of a task in parts that may lie on different tracks.

    Parts of further lanes within a span of the first lane stay with that span.
    """
    units: list[_Unit] = [[part] for part in _apart(lanes[0])]
    others: list[_Unit] = []
    begins = [unit[0][0].began_ns for unit in units]
    for number, lane in enumerate(lanes[1:], 1):
        for part in _apart(lane):
            at = bisect.bisect_right(begins, part[0].began_ns) - 1
            if at >= 0 and part[0].ended_ns <= units[at][0][0].ended_ns:
                unit = units[at]
                unit += [[] for _ in range(number + 1 - len(unit))]
                unit[number] += part
            else:
                others.append([part])
    return units + others


def _shared(units: Iterable[_Unit]) -> Iterator[Track]:
    """Yield tracks that tasks share, each for one kind of span."""
    by_group: dict[str, list[_Unit]] = defaultdict(list)
    for unit in units:
        by_group[unit[0][0].group].append(unit)
    for group in sorted(by_group, key=_ORDER.index):
        of_group = sorted(by_group[group], key=lambda unit: _by_begin(unit[0][0]))
        rows = rows_for(
            [(unit[0][0].began_ns, unit[0][0].ended_ns) for unit in of_group]
        )
        tracks: list[list[list[TimelineSpan]]] = [[] for _ in range(max(rows) + 1)]
        for unit, row in zip(of_group, rows, strict=True):
            lanes = tracks[row]
            lanes += [[] for _ in range(len(unit) - len(lanes))]
            for lane, part in zip(lanes, unit, strict=False):
                lane.extend(part)
        for number, lanes in enumerate(tracks, 1):
            title = _TITLES.get(group, group)
            if len(tracks) > 1:
                title += f" #{number}"
            yield from _numbered(title, lanes)


def rows_for(intervals: Sequence[tuple[int, int]]) -> list[int]:
    """Return a row for each interval, so that no two overlap on a row.

    There are as few rows as possible; each interval gets the lowest free one.
    """
    ends: list[tuple[int, int]] = []  # when the last interval of a row ends, which row
    free: list[int] = []
    rows, used = [], 0
    for began, ended in intervals:
        while ends and ends[0][0] <= began:
            heapq.heappush(free, heapq.heappop(ends)[1])
        if free:
            row = heapq.heappop(free)
        else:
            row, used = used, used + 1
        heapq.heappush(ends, (ended, row))
        rows.append(row)
    return rows
