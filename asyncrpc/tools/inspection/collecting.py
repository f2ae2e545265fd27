"""Takes a `WorkerSnapshot`: tasks, threads and calls of a worker, and their waits.

It may be taken in any thread, and does not need the event loop to run.  What it reads
changes meanwhile only where the interpreter switches threads: a snapshot may show a
call that has just ended, but does no harm.

The garbage collector is held while frames of others are read.  Before Python 3.12 the
collector may run inside of any allocation, even that of the frame object for
`sys._current_frames`, `f_back` or `cr_frame`.  Finalizers may then let other threads
run; the frame ends meanwhile, and its object refers to memory that is in use for
something else.  A process that was looked at every second crashed in this way after
some minutes, with a segmentation fault in `PyFrame_GetBack`.

Several workers may share a loop, and so its tasks and threads.  Each snapshot has them
all, since one may wait for another; but each belongs to one worker, which tells of it.
The other workers tell it as internal.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import Context
from itertools import islice
from typing import Any, Final

from asyncrpc.core import torch_modes
from asyncrpc.core.calls.context import current_worker_var
from asyncrpc.core.calls.futures import CallFuture
from asyncrpc.core.calls.streams import StreamReceiver
from asyncrpc.core.loop.forking import known_workers
from asyncrpc.core.loop.threads import OWN_THREAD
from asyncrpc.core.parts import Parts
from asyncrpc.extend import WaitKind
from asyncrpc.tools.inspection.ages import WaitAges
from asyncrpc.tools.inspection.loop_tasks import BY_REFERENCE, tasks_of
from asyncrpc.tools.inspection.recognition import is_of_library, labels_of, work_of
from asyncrpc.tools.inspection.records import (
    NO_ACTOR,
    UNKNOWN_S,
    ActorKind,
    CallKey,
    ObservedActor,
    OutgoingCall,
    ServedCall,
    Wait,
    WorkerSnapshot,
)
from asyncrpc.tools.inspection.threads import ThreadStack, frame_of, source_of, stacks


class Neighbours:
    """The other workers of one worker's loop that it knows, and that tell of theirs."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        incarnation: int,
        incarnation_of: Callable[[str], int | None],
    ) -> None:
        parts = [getattr(worker, "parts", None) for worker in known_workers()]
        running = [
            other
            for other in parts
            if other is not None and not other.is_closed and other.loop is loop
        ]
        self._own = incarnation
        self._others = [
            other
            for other in running
            if other.identity.incarnation != incarnation
            and other.identity.incarnation == incarnation_of(other.identity.name)
        ]
        # What belongs to no worker, the first one tells.
        self._is_first = all(
            incarnation < other.identity.incarnation for other in self._others
        )

    def caller_of(self, call: Any) -> int | None:
        """Return the incarnation of the neighbour that has made a call."""
        for other in self._others:
            for link in other.directory.links:
                if link.pending.get(call.call_id) is call:
                    incarnation: int = other.identity.incarnation
                    return incarnation
        return None

    def have(self, task: asyncio.Task[Any]) -> bool:
        """Return whether a task is another worker's to tell."""
        if not self._others:
            return False
        context = _context_of(task)
        worker = None if context is None else context.get(current_worker_var)
        if worker is None:
            return not self._is_first
        incarnation: int = worker.incarnation
        if incarnation == self._own:
            return False
        is_here = any(
            incarnation == other.identity.incarnation for other in self._others
        )
        return is_here or not self._is_first

    def have_thread(self, name: str) -> bool:
        """Return whether a thread is another worker's to tell."""
        if any(name.startswith(f"asyncrpc-{other.name}-") for other in self._others):
            return True
        return not self._is_first and not name.startswith("asyncrpc-")


def _context_of(task: asyncio.Task[Any]) -> Context | None:
    if hasattr(task, "get_context"):  # from Python 3.12 on
        context: Context = task.get_context()
        return context
    referents = gc.get_referents(task)
    return next(
        (referent for referent in referents if isinstance(referent, Context)), None
    )


RUNS_ANYWHERE: Final = sys.version_info < (3, 12)
_lock: Final = threading.Lock()
_looking: Final[list[bool]] = []  # one for each look: whether it was on before


