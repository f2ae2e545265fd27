"""Answers other workers and observers that ask what a worker does; changes nothing.

What a worker finds when it checks its own process and host.

Takes what a worker remembers from its flight recorder.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, Final

from asyncrpc.core.host.this_host import HOST_ID
from asyncrpc.core.loop.clock import wall_ns
from asyncrpc.core.loop.threads import in_new_thread
from asyncrpc.core.membership.machine.records import (
    Record,
)
from asyncrpc.core.parts import Parts
from asyncrpc.errors import UsageError
from asyncrpc.extend import PeerLink, Route, WorkerId, answers
from asyncrpc.tools.checkup.machine.checks import check_all
from asyncrpc.tools.checkup.reading import Circumstances, gather
from asyncrpc.tools.inspection.beside import look_beside
from asyncrpc.tools.inspection.collecting import snapshot_of
from asyncrpc.tools.inspection.collective_records import CollectiveHistory
from asyncrpc.tools.inspection.details import (
    CALLS_MAX,
    CallsSeen,
    TrainingSeen,
    WorkerDetails,
)
from asyncrpc.tools.inspection.events import (
    KIND_NAMES,
    NamedTask,
    RecentEvents,
    is_own,
)
from asyncrpc.tools.inspection.group import GroupView
from asyncrpc.tools.inspection.histories import history_of
from asyncrpc.tools.inspection.local_socket import names_of
from asyncrpc.tools.inspection.look_from_worker import inner_look
from asyncrpc.tools.inspection.messages import (
    SERVICE,
    CheckupSeen,
    ListCalls,
    ListReferences,
    LookBeside,
    ReadClock,
    SeenBeside,
    TakeCheckup,
    TakeEvents,
    TakeSnapshot,
    TellCollectives,
    TellDetails,
    TellLastCollectives,
    TellSummary,
    TellTraining,
)
from asyncrpc.tools.inspection.presence import PRESENCE, HostPresence
from asyncrpc.tools.inspection.records import NoAnswer, WorkerSnapshot
from asyncrpc.tools.inspection.reference_records import ReferencesSeen
from asyncrpc.tools.inspection.summaries import WorkerSummary
from asyncrpc.tools.inspection.summarizing import summary_of
from asyncrpc.tools.inspection.worker_answers import (
    calls_of,
    details_of,
    training_of,
)
from asyncrpc.trace import RECENT_MAX, FlightRecorder

TASKS_MAX: Final = 1000  # that are named; a timeline has far fewer tracks


def recent_events(
    recorder: FlightRecorder,
    loop: asyncio.AbstractEventLoop,
    kinds: Sequence[str] = (),
    newest_max: int = RECENT_MAX,
) -> RecentEvents:
    """Return what a worker remembers.

    Args:
        kinds: fields of `RecentEvents`; empty: all.
        newest_max: events of each kind, the newest; calls that look at the worker are
            left out.

    Thread safety: from any thread.
    """
    unknown = [kind for kind in kinds if kind not in KIND_NAMES]
    if unknown:
        raise UsageError(
            f"unknown kind of event {unknown[0]!r}; use one of {', '.join(KIND_NAMES)}"
        )
    wanted = kinds or KIND_NAMES
    events = {
        name: [event for event in getattr(recorder, name).recent if not is_own(event)][
            -newest_max:
        ]
        if name in wanted
        else []
        for name in KIND_NAMES
    }
    tasks = _tasks_of(loop, events.values())
    return RecentEvents(recorder.now_s(), wall_ns(), tasks, **events)


def _tasks_of(
    loop: asyncio.AbstractEventLoop, kinds: Iterable[Iterable[Any]]
) -> list[NamedTask]:
    """Return the running tasks that events name, and their coroutines."""
    named = {getattr(event, "task", "") for events in kinds for event in events}
    running = (task for task in asyncio.all_tasks(loop) if task.get_name() in named)
    return [
        NamedTask(task.get_name(), _coroutine_of(task))
        for task in islice(running, TASKS_MAX)
    ]


def _coroutine_of(task: asyncio.Task[Any]) -> str:
    # A coroutine of a class from elsewhere may have no name.
    name = getattr(task.get_coro(), "__qualname__", "")
    return name if type(name) is str else ""


def circumstances_of(worker: Parts, records: Iterable[Record]) -> Circumstances:
    """Return what is known of a worker; called on its loop."""
    hosts = [record.member.host_id for record in records if record.is_alive]
    return Circumstances(
        worker.options,
        loop=type(worker.loop),
        is_debug=worker.loop.get_debug(),
        workers=max(1, len(hosts)),
        workers_here=max(1, hosts.count(HOST_ID)),
        is_one_host=set(hosts) <= {HOST_ID},
    )


def own_checkup(
    circumstances: Circumstances,
    recorder: FlightRecorder,
    environ: Mapping[str, str] = os.environ,
) -> CheckupSeen:
    """Return what the checks find; blocks this thread for some milliseconds."""
    findings = check_all(gather(circumstances, environ))
    return CheckupSeen(findings, recorder.now_s(), wall_ns())


REFERENCES_MAX: Final = 2000  # listed at a time: the loop makes the list


def no_references(_oldest_max: int) -> ReferencesSeen:
    """Return the references of a worker that can have none."""
    return ReferencesSeen([], 0)


class InspectionService:
    """Answers what is asked about one worker; a `Service`."""

    name = SERVICE

    def __init__(
        self,
        worker: Parts,
        references: Callable[[int], ReferencesSeen] = no_references,
    ) -> None:
        presence = worker.service(PRESENCE)
        assert isinstance(presence, HostPresence)
        self._worker = worker
        self._references = references
        self._presence = presence

    @property
    def routes(self) -> Iterable[Route]:
        """The messages that the service takes."""
        return (
            answers(TakeSnapshot, self._on_snapshot),
            answers(TellCollectives, self._on_collectives),
            answers(TellSummary, self._on_summary),
            answers(ListCalls, self._on_calls),
            answers(TellTraining, self._on_training),
            answers(TellDetails, self._on_details),
            answers(TellLastCollectives, self._on_last),
            answers(LookBeside, self._on_beside),
            answers(ReadClock, self._on_clock),
            answers(TakeEvents, self._on_events),
            answers(ListReferences, self._on_references),
            answers(TakeCheckup, self._on_checkup),
        )

    def _take(self, *, is_thorough: bool = True) -> WorkerSnapshot:
        return snapshot_of(
            self._worker,
            self._presence.ages,
            is_thorough=is_thorough,
            blocked_for_s=0.0,
        )

    async def look(self) -> GroupView:
        """Look at all workers that this one knows."""
        look = await inner_look(self._worker, self._presence.ages)
        return await look.at_all()

    async def _on_snapshot(self, _: PeerLink, asked: TakeSnapshot) -> WorkerSnapshot:
        return await in_new_thread(
            self._worker.loop, lambda: self._take(is_thorough=asked.is_thorough)
        )

    async def _on_collectives(
        self, _: PeerLink, __: TellCollectives
    ) -> CollectiveHistory:
        return await in_new_thread(self._worker.loop, lambda: history_of(self._worker))

    async def _on_summary(self, _: PeerLink, __: TellSummary) -> WorkerSummary:
        now_s = self._worker.recorder.now_s
        asked_s = now_s()
        await asyncio.sleep(0)  # one turn of the loop
        return summary_of(
            self._worker,
            running_s=now_s() - self._presence.since_s,
            lag_s=now_s() - asked_s,
            tasks=self._presence.ages.tasks,
        )

    async def _on_calls(self, _: PeerLink, asked: ListCalls) -> CallsSeen:
        return calls_of(self._worker, min(asked.oldest_max, CALLS_MAX))

    async def _on_training(self, _: PeerLink, asked: TellTraining) -> TrainingSeen:
        return training_of(self._worker, asked.newest_max)

    async def _on_details(self, _: PeerLink, __: TellDetails) -> WorkerDetails:
        return details_of(self._worker)

    async def _on_last(
        self, _: PeerLink, asked: TellLastCollectives
    ) -> CollectiveHistory:
        ended_max = min(asked.ended_max, RECENT_MAX)
        return await in_new_thread(
            self._worker.loop, lambda: history_of(self._worker, ended_max=ended_max)
        )

    async def _on_beside(self, _: PeerLink, asked: LookBeside) -> SeenBeside:
        names = names_of(asked.incarnation, asked.addresses)
        outcome = await in_new_thread(self._worker.loop, lambda: look_beside(names))
        if isinstance(outcome, NoAnswer):
            return SeenBeside(None, outcome, None)
        return SeenBeside(outcome.snapshot, None, outcome.collectives)

    async def _on_clock(self, _: PeerLink, _asked: ReadClock) -> float:
        return self._worker.recorder.now_s()

    async def _on_events(self, _: PeerLink, asked: TakeEvents) -> RecentEvents:
        recorder, loop = self._worker.recorder, self._worker.loop
        return await in_new_thread(
            loop,
            lambda: recent_events(recorder, loop, asked.kinds, asked.newest_max),
        )

    async def _on_references(
        self, _: PeerLink, asked: ListReferences
    ) -> ReferencesSeen:
        return self._references(min(asked.oldest_max, REFERENCES_MAX))

    async def _on_checkup(self, _: PeerLink, _asked: TakeCheckup) -> CheckupSeen:
        circumstances = circumstances_of(
            self._worker, self._worker.membership.table.records
        )
        return await in_new_thread(
            self._worker.loop, lambda: own_checkup(circumstances, self._worker.recorder)
        )

    def on_peer_lost(self, peer: WorkerId, reason: str) -> None:
        """Do nothing: the service keeps no state of peers."""

    async def close(self) -> None:
        """Do nothing: nothing is held."""
