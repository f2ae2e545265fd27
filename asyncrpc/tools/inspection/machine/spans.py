"""The spans of a timeline: what took time on a worker, by its events."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, NamedTuple, TypeAlias

from asyncrpc.core.ids import ContextId, WorkerId
from asyncrpc.core.trace.events import (
    OK,
    BackwardPassEnded,
    BackwardSegmentEnded,
    CallEnded,
    StreamReceived,
    call_label,
)
from asyncrpc.tools.inspection.events import RecentEvents

NS_PER_S: Final = 1_000_000_000
NS_PER_US: Final = 1000

CallKey: TypeAlias = tuple[int, int, int]  # incarnations of both ends, call_id
PassKey: TypeAlias = tuple[ContextId, int, str]  # context, number at its root, root
SegmentKey: TypeAlias = tuple[int, int]

CALLS: Final = "calls"
SERVED: Final = "served calls"
STREAMS: Final = "streams"
PRODUCED: Final = "produced streams"
PASSES: Final = "backward passes"
STEPS: Final = "optimizer steps"
COLLECTIVES: Final = "collectives"
BUCKETS: Final = "buckets"
SEGMENTS: Final = "backward segments"


class WorkerEvents(NamedTuple):
    """The events of one worker, and how its clock relates to that of the reader.

    Attributes:
        offset_s: what to add to its clock to get the reader's.
        error_s: by how much the offset may be wrong.
        rank: of the worker; -1 if it has none.
    """

    worker: WorkerId
    recent: RecentEvents
    offset_s: float
    error_s: float
    rank: int = -1


class TimelineSpan(NamedTuple):
    """Something that took time on a worker.

    Attributes:
        group: its kind: `CALLS` or another.
        task: label of the task, thread or served call that it belongs to; empty: none.
        key: of a call: the key that both ends know; otherwise None.
        segment: of a backward segment: its worker's incarnation and its index among
            the segments there; otherwise None.
    """

    group: str
    name: str
    began_ns: int
    ended_ns: int
    task: str
    more: dict[str, Any]
    key: CallKey | None = None
    segment: SegmentKey | None = None

    @property
    def is_leaf(self) -> bool:
        """Return whether its task only waited, so that no span lies within it."""
        return self.group in (CALLS, BUCKETS)


def pass_of(event: BackwardPassEnded | BackwardSegmentEnded) -> PassKey:
    """Return the key of an event's backward pass."""
    return event.context_id, event.pass_number, event.root