@contextmanager
def held_back() -> Iterator[None]:
    """Disable the collector until the block ends, and then restore it.

    Thread safety: from any thread; blocks of several threads may overlap.
    """
    if not RUNS_ANYWHERE:
        yield
        return
    with _lock:
        _looking.append(gc.isenabled() if not _looking else _looking[0])
        gc.disable()
    try:
        yield
    finally:
        with _lock:
            if _looking.pop() and not _looking:
                gc.enable()


ACTORS_MAX: Final = 2000
CALLS_MAX: Final = 2000  # in each direction
# Begins the names of tasks that asyncrpc starts outside of a worker's own tasks.
OWN_PREFIX: Final = "asyncrpc "
SUBJECTS_MAX: Final = 64  # the longest waited for, whose referrers are looked at


class SnapshotTaker:
    """Takes one snapshot of one worker."""

    def __init__(
        self,
        worker: Parts,
        ages: WaitAges,
        *,
        is_thorough: bool,
        blocked_for_s: float,
    ) -> None:
        """Look at a worker.

        Args:
            blocked_for_s: seconds since its loop last ran; 0 if it runs.
        """
        self._worker = worker
        self._ages = ages
        self._identity = worker.identity
        self._blocked_for_s = blocked_for_s
        self._now_s = worker.recorder.now_s()
        self._look = tasks_of(worker.loop, ages, is_thorough=is_thorough)
        self._tasks, self._places = self._look.tasks, self._look.places
        self._threads = stacks()
        self._links = worker.directory.links
        self._neighbours = Neighbours(
            worker.loop,
            self._identity.incarnation,
            worker.directory.known_incarnation,
        )
        self._by_ident = {
            stack.ident: len(self._tasks) + index
            for index, stack in enumerate(self._threads)
        }
        # By the id of an object that is worked for, such as a call: who does.
        self._working: defaultdict[int, list[int]] = defaultdict(list)
        self._serving: dict[int, int] = {}  # id of an inbound call: place of its actor

    def take(self) -> WorkerSnapshot:
        """Return the snapshot."""
        identity = self._identity
        self._find_serving()
        outgoing, served = self._outgoing(), self._served()
        actors = [self._actor_of_task(place) for place in range(len(self._tasks))]
        actors += [self._actor_of_thread(stack) for stack in self._threads]
        return WorkerSnapshot(
            identity.name,
            identity.rank,
            identity.incarnation,
            identity.hello().pid,
            identity.hello().host_id,
            self._blocked_for_s,
            self._loop_actor(),
            tuple(actors),
            tuple(outgoing[:CALLS_MAX]),
            tuple(served[:CALLS_MAX]),
            self._look.left_out
            + sum(max(0, len(calls) - CALLS_MAX) for calls in (outgoing, served)),
        )

    def _loop_actor(self) -> int:
        for index, stack in enumerate(self._threads):
            if stack.ident == self._worker.tasks.thread_id:
                return len(self._tasks) + index
        return NO_ACTOR

    # --- calls -----------------------------------------------------------------------

    def _find_serving(self) -> None:
        for link in self._links:
            for inbound in link.served:
                if inbound.task is not None:
                    place = self._places.get(id(inbound.task), NO_ACTOR)
                    self._serving[id(inbound)] = place
        for place, seen in enumerate(self._tasks):
            for subject in work_of(seen.chain.steps):
                self._working[id(subject)].append(place)
        for stack in self._threads:
            place = self._by_ident[stack.ident]
            for subject in stack.works_for():
                self._working[id(subject)].append(place)
                self._serving[id(subject)] = place

    def _outgoing(self) -> list[OutgoingCall]:
        return [
            OutgoingCall(
                self._key_of(call), call.to, call.function, self._age(call.began_s)
            )
            for link in self._links
            for call in link.pending
        ]

    def _served(self) -> list[ServedCall]:
        own = self._identity.incarnation
        return [
            ServedCall(
                CallKey(link.peer.incarnation, own, inbound.call_id),
                link.peer.name,
                inbound.function_name,
                self._age(inbound.came_s),
                self._serving.get(id(inbound), NO_ACTOR),
                inbound.credit is not None,
                _named(inbound.rref_id),
                _named(inbound.wanted),
                getattr(inbound.claim, "nbytes", 0),
            )
            for link in self._links
            for inbound in link.served
        ]

    def _key_of(self, call: CallFuture[Any] | StreamReceiver) -> CallKey:
        peer = getattr(call.link, "peer", None)
        callee = 0 if peer is None else peer.incarnation
        # A task of this loop may call by another worker of the loop.
        caller = self._neighbours.caller_of(call) or self._identity.incarnation
        return CallKey(caller, callee, call.call_id)

    def _age(self, began_s: float) -> float:
        return max(0.0, self._now_s - began_s) if began_s else UNKNOWN_S

    # --- tasks -----------------------------------------------------------------------

    def _actor_of_task(self, place: int) -> ObservedActor:
        seen = self._tasks[place]
        steps = seen.chain.steps
        of_program = [step for step in steps if not is_of_library(step.code)]
        # Of a library only the function that was called, not its internals, nor a
        # decorator around it.
        called = (
            step for step in steps if step.code.co_filename != torch_modes.__file__
        )
        shown = of_program or list(islice(called, 1))
        function = shown[-1].code.co_qualname if shown else ""
        frames = tuple(frame_of(step.frame) for step in shown)
        is_internal = self._neighbours.have(seen.task) or (
            not of_program and self._is_own(seen.task)
        )
        wait = self._wait_of(place)
        return ObservedActor(
            ActorKind.TASK,
            seen.task.get_name(),
            function,
            frames,
            wait,
            is_internal,
            tuple(labels_of(steps)),
        )

    def _is_own(self, task: asyncio.Task[Any]) -> bool:
        """Return whether asyncrpc has started a task, for the worker or around it."""
        return task in self._worker.tasks or task.get_name().startswith(OWN_PREFIX)

    def _wait_of(self, place: int) -> Wait:
        seen = self._tasks[place]
        recognized = seen.recognized
        for_s = max(self._ages.age_s(seen.task), self._age(recognized.since_s))
        wait = Wait(
            recognized.kind,
            recognized.what,
            for_s,
            self._places_of(recognized.tasks),
            members=recognized.members,
            calls=tuple(map(self._key_of, recognized.calls)),
            needs=recognized.needs,
        )
        if recognized.call is not None:
            return self._for_call(wait, recognized.call)
        if recognized.kind is WaitKind.CREDIT:
            return wait._replace(call=self._call_served_by(place))
        if recognized.kind is WaitKind.IN_FLIGHT:
            return self._for_calls_in_flight(wait)
        if recognized.kind in BY_REFERENCE and recognized.subject is not None:
            actors, is_sure, is_closed = self._look.who_ends(place)
            return wait._replace(actors=actors, is_sure=is_sure, is_closed=is_closed)
        return self._for_work(place, wait, recognized.subject, recognized.is_part)

    def _places_of(self, tasks: Iterable[asyncio.Task[Any]]) -> tuple[int, ...]:
        return tuple(
            self._places[id(task)] for task in tasks if id(task) in self._places
        )

    def _for_call(self, wait: Wait, call: CallFuture[Any] | StreamReceiver) -> Wait:
        """Return the wait for the answer of a call, or for room to make it."""
        description = f"`{call.function}` on {call.to!r}"
        is_kept_back = self._is_kept_back(call)
        return wait._replace(
            kind=WaitKind.INBOUND if is_kept_back else wait.kind,
            what=f"room for {description}" if is_kept_back else description,
            for_s=max(wait.for_s, self._age(call.began_s)),
            call=self._key_of(call),
        )

    def _is_kept_back(self, call: CallFuture[Any] | StreamReceiver) -> bool:
        """Return whether a large request waits for the credit of its callee."""
        return any(
            link.pending.get(call.call_id) is call and call.call_id in waiting
            for link in self._links
            if len(waiting := link.credit.waiting)
        )

    def _for_calls_in_flight(self, wait: Wait) -> Wait:
        """Return the wait for all calls that are served here or were made here."""
        served = tuple(actor for actor in self._serving.values() if actor != NO_ACTOR)
        calls = [self._key_of(call) for link in self._links for call in link.pending]
        return wait._replace(actors=served, calls=tuple(calls[:CALLS_MAX]))

    def _for_work(
        self,
        place: int,
        wait: Wait,
        subject: Any,
        is_part: Callable[[Any], bool] | None,
    ) -> Wait:
        """Return the wait for what tasks and threads do for an object, or peers."""
        if isinstance(subject, concurrent.futures.Future):
            actors, description = self._executor(subject)
            is_sure = subject.running()
            return wait._replace(actors=actors, what=description, is_sure=is_sure)
        at_work = self._working.get(id(subject), ())
        here = tuple(other for other in at_work if other != place)
        if is_part is not None:
            pending = (call for link in self._links for call in link.pending)
            asked = tuple(self._key_of(call) for call in pending if is_part(call))
            wait = wait._replace(calls=asked)
        if here and wait.kind is WaitKind.FUTURE:
            kind, description = WaitKind.THREADS, "a function in a thread"
            return wait._replace(kind=kind, what=description, actors=here)
        return wait._replace(actors=here) if here else wait

    def _call_served_by(self, place: int) -> CallKey | None:
        for link in self._links:
            for inbound in link.served:
                if self._serving.get(id(inbound)) == place:
                    own = self._identity.incarnation
                    return CallKey(link.peer.incarnation, own, inbound.call_id)
        return None

    def _executor(
        self, job: concurrent.futures.Future[Any]
    ) -> tuple[tuple[int, ...], str]:
        """Return the threads that an executor's job waits for, and the reason."""
        first = len(self._tasks)
        running = [
            (first + index, stack.runs_job())
            for index, stack in enumerate(self._threads)
        ]
        mine = tuple(place for place, other in running if other is job)
        if mine or job.running():
            return mine, "a function in a thread"
        busy = tuple(place for place, other in running if other is not None)
        return busy, f"a free thread of its executor ({len(busy)} are busy)"

    # --- threads ---------------------------------------------------------------------

    def _actor_of_thread(self, stack: ThreadStack) -> ObservedActor:
        shown = [frame for frame in stack.frames if not is_of_library(frame.f_code)]
        frames = tuple(frame_of(frame) for frame in reversed(shown or stack.frames))
        wait = self._wait_of_thread(stack)
        if wait is None:
            line = source_of((shown or stack.frames)[0]) if stack.frames else ""
            wait = Wait(WaitKind.RUNS, line)
        function = frames[-1].function if frames else ""
        is_internal = (
            not shown
            or stack.name == OWN_THREAD
            or self._neighbours.have_thread(stack.name)
        )
        return ObservedActor(
            ActorKind.THREAD, stack.name, function, frames, wait, is_internal
        )

    def _wait_of_thread(self, stack: ThreadStack) -> Wait | None:
        """Return what a thread waits for through asyncrpc, or None."""
        description = stack.wait()
        if description is None:
            return None
        wait = Wait(description.kind, description.what)
        if description.call is not None:
            return self._for_call(wait, description.call)
        threads = (self._by_ident.get(ident) for ident in description.threads)
        actors = (
            *self._places_of(description.tasks),
            *(place for place in threads if place is not None),
        )
        ages = [self._ages.age_s(task) for task in description.tasks]
        return wait._replace(actors=actors, for_s=max(ages, default=wait.for_s))


def snapshot_of(
    worker: Parts,
    ages: WaitAges,
    *,
    is_thorough: bool = True,
    blocked_for_s: float = 0.0,
) -> WorkerSnapshot:
    """Return a snapshot of a running worker.

    Args:
        blocked_for_s: seconds since its loop last ran; 0 if it runs.

    Thread safety: from any thread.
    """
    with held_back():
        taker = SnapshotTaker(
            worker, ages, is_thorough=is_thorough, blocked_for_s=blocked_for_s
        )
        return taker.take()


def _named(value: tuple[int, int] | None) -> str:
    """Return the name of a referenced value; empty for none."""
    return "" if value is None else f"{value[0]:016x}-{value[1]}"
