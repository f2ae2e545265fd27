"""Why a future is still pending: the cause that will end it, or that there is none.

A wait that never ends is a defect, but from outside it may look like any other wait.
So for each wait the cause that will end it is looked up, at both ends of a call if both
are in this process.

Live causes are:

- an open worker, for the tasks that it has started itself: they end with it;
- for a call: a deadline; or that it is still connecting, or being packed, by a task of
  an open worker; or that its link is alive and knows it, and the callee is serving it.
  A callee in another process cannot be inspected: then the link is enough.  It is also
  enough while the request waits for credit, or the connection is being resumed: both
  end with the link;
- for a stream: the same;
- for the value of a reference: its owner is open;
- for a task that waits in code of asyncrpc for others (at a barrier, a rendezvous, in a
  collective, for a turn, for a connection): the worker for which it waits is open;
- for a task that awaits a call: the cause of that call.

A closed worker is never a cause.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any, TypeAlias

from asyncrpc import CallFuture
from asyncrpc.core.calls.streams import StreamReceiver
from asyncrpc.core.links.link import Link
from asyncrpc.core.loop.forking import known_workers
from asyncrpc.core.rref.values import Value
from asyncrpc.core.worker import Worker
from asyncrpc.testing.frames import SuspendedLine

AnyFuture: TypeAlias = "asyncio.Future[Any]"


def problem_of(future: AnyFuture, places: list[SuspendedLine]) -> str:
    """Return why nothing will end a pending future; empty: it has a cause to end."""
    if isinstance(future, CallFuture):
        return _problem_of_call(future)
    if isinstance(future, Value):
        return "" if _owner_of(future) else "its owner is closed, or has forgotten it"
    if any(_has_started(worker, future) for worker in _open_workers()):
        return ""
    return _problem_of_wait(getattr(future, "_fut_waiter", None), places)


def _problem_of_wait(awaited: object, places: list[SuspendedLine]) -> str:
    """Return why nothing will end the wait of a task; empty: it has a cause to end."""
    if isinstance(awaited, CallFuture | Value):
        return problem_of(awaited, [])
    for place in places:
        if isinstance(place.owner, StreamReceiver):
            return _problem_of_stream(place.owner)
    worker = worker_of(places)
    if worker is None:
        return "nothing that asyncrpc knows of will end it"
    return "" if _is_open(worker) else f"worker {worker.name!r} is closed"


def worker_of(places: list[SuspendedLine]) -> Worker | None:
    """Return the worker for which code of asyncrpc waits; None if it is not known."""
    for place in places:
        worker = _worker_in(place.owner)
        if worker is not None:
            return worker
    return None


def _worker_in(owner: object) -> Worker | None:
    """Return the worker that an object of asyncrpc is, or belongs to.

    A part does not know its worker, but it has parts of the worker, or belongs to an
    object that has.
    """
    near = [owner, *_held_by(owner)]
    near += [held for part in near[1:] for held in _held_by(part)]
    for worker in known_workers():
        if isinstance(worker, Worker):
            own = {id(part) for part in _belongings(worker)}
            if any(id(part) in own for part in near):
                return worker
    return None


def _belongings(worker: Worker) -> Iterator[object]:
    """Yield objects that belong to one worker and no other."""
    parts = worker.parts
    yield from (worker, parts, parts.identity, parts.lifecycle, parts.calls)
    yield parts.loop_guard
    yield from parts.services
    for name in ("tasks", "directory", "devices", "pool"):
        if (part := getattr(parts, name, None)) is not None:
            yield part


def _held_by(owner: object) -> list[object]:
    slots = [name for kind in type(owner).__mro__ for name in _slots_of(kind)]
    names = [*getattr(owner, "__dict__", ()), *slots]
    return [getattr(owner, name, None) for name in names]


def _slots_of(kind: type) -> tuple[str, ...]:
    slots = kind.__dict__.get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _open_workers() -> Iterator[Worker]:
    return (
        worker
        for worker in known_workers()
        if isinstance(worker, Worker) and _is_open(worker)
    )


def _is_open(worker: Worker) -> bool:
    return not worker.is_closed


def _has_started(worker: Worker, task: AnyFuture) -> bool:
    return task in worker.parts.tasks


def _problem_of_call(call: CallFuture[Any]) -> str:
    if call.watch is not None:
        return ""
    if call.begun is not None and not call.begun.done():
        is_owned = any(_has_started(worker, call.begun) for worker in _open_workers())
        return "" if is_owned else "the worker that was to begin it is closed"
    if not isinstance(call.link, Link):
        return "it was never sent"
    return _problem_at(call.link, call)


def _problem_of_stream(stream: StreamReceiver) -> str:
    if stream.is_whole:
        return "all of it is here, and nobody was told"
    return _problem_at(stream.link, stream) if isinstance(stream.link, Link) else ""


def worker_of_link(link: object) -> Worker | None:
    """Return the worker that one end of a link belongs to."""
    host = link.host if isinstance(link, Link) else None
    workers = (worker for worker in known_workers() if isinstance(worker, Worker))
    return next((worker for worker in workers if worker.parts is host), None)


def _problem_at(link: Link, call: CallFuture[Any] | StreamReceiver) -> str:
    """Return why no answer to a call that has been sent will come; empty: it may."""
    if link.is_lost:
        return f"its link is lost: {link.lost_because}"
    maker = worker_of_link(link)
    if maker is not None and not _is_open(maker):
        return f"worker {maker.name!r}, which made it, is closed"
    if link.pending.get(call.call_id) is not call:
        return "its link does not know it any more"
    if call.call_id in link.credit.waiting or link.connection.is_broken:
        return ""
    return _problem_at_callee(link, call.call_id)


def _problem_at_callee(link: Link, call_id: int) -> str:
    callee = next(
        (
            worker
            for worker in known_workers()
            if _is_life(worker, link.peer.incarnation)
        ),
        None,
    )
    if not isinstance(callee, Worker):  # it is in another process
        return ""
    if not _is_open(callee):
        return f"worker {callee.name!r}, which was called, is closed"
    if any(_serves(other, link, call_id) for other in callee.parts.directory.links):
        return ""
    return f"worker {callee.name!r} does not have it in hand"


def _is_life(worker: object, incarnation: int) -> bool:
    return isinstance(worker, Worker) and worker.incarnation == incarnation


def _serves(theirs: Link, ours: Link, call_id: int) -> bool:
    maker = worker_of_link(ours)
    is_back = maker is not None and theirs.peer.incarnation == maker.incarnation
    return is_back and theirs is not ours and theirs.served.get(call_id) is not None


def _owner_of(value: Value) -> Worker | None:
    return next((worker for worker in _open_workers() if _owns(worker, value)), None)


def _owns(worker: Worker, value: Value) -> bool:
    references: Any = worker.parts.references  # None, or an `RRefService`
    return references is not None and references.values.has(value)
