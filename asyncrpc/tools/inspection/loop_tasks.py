"""The tasks of an event loop: what each waits for, and which tasks could end the wait.

Waits that nothing can end are found by searching all objects of the process, which
holds the interpreter for some 25 ms.  So one look at a loop is shared by all callers
that ask before it has begun: several workers of one loop, each asked by the same
observer.  A look also knows the other looks that are kept, since their objects refer to
the same tasks.
"""

from __future__ import annotations

import asyncio
import gc
import inspect
import os
import threading
import weakref
from collections import defaultdict
from collections.abc import Iterable
from functools import cached_property
from heapq import nlargest
from types import CoroutineType, FrameType, MethodType
from typing import Any, Final, NamedTuple

from asyncrpc.extend import WaitDescription, WaitKind
from asyncrpc.tools.inspection import awaits
from asyncrpc.tools.inspection.ages import WaitAges
from asyncrpc.tools.inspection.awaits import Chain
from asyncrpc.tools.inspection.recognition import recognized

ACTORS_MAX: Final = 2000
SUBJECTS_MAX: Final = 64  # the longest waited for, whose referrers are looked at
# Kinds of waits that only code with a reference to the object can end.
BY_REFERENCE: Final = frozenset(
    {
        WaitKind.LOCK,
        WaitKind.SEMAPHORE,
        WaitKind.CONDITION,
        WaitKind.EVENT,
        WaitKind.ITEM,
        WaitKind.ROOM,
        WaitKind.WORK,
        WaitKind.BARRIER,
    }
)
_HELD: Final = frozenset({WaitKind.LOCK, WaitKind.SEMAPHORE})


class SeenTask(NamedTuple):
    """A task that is looked at."""

    task: asyncio.Task[Any]
    chain: Chain
    recognized: WaitDescription


class LoopTasks:
    """The tasks of one event loop, as they were when it was looked at.

    Attributes:
        tasks: by name.
        left_out: how many there are beyond `ACTORS_MAX`.
        places: index in `tasks`, by the id of the task.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        ages: WaitAges,
        *,
        is_thorough: bool,
        others: Iterable[LoopTasks] = (),
    ) -> None:
        tasks = [task for task in asyncio.all_tasks(loop) if not task.done()]
        tasks.sort(key=lambda task: task.get_name())
        self.left_out = max(0, len(tasks) - ACTORS_MAX)
        self.tasks = [_seen(task) for task in tasks[:ACTORS_MAX]]
        self.places = {id(seen.task): place for place, seen in enumerate(self.tasks)}
        self._ages = ages
        self._closed = set[int]()
        if is_thorough:
            self._closed = self._find_closed([self, *others])

    def who_ends(self, place: int) -> tuple[tuple[int, ...], bool, bool]:
        """Return the tasks that can end a task's wait for an object."""
        recognized = self.tasks[place].recognized
        subject = id(recognized.subject)
        if recognized.kind in _HELD and (holders := self._holders.get(subject)):
            return tuple(holders), True, True
        referring = [
            other
            for other in self._referring.get(subject, ())
            if other != place
            and self.tasks[other].recognized.subject is not recognized.subject
        ]
        return tuple(referring), False, subject in self._closed

    @cached_property
    def _subjects(self) -> dict[int, Any]:
        """Objects that tasks wait on and only their referrers can complete, by id."""
        waits = (seen.recognized for seen in self.tasks)
        return {
            id(recognized.subject): recognized.subject
            for recognized in waits
            if recognized.kind in BY_REFERENCE and recognized.subject is not None
        }

    @cached_property
    def _holders(self) -> dict[int, list[int]]:
        """Tasks that have entered a subject by `with` or `async with`, by its id."""
        holders: defaultdict[int, list[int]] = defaultdict(list)
        for place, seen in enumerate(self.tasks):
            for step in seen.chain.steps:
                for manager in awaits.entered(step):
                    # A condition is entered by its lock.
                    for candidate in (manager, getattr(manager, "_lock", None)):
                        if id(candidate) in self._subjects:
                            holders[id(candidate)].append(place)
        return holders

    @cached_property
    def _referring(self) -> dict[int, list[int]]:
        """Tasks that refer to a subject, by its id."""
        referring: defaultdict[int, list[int]] = defaultdict(list)
        for place, seen in enumerate(self.tasks):
            objects = (
                id(referent)
                for step in seen.chain.steps
                for referent in awaits.objects_in(step)
            )
            for subject in self._subjects.keys() & set(objects):
                referring[subject].append(place)
        return referring

    def _find_closed(self, looks: Iterable[LoopTasks]) -> set[int]:
        """Return the ids of the subjects to which only suspended coroutines refer.

        One search of all objects of the process serves all subjects: it holds the
        interpreter for some 25 ms, and 0.7 ms more for each subject.
        """
        waiting = (
            seen for seen in self.tasks if id(seen.recognized.subject) in self._subjects
        )
        longest = nlargest(SUBJECTS_MAX, waiting, key=self._age_of)
        closed = {id(seen.recognized.subject) for seen in longest}
        if not closed:
            return closed
        known = set[int]().union(*(look.own_ids() for look in looks))
        # From Python 3.13 on, the call's argument tuple is among the referrers: make
        # one here, whose id is known.
        subjects = tuple(self._subjects[subject] for subject in closed)
        referrers = gc.get_referrers(*subjects)
        known.update((id(subjects), id(referrers)))
        methods = tuple(
            referrer for referrer in referrers if type(referrer) is MethodType
        )
        free = _callable_by_others(methods, known | {id(methods)})
        for referrer in referrers:
            if (
                id(referrer) in known
                or type(referrer) is FrameType
                or _is_forgotten(referrer)
            ):
                continue
            if type(referrer) is MethodType and id(referrer) not in free:
                continue
            closed.difference_update(map(id, gc.get_referents(referrer)))
        return closed

    def _age_of(self, seen: SeenTask) -> float:
        return self._ages.age_s(seen.task)

    def own_ids(self) -> set[int]:
        """Return the ids of the objects of this look that refer to the program's.

        They are the suspended coroutines and frames of the tasks, and the records of
        the look itself.
        """
        steps = [step for seen in self.tasks for step in seen.chain.steps]
        return {
            *(id(step.suspended) for step in steps),
            *(id(step.frame) for step in steps),
            *(id(seen.recognized) for seen in self.tasks),
            id(self._subjects),
        }


