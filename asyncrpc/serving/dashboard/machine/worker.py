"""One worker: its identity, functions, tasks, threads, links and last events."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from asyncrpc.core.loop.waits import WaitKind
from asyncrpc.serving.dashboard.machine.answers import known, known_age
from asyncrpc.serving.dashboard.machine.overview import row_of, silent_row
from asyncrpc.tools.inspection.details import LinkDetails, WorkerDetails
from asyncrpc.tools.inspection.events import KIND_NAMES, RecentEvents
from asyncrpc.tools.inspection.machine.slices import Slices, parts_of, weighed_parts
from asyncrpc.tools.inspection.machine.wording import named, place_of, words_of
from asyncrpc.tools.inspection.records import (
    ActorKind,
    NoAnswer,
    ObservedActor,
    WorkerSnapshot,
)
from asyncrpc.tools.inspection.summaries import WorkerSummary

ACTORS_MAX: Final = 200  # of tasks, and of threads
FRAMES_MAX: Final = 30
FRAMES_OF_SLICE: Final = 200
EVENTS_MAX: Final = 100
_NS_PER_S: Final = 1e9
_OK: Final = "ok"
_LISTS: Final = ("functions", "tasks", "threads", "links", "events")


class WorkerAnswer(NamedTuple):
    """The answers of one worker.

    Attributes:
        details: its options, functions and links.
        snapshot: its tasks, threads and calls.
        recent: its last events.
    """

    summary: WorkerSummary
    details: WorkerDetails
    snapshot: WorkerSnapshot
    recent: RecentEvents


def shown(name: str, rank: int, answer: WorkerAnswer) -> Slices[dict[str, Any]]:
    """Return a worker that has answered, in slices."""
    details, row = answer.details, row_of(name, rank, answer.summary)
    actors = [actor for actor in answer.snapshot.actors if not actor.is_internal]
    tasks = [actor for actor in actors if actor.kind is ActorKind.TASK]
    threads = [actor for actor in actors if actor.kind is ActorKind.THREAD]
    tasks.sort(key=lambda task: -task.wait.for_s)
    yield len(actors)
    shown_tasks = yield from _each(_task, tasks[:ACTORS_MAX])
    shown_threads = yield from _each(_thread, threads[:ACTORS_MAX])
    events, events_left_out = yield from _events(answer.recent)
    internal = len(answer.snapshot.actors) - len(actors)
    return {
        **row,
        "trouble": None,
        "why": None,
        "versions": dict(details.versions),
        "addresses": details.addresses,
        "options": dict(details.options),
        "functions": [
            {
                "function": function.function or None,
                "per_s": known(function.rates.per_s),
                "failed_per_s": known(function.rates.failed_per_s),
                "p50_s": known(function.rates.p50_s),
                "p99_s": known(function.rates.p99_s),
            }
            for function in details.functions
        ],
        "functions_left_out": details.functions_left_out,
        "tasks": shown_tasks,
        "tasks_left_out": len(tasks) - len(shown_tasks) + answer.snapshot.left_out,
        "threads": shown_threads,
        "threads_left_out": len(threads) - len(shown_threads),
        "internal_left_out": internal,
        "task_count": answer.summary.tasks,
        "links": [_link(link) for link in details.links],
        "links_left_out": details.links_left_out,
        "memory": {entry.name: entry.nbytes for entry in details.memory},
        "events": events,
        "events_left_out": events_left_out,
    }


def shown_silent(name: str, rank: int, silent: NoAnswer) -> dict[str, Any]:
    """Return a worker that has not answered."""
    return {
        **silent_row(name, rank, silent),
        "trouble": silent.trouble.name.lower(),
        "why": silent.text,
        "versions": {},
        "addresses": [],
        "options": {},
        "memory": {},
        "task_count": None,
        "internal_left_out": 0,
        **{name: [] for name in _LISTS},
        **{f"{name}_left_out": 0 for name in _LISTS},
    }


def _each(
    show: Callable[[ObservedActor], dict[str, Any]], actors: Sequence[ObservedActor]
) -> Slices[list[dict[str, Any]]]:
    """Return tasks or threads for the page; a frame takes a few microseconds."""
    rows: list[dict[str, Any]] = []
    for some, weight in weighed_parts(actors, _frames_of, FRAMES_OF_SLICE):
        rows += map(show, some)
        yield weight
    return rows


def _frames_of(actor: ObservedActor) -> int:
    return min(FRAMES_MAX, len(actor.frames))


def _task(actor: ObservedActor) -> dict[str, Any]:
    is_waiting = actor.wait.kind is not WaitKind.RUNS
    return {
        "name": named(actor).partition(" ")[2].strip("`"),
        "state": "waits" if is_waiting else "runs",
        "age_s": known_age(actor.wait.for_s),
        "waits_for": words_of(actor.wait),
        "chain": _frames(actor),
        "chain_left_out": max(0, len(actor.frames) - FRAMES_MAX),
    }


def _thread(actor: ObservedActor) -> dict[str, Any]:
    is_waiting = actor.wait.kind is not WaitKind.RUNS
    return {
        "name": actor.name,
        "state": "waits" if is_waiting else "runs",
        "waits_for": words_of(actor.wait),
        "stack": _frames(actor),
        "stack_left_out": max(0, len(actor.frames) - FRAMES_MAX),
    }


def _frames(actor: ObservedActor) -> list[str]:
    """Return the innermost frames of a stack, the outermost first."""
    return [place_of(frame) for frame in actor.frames[-FRAMES_MAX:]]


def _link(link: LinkDetails) -> dict[str, Any]:
    return {
        "peer": link.peer,
        "state": "broken" if link.is_broken else "open",
        "transport": link.transport or None,
        "lanes": link.lanes,
        "in_flight": link.in_flight,
        "served": link.calls_served,
        "calls_per_s": known(link.calls_per_s),
        "bytes_per_s": known(link.bytes_per_s),
        "p50_s": known(link.p50_s),
    }


# --- events --------------------------------------------------------------------------


def _events(recent: RecentEvents) -> Slices[tuple[list[dict[str, Any]], int]]:
    """Return the last events of all kinds, the newest first, in slices."""
    newest: list[tuple[float, str, Any]] = []
    count = 0
    for name in KIND_NAMES:
        events = getattr(recent, name)
        count += len(events)
        for part in parts_of(events[-EVENTS_MAX:]):
            newest += [(event.at_s, name, event) for event in part]
            yield len(part)
    latest = heapq.nlargest(EVENTS_MAX, newest, key=lambda entry: entry[0])
    yield len(newest)
    wall_s = recent.wall_ns / _NS_PER_S
    rows = [
        {
            "at_s": known(wall_s - (recent.now_s - at_s)),
            "kind": _SAYS[kind][0],
            "text": " ".join(_words(kind, event)),
        }
        for at_s, kind, event in latest
    ]
    return rows, count - len(rows)


def _words(kind: str, event: Any) -> Iterator[str]:
    """Yield an event in words."""
    _, say = _SAYS[kind]
    yield say(event)
    outcome = getattr(event, "outcome", _OK)
    if outcome != _OK:
        yield f"({outcome})"


def _outgoing(event: Any) -> str:
    return f"{event.function or '?'} on {event.to.name}"


def _served(event: Any) -> str:
    return f"{event.function or '?'} for {event.caller.name}"


def _pass(event: Any) -> str:
    return f"begun by {event.root}: {'committed' if event.is_committed else 'dropped'}"


def _changed_link(event: Any) -> str:
    reason = f": {event.reason}" if event.reason else ""
    return f"to {event.peer.name} {event.change}{reason}"


# By field of `RecentEvents`: the name of such an event, and its description.
_SAYS: Final[Mapping[str, tuple[str, Callable[[Any], str]]]] = {
    "calls": ("call made", _outgoing),
    "served": ("call served", _served),
    "received": ("stream received", _outgoing),
    "sent": ("stream sent", _served),
    "references": (
        "reference",
        lambda event: f"#{event.rref_id.serial:016x} {event.change}",
    ),
    "passes": ("backward pass", _pass),
    "segments": (
        "backward segment",
        lambda event: f"of {event.nodes} nodes, begun by {event.root}",
    ),
    "steps": (
        "optimizer step",
        lambda event: f"{event.optimizer} on {_listed(event.owners)}",
    ),
    "collectives": (
        "collective",
        lambda event: f"{event.operation} {event.number} of {event.group}",
    ),
    "buckets": ("bucket", lambda event: f"{event.bucket}, {event.nbytes} bytes"),
    "links": ("link", _changed_link),
    "membership": ("member", lambda event: f"{event.member.name} {event.change}"),
    "memory": (
        "memory",
        lambda event: f"{event.what} {event.change}, {event.nbytes} bytes",
    ),
}


assert set(_SAYS) == set(KIND_NAMES)  # each kind has a description


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""  # noqa: PLR2004
    return ", ".join(names[:3]) + more
