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
from asyncrpc.tools.inspection.records import Actor, ActorKind, NoAnswer, WorkerSnapshot
from asyncrpc.tools.inspection.summaries import WorkerSummary

ACTORS_MAX: Final = 200  # of tasks, and of threads
FRAMES_MAX: Final = 30
FRAMES_OF_SLICE: Final = 200
EVENTS_MAX: Final = 100
_NS_PER_S: Final = 1e9
_OK: Final = "ok"
_LISTS: Final = ("functions", "tasks", "threads", "links", "events")


class WorkerTold(NamedTuple):
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


def shown(name: str, rank: int, told: WorkerTold) -> Slices[dict[str, Any]]:
    """Return a worker that has answered, in slices."""
    details, row = told.details, row_of(name, rank, told.summary)
    actors = [one for one in told.snapshot.actors if not one.is_internal]
    tasks = [one for one in actors if one.kind is ActorKind.TASK]
    threads = [one for one in actors if one.kind is ActorKind.THREAD]
    tasks.sort(key=lambda one: -one.wait.for_s)
    yield len(actors)
    shown_tasks = yield from _each(_task, tasks[:ACTORS_MAX])
    shown_threads = yield from _each(_thread, threads[:ACTORS_MAX])
    events, events_left_out = yield from _events(told.recent)
    internal = len(told.snapshot.actors) - len(actors)
    return {
        **row,
        "trouble": None,
        "why": None,
        "versions": dict(details.versions),
        "addresses": details.addresses,
        "options": dict(details.options),
        "functions": [
            {
                "function": one.function or None,
                "per_s": known(one.rates.per_s),
                "failed_per_s": known(one.rates.failed_per_s),
                "p50_s": known(one.rates.p50_s),
                "p99_s": known(one.rates.p99_s),
            }
            for one in details.functions
        ],
        "functions_left_out": details.functions_left_out,
        "tasks": shown_tasks,
        "tasks_left_out": len(tasks) - len(shown_tasks) + told.snapshot.left_out,
        "threads": shown_threads,
        "threads_left_out": len(threads) - len(shown_threads),
        "internal_left_out": internal,
        "task_count": told.summary.tasks,
        "links": [_link(one) for one in details.links],
        "links_left_out": details.links_left_out,
        "memory": {one.name: one.nbytes for one in details.memory},
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
    show: Callable[[Actor], dict[str, Any]], actors: Sequence[Actor]
) -> Slices[list[dict[str, Any]]]:
    """Return tasks or threads for the page; a frame takes a few microseconds."""
    found: list[dict[str, Any]] = []
    for some, weight in weighed_parts(actors, _frames_of, FRAMES_OF_SLICE):
        found += map(show, some)
        yield weight
    return found


def _frames_of(one: Actor) -> int:
    return min(FRAMES_MAX, len(one.frames))


def _task(one: Actor) -> dict[str, Any]:
    is_waiting = one.wait.kind is not WaitKind.RUNS
    return {
        "name": named(one).partition(" ")[2].strip("`"),
        "state": "waits" if is_waiting else "runs",
        "age_s": known_age(one.wait.for_s),
        "waits_for": words_of(one.wait),
        "chain": _frames(one),
        "chain_left_out": max(0, len(one.frames) - FRAMES_MAX),
    }


def _thread(one: Actor) -> dict[str, Any]:
    is_waiting = one.wait.kind is not WaitKind.RUNS
    return {
        "name": one.name,
        "state": "waits" if is_waiting else "runs",
        "waits_for": words_of(one.wait),
        "stack": _frames(one),
        "stack_left_out": max(0, len(one.frames) - FRAMES_MAX),
    }


def _frames(one: Actor) -> list[str]:
    """Return the innermost frames of a stack, the outermost first."""
    return [place_of(frame) for frame in one.frames[-FRAMES_MAX:]]


def _link(one: LinkDetails) -> dict[str, Any]:
    return {
        "peer": one.peer,
        "state": "broken" if one.is_broken else "open",
        "transport": one.transport or None,
        "lanes": one.lanes,
        "in_flight": one.in_flight,
        "served": one.calls_served,
        "calls_per_s": known(one.calls_per_s),
        "bytes_per_s": known(one.bytes_per_s),
        "p50_s": known(one.p50_s),
    }


# --- events --------------------------------------------------------------------------


def _events(recent: RecentEvents) -> Slices[tuple[list[dict[str, Any]], int]]:
    """Return the last events of all kinds, the newest first, in slices.

    Returns:
        The events, and how many others there were.
    """
    newest: list[tuple[float, str, Any]] = []
    count = 0
    for name in KIND_NAMES:
        told = getattr(recent, name)
        count += len(told)
        for part in parts_of(told[-EVENTS_MAX:]):
            newest += [(one.at_s, name, one) for one in part]
            yield len(part)
    found = heapq.nlargest(EVENTS_MAX, newest, key=lambda one: one[0])
    yield len(newest)
    wall_s = recent.wall_ns / _NS_PER_S
    said = [
        {
            "at_s": known(wall_s - (recent.now_s - at_s)),
            "kind": _SAYS[kind][0],
            "text": " ".join(_words(kind, one)),
        }
        for at_s, kind, one in found
    ]
    return said, count - len(said)


def _words(kind: str, one: Any) -> Iterator[str]:
    """Yield an event in words."""
    _, say = _SAYS[kind]
    yield say(one)
    outcome = getattr(one, "outcome", _OK)
    if outcome != _OK:
        yield f"({outcome})"


def _made(one: Any) -> str:
    return f"{one.function or '?'} on {one.to.name}"


def _served(one: Any) -> str:
    return f"{one.function or '?'} for {one.caller.name}"


def _pass(one: Any) -> str:
    return f"begun by {one.root}: {'committed' if one.is_committed else 'dropped'}"


def _changed_link(one: Any) -> str:
    reason = f": {one.reason}" if one.reason else ""
    return f"to {one.peer.name} {one.change}{reason}"


# By field of `RecentEvents`: the name of such an event, and its description.
_SAYS: Final[Mapping[str, tuple[str, Callable[[Any], str]]]] = {
    "calls": ("call made", _made),
    "served": ("call served", _served),
    "received": ("stream received", _made),
    "sent": ("stream sent", _served),
    "references": ("reference", lambda one: f"#{one.rref_id.serial:016x} {one.change}"),
    "passes": ("backward pass", _pass),
    "segments": (
        "backward segment",
        lambda one: f"of {one.nodes} nodes, begun by {one.root}",
    ),
    "steps": (
        "optimizer step",
        lambda one: f"{one.optimizer} on {_listed(one.owners)}",
    ),
    "collectives": (
        "collective",
        lambda one: f"{one.operation} {one.number} of {one.group}",
    ),
    "buckets": ("bucket", lambda one: f"{one.bucket}, {one.nbytes} bytes"),
    "links": ("link", _changed_link),
    "membership": ("member", lambda one: f"{one.member.name} {one.change}"),
    "memory": (
        "memory",
        lambda one: f"{one.what} {one.change}, {one.nbytes} bytes",
    ),
}


assert set(_SAYS) == set(KIND_NAMES)  # each kind has a description


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""  # noqa: PLR2004
    return ", ".join(names[:3]) + more
