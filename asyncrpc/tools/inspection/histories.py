"""What a worker tells of its collectives: the last ones, and those under way.

Like a snapshot, it may be taken in any thread, and does not need the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Final, Protocol

from asyncrpc.core.identity import WorkerIdentity
from asyncrpc.core.loop.clock import NS_PER_S, wall_ns
from asyncrpc.core.trace.events import CollectiveEnded
from asyncrpc.core.trace.recorder import FlightRecorder
from asyncrpc.core.trace.ring import RECENT_MAX
from asyncrpc.extend import Service
from asyncrpc.parallel.collectives.matching import CollectiveRun
from asyncrpc.parallel.collectives.service import CollectivesService
from asyncrpc.tools.inspection.awaits import AwaitStep, chain_of
from asyncrpc.tools.inspection.collective_records import (
    CLOSED,
    UNDER_WAY,
    CollectiveHistory,
    KnownGroup,
    NotedCollective,
)
from asyncrpc.tools.inspection.names import local
from asyncrpc.tools.inspection.recognition import is_of_library
from asyncrpc.tools.inspection.records import StackFrame
from asyncrpc.tools.inspection.threads import frame_of

_WAITING: Final = frozenset(
    function.__code__
    for function in (
        CollectiveRun.take,
        CollectiveRun.settle,
        CollectiveRun.pause,
        CollectiveRun.until_done,
    )
)


class CollectiveWorker(Protocol):
    """The parts of a worker that a history reads."""

    loop: asyncio.AbstractEventLoop
    recorder: FlightRecorder

    @property
    def identity(self) -> WorkerIdentity:
        """Who the worker is."""

    @property
    def services(self) -> Iterable[Service]:
        """Return the services of the worker, as far as they are loaded."""


def history_of(
    worker: CollectiveWorker, *, ended_max: int = RECENT_MAX
) -> CollectiveHistory:
    """Return the collectives of a running worker.

    Args:
        ended_max: how many ended collectives to return at most; the last ones.

    Thread safety: from any thread.
    """
    return _HistoryTaker(worker).take(ended_max)


class _HistoryTaker:
    """Takes the history of one worker."""

    def __init__(self, worker: CollectiveWorker) -> None:
        self._worker = worker
        self._now_s, self._now_ns = worker.recorder.now_s(), wall_ns()
        self._groups: list[KnownGroup] = []
        self._places: dict[int, int] = {}  # in `_groups`, by group_id
        self._noted: dict[tuple[int, int], NotedCollective] = {}

    def take(self, ended_max: int) -> CollectiveHistory:
        """Return the history."""
        open_groups = [
            group
            for service in self._worker.services
            if isinstance(service, CollectivesService)
            for group in service.groups
        ]
        for group in open_groups:
            begun = group.machine.operations.begun
            self._add(KnownGroup(group.id, group.label, tuple(group.members), begun))
        self._note_runs(
            [run for group in open_groups for run in tuple(group.runs.values())]
        )
        ended = self._worker.recorder.collectives.recent
        newest = ended[max(0, len(ended) - ended_max) :]
        for event in newest:  # last: a collective that ends meanwhile counts as ended
            self._note_event(event)
        identity = self._worker.identity
        return CollectiveHistory(
            identity.name,
            identity.rank,
            identity.hello().pid,
            tuple(self._groups),
            tuple(sorted(self._noted.values(), key=lambda noted: noted.began_ns)),
            len(newest) == len(ended) < RECENT_MAX,
        )

    def _add(self, group: KnownGroup) -> None:
        self._places[group.group_id] = len(self._groups)
        self._groups.append(group)

    def _note_runs(self, runs: Sequence[CollectiveRun]) -> None:
        frames = _frames_of(self._worker.loop) if runs else {}
        for run in runs:
            group_id, descriptor = run.matching.id, run.operation.descriptor
            self._noted[group_id, run.number] = NotedCollective(
                self._places[group_id],
                run.number,
                descriptor.operation,
                descriptor.dtype,
                descriptor.shape,
                self._wall_ns(run.began_s),
                UNDER_WAY,
                "",
                frames.get(id(run), ()),
            )

    def _note_event(self, event: CollectiveEnded) -> None:
        group_id = event.group_id
        if group_id not in self._places:
            members = tuple(event.members)
            self._add(KnownGroup(group_id, event.group, members, CLOSED))
        self._noted[group_id, event.number] = NotedCollective(
            self._places[group_id],
            event.number,
            event.operation,
            event.dtype,
            event.shape,
            self._wall_ns(event.began_s),
            self._wall_ns(event.at_s),
            event.outcome,
            (),
        )

    def _wall_ns(self, at_s: float) -> int:
        return max(1, self._now_ns - int((self._now_s - at_s) * NS_PER_S))


def _frames_of(
    loop: asyncio.AbstractEventLoop,
) -> dict[int, tuple[StackFrame, ...]]:
    """Return the stacks of the tasks that wait in collectives, by ids of the runs."""
    stacks: dict[int, tuple[StackFrame, ...]] = {}
    for task in tuple(asyncio.all_tasks(loop)):
        steps = () if task.done() else chain_of(task).steps
        run = _run_of(steps)
        if run is None:
            continue
        of_program = [step for step in steps if not is_of_library(step.code)]
        if of_program or id(run) not in stacks:
            shown = reversed(of_program or steps[:1])
            stacks[id(run)] = tuple(frame_of(step.frame) for step in shown)
    return stacks


def _run_of(steps: Sequence[AwaitStep]) -> CollectiveRun | None:
    """Return the collective that the innermost steps of a task wait in."""
    for step in reversed(steps):
        if step.code in _WAITING:
            run = local(step.frame, "self")
            return run if isinstance(run, CollectiveRun) else None
    return None