class _NextLook:
    """One look at a loop, for all callers that ask before it begins."""

    def __init__(self) -> None:
        self.is_thorough = False
        self.tasks: LoopTasks | None = None


class _SharedLooks:
    """Takes looks at loops, one at a time; for all workers of the process.

    Thread safety: from any thread.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Begin anew: in a forked process no thread completes the parent's looks."""
        self._guard = threading.Lock()  # over what follows
        self._next: dict[asyncio.AbstractEventLoop, _NextLook] = {}
        self._kept: weakref.WeakSet[LoopTasks] = weakref.WeakSet()
        self._looking = threading.Lock()  # for as long as a look takes

    def take(
        self, loop: asyncio.AbstractEventLoop, ages: WaitAges, *, is_thorough: bool
    ) -> LoopTasks:
        """Return a look at a loop that begins after this call."""
        with self._guard:
            turn = self._next.setdefault(loop, _NextLook())
            turn.is_thorough |= is_thorough
        with self._looking:
            if turn.tasks is None:
                with self._guard:
                    if self._next.get(loop) is turn:
                        del self._next[loop]
                turn.tasks = LoopTasks(
                    loop, ages, is_thorough=turn.is_thorough, others=[*self._kept]
                )
                self._kept.add(turn.tasks)
            return turn.tasks


_looks: Final = _SharedLooks()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_looks.forget)


def tasks_of(
    loop: asyncio.AbstractEventLoop, ages: WaitAges, *, is_thorough: bool
) -> LoopTasks:
    """Return what the tasks of a loop wait for.

    Thread safety: from any thread.
    """
    return _looks.take(loop, ages, is_thorough=is_thorough)


def _callable_by_others(methods: tuple[Any, ...], known: set[int]) -> set[int]:
    """Return the ids of bound methods that other code, such as a timer, may call.

    The rest lie on the stack of a frame that is inside of a `with` block.
    """
    free: set[int] = set()
    if not methods:
        return free
    ids = set(map(id, methods))
    for referrer in gc.get_referrers(*methods):
        if id(referrer) not in known and type(referrer) is not FrameType:
            free.update(ids.intersection(map(id, gc.get_referents(referrer))))
    return free


def _is_forgotten(candidate: object) -> bool:
    """Return whether an object is a coroutine that has not begun."""
    if not isinstance(candidate, CoroutineType):
        return False
    return inspect.getcoroutinestate(candidate) == inspect.CORO_CREATED


def _seen(task: asyncio.Task[Any]) -> SeenTask:
    chain = awaits.chain_of(task)
    return SeenTask(task, chain, recognized(chain))