class SpanReader:
    """Reads the spans of one worker."""

    def __init__(self, worker: WorkerEvents, *, zero_s: float) -> None:
        self.worker = worker
        self._shift_s = worker.offset_s - zero_s
        self._pass_tasks = {
            pass_of(backward_pass): backward_pass.task
            for backward_pass in worker.recent.passes
        }

    def time_ns(self, at_s: float) -> int:
        """Return a time of the worker's clock as a time on the timeline."""
        return round((at_s + self._shift_s) * NS_PER_S)

    def spans(self) -> Iterator[TimelineSpan]:
        """Yield the spans."""
        yield from self._outgoing()
        yield from self._served()
        yield from self._training()
        yield from self._reductions()

    def _outgoing(self) -> Iterator[TimelineSpan]:
        for call in self.worker.recent.calls:
            more: dict[str, Any] = {"to": call.to.name, "outcome": call.outcome}
            if call.bytes_sent or call.bytes_received:
                more |= {
                    "sent, bytes": call.bytes_sent,
                    "received, bytes": call.bytes_received,
                }
            yield self._at_caller(CALLS, call, more)
        for stream in self.worker.recent.received:
            more = {
                "from": stream.to.name,
                "items": stream.items,
                "outcome": stream.outcome,
            }
            yield self._at_caller(STREAMS, stream, more)

    def _at_caller(
        self, group: str, call: CallEnded | StreamReceived, more: dict[str, Any]
    ) -> TimelineSpan:
        me = self.worker.worker.incarnation
        key = (me, call.to.incarnation, call.call_id) if call.call_id else None
        title = f"{call.function or '?'} on {call.to.name}"
        return self._span(
            *(group, _titled(title, call.outcome), call.began_s, call.at_s),
            *(call.task, more, key),
        )

    def _served(self) -> Iterator[TimelineSpan]:
        me, recent = self.worker.worker.incarnation, self.worker.recent
        for served in recent.served:
            waited_s = served.began_s - served.came_s
            more: dict[str, Any] = {
                "from": served.caller.name,
                "outcome": served.outcome,
                "waited for a thread, us": round(waited_s * 1e6, 1),
            }
            key = (served.caller.incarnation, me, served.call_id)
            title = _titled(served.function, served.outcome)
            label = call_label(served.call_id, served.caller.name)
            yield self._span(
                SERVED, title, served.began_s, served.at_s, label, more, key
            )
        for sent in recent.sent:
            more = {
                "to": sent.caller.name,
                "items": sent.items,
                "outcome": sent.outcome,
            }
            key = (sent.caller.incarnation, me, sent.call_id)
            title = _titled(sent.function, sent.outcome)
            label = call_label(sent.call_id, sent.caller.name)
            yield self._span(PRODUCED, title, sent.came_s, sent.at_s, label, more, key)

    def _training(self) -> Iterator[TimelineSpan]:
        recent = self.worker.recent
        for backward_pass in recent.passes:
            title = (
                "backward pass"
                if backward_pass.is_committed
                else "backward pass: dropped"
            )
            more: dict[str, Any] = {
                "context": str(backward_pass.context_id),
                "number": backward_pass.pass_number,
                "root": backward_pass.root,
            }
            label = backward_pass.task or _pass_label(pass_of(backward_pass))
            yield self._span(
                PASSES, title, backward_pass.began_s, backward_pass.at_s, label, more
            )
        me = self.worker.worker.incarnation
        for place, run in enumerate(recent.segments):
            key = pass_of(run)
            more = {"root": run.root, "number": run.pass_number, "nodes": run.nodes}
            if run.left_out:
                more["messages without arrows"] = run.left_out
            span = self._span(
                *(SEGMENTS, _titled("backward", run.outcome), run.began_s, run.at_s),
                *(self._pass_tasks.get(key) or _pass_label(key), more),
            )
            yield span._replace(segment=(me, place))
        for step in recent.steps:
            title = _titled(f"{step.optimizer} step", step.outcome)
            more = {"owners": ", ".join(step.owners), "outcome": step.outcome}
            yield self._span(STEPS, title, step.began_s, step.at_s, step.task, more)

    def _reductions(self) -> Iterator[TimelineSpan]:
        for collective in self.worker.recent.collectives:
            more: dict[str, Any] = {
                "group": collective.group,
                "number": collective.number,
                "rank": collective.rank,
                "dtype": collective.dtype,
                "shape": str(collective.shape or ""),
                "outcome": collective.outcome,
            }
            title = _titled(collective.operation, collective.outcome)
            yield self._span(
                COLLECTIVES,
                title,
                collective.began_s,
                collective.at_s,
                collective.task,
                more,
            )
        for bucket in self.worker.recent.buckets:
            title, more = f"bucket {bucket.bucket}", {"bytes": bucket.nbytes}
            yield self._span(
                BUCKETS, title, bucket.began_s, bucket.at_s, bucket.task, more
            )

    def _span(  # noqa: PLR0917
        self,
        group: str,
        title: str,
        began_s: float,
        ended_s: float,
        task: str,
        more: dict[str, Any],
        key: CallKey | None = None,
    ) -> TimelineSpan:
        began_ns = self.time_ns(began_s)
        ended_ns = max(began_ns, self.time_ns(ended_s))
        return TimelineSpan(group, title, began_ns, ended_ns, task, more, key)


def _titled(name: str, outcome: str) -> str:
    shown = name or "?"
    return shown if outcome == OK else f"{shown}: {outcome}"


def _pass_label(key: PassKey) -> str:
    context_id, number, root = key
    return f"pass {number} of {root} in {context_id}"
