"""Answers other workers and observers that ask what a worker does; changes nothing."""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
from collections.abc import Callable, Coroutine, Hashable, Iterable, Sequence
from typing import Any, Final, Protocol, TypeVar

from asyncrpc.ids import WorkerId
from asyncrpc.inspection.ages import SAMPLE_S, WaitAges
from asyncrpc.inspection.collecting import Inspected, snapshot_of
from asyncrpc.inspection.collective_records import CollectiveHistory
from asyncrpc.inspection.details import (
    CALLS_MAX,
    CallsSeen,
    TrainingSeen,
    WorkerDetails,
)
from asyncrpc.inspection.door import (
    LocalDoor,
    is_supported,
    look_beside,
    names_of,
)
from asyncrpc.inspection.events import RecentEvents
from asyncrpc.inspection.group import GroupView
from asyncrpc.inspection.histories import history_of
from asyncrpc.inspection.messages import (
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
from asyncrpc.inspection.own_checkup import circumstances_of, own_checkup
from asyncrpc.inspection.recent import recent_events
from asyncrpc.inspection.records import NoAnswer, WorkerSnapshot
from asyncrpc.inspection.reference_records import ReferencesSeen
from asyncrpc.inspection.run_note import RunNoteFile, entry_in
from asyncrpc.inspection.stalls import LOOKS, StallWatch
from asyncrpc.inspection.summaries import WorkerSummary
from asyncrpc.inspection.summarizing import summary_of
from asyncrpc.inspection.telling import (
    TellingWorker,
    calls_of,
    details_of,
    training_of,
)
from asyncrpc.inspection.within import InnerLook, LinkedPeers
from asyncrpc.runtime.extensions import Service
from asyncrpc.runtime.links.sidecar import Sidecar
from asyncrpc.runtime.membership.service import MembershipService
from asyncrpc.runtime.options import Options
from asyncrpc.runtime.ports import PeerLink
from asyncrpc.runtime.router import Route, answers
from asyncrpc.runtime.threads import outcome_to
from asyncrpc.trace import RECENT_MAX

T = TypeVar("T")

REFERENCES_MAX: Final = 2000  # listed at a time: the loop makes the list
# Collectives in a look through the local socket, which always tells them.
ENDED_AT_DOOR_MAX: Final = 200


def no_references(_oldest_max: int) -> ReferencesSeen:
    """Return the references of a worker that can have none."""
    return ReferencesSeen([], 0)


class InspectedWorker(Inspected, TellingWorker, Protocol):
    """The parts of a worker that the inspection reads.

    Attributes:
        sidecar: knows when its loop last ran.
    """

    sidecar: Sidecar
    options: Options

    @property
    def membership(self) -> MembershipService:
        """Return the service that knows the members."""

    def service(self, name: str, /) -> Service:
        """Return a service of the worker."""

    @property
    def directory(self) -> LinkedPeers:
        """Return the links of the worker."""

    def start_task(self, coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run a coroutine as a task that ends with the worker."""


class InspectionService:
    """Answers what is asked about one worker; a `Service`.

    Attributes:
        stalls: logs by itself why the worker is stuck; None if not asked for.
    """

    name = SERVICE

    def __init__(
        self,
        worker: InspectedWorker,
        references: Callable[[int], ReferencesSeen] = no_references,
    ) -> None:
        """Answer for a worker.

        Args:
            references: lists the given number of its references, the oldest.
        """
        self._worker = worker
        self._references = references
        self._ages: WaitAges | None = None
        self._since_s = worker.recorder.now_s()
        self.stalls: StallWatch | None = None
        self._note = RunNoteFile(worker.identity, entry_in())
        self._door = LocalDoor(
            worker,
            take=self._take,
            collectives=lambda: history_of(worker, ended_max=ENDED_AT_DOOR_MAX),
            members=self._members,
            ticked_ns=lambda: worker.sidecar.ticked_ns,
        )

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

    def _take(
        self, blocked_for_s: float = 0.0, *, is_thorough: bool = True
    ) -> WorkerSnapshot:
        ages = self._ages or WaitAges(self._worker.loop)
        return snapshot_of(
            self._worker, ages, is_thorough=is_thorough, blocked_for_s=blocked_for_s
        )

    def _members(self) -> list[Any]:
        return self._worker.membership.table.records

    def on_listening(self, addresses: Sequence[str]) -> None:
        """Let observers on this host find the worker, and watch for stalls."""
        self._since_s = self._worker.recorder.now_s()
        after_s = self._worker.options.stall_after_s
        sample_s = SAMPLE_S if after_s is None else min(SAMPLE_S, after_s / LOOKS)
        self._ages = WaitAges(self._worker.loop, sample_s=sample_s)
        self._ages.start()
        if is_supported:
            self._door.open(addresses)
        if self._note.is_wanted:
            self._worker.start_task(
                _in_thread(self._worker.loop, lambda: self._note.write(addresses))
            )
        if after_s is not None and after_s < math.inf:
            ports = _WatchedWorker(self._worker, self._take)
            self.stalls = StallWatch(ports, self._ages, after_s)
            self.stalls.start()

    async def look(self) -> GroupView:
        """Look at all workers that this one knows.

        Cancellation:
            The workers that have been asked are told to stop.
        """
        look = await _inner_look(self._worker, self._take)
        return await look.at_all()

    async def _on_snapshot(self, _: PeerLink, asked: TakeSnapshot) -> WorkerSnapshot:
        return await _in_thread(
            self._worker.loop, lambda: self._take(is_thorough=asked.is_thorough)
        )

    async def _on_collectives(
        self, _: PeerLink, __: TellCollectives
    ) -> CollectiveHistory:
        return await _in_thread(self._worker.loop, lambda: history_of(self._worker))

    async def _on_summary(self, _: PeerLink, __: TellSummary) -> WorkerSummary:
        now_s = self._worker.recorder.now_s
        asked_s = now_s()
        await asyncio.sleep(0)  # one turn of the loop
        return summary_of(
            self._worker,
            running_s=now_s() - self._since_s,
            lag_s=now_s() - asked_s,
            tasks=0 if self._ages is None else self._ages.tasks,
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
        return await _in_thread(
            self._worker.loop, lambda: history_of(self._worker, ended_max=ended_max)
        )

    async def _on_beside(self, _: PeerLink, asked: LookBeside) -> SeenBeside:
        names = names_of(asked.incarnation, asked.addresses)
        found = await _in_thread(self._worker.loop, lambda: look_beside(names))
        if isinstance(found, NoAnswer):
            return SeenBeside(None, found, None)
        return SeenBeside(found.snapshot, None, found.collectives)

    async def _on_clock(self, _: PeerLink, _asked: ReadClock) -> float:
        return self._worker.recorder.now_s()

    async def _on_events(self, _: PeerLink, asked: TakeEvents) -> RecentEvents:
        recorder, loop = self._worker.recorder, self._worker.loop
        return await _in_thread(
            loop,
            lambda: recent_events(recorder, loop, asked.kinds, asked.newest_max),
        )

    async def _on_references(
        self, _: PeerLink, asked: ListReferences
    ) -> ReferencesSeen:
        return self._references(min(asked.oldest_max, REFERENCES_MAX))

    async def _on_checkup(self, _: PeerLink, _asked: TakeCheckup) -> CheckupSeen:
        found = circumstances_of(self._worker, self._members())
        return await _in_thread(
            self._worker.loop, lambda: own_checkup(found, self._worker.recorder)
        )

    def on_peer_lost(self, peer: WorkerId, reason: str) -> None:
        """Do nothing: the service keeps no state of peers."""

    async def close(self) -> None:
        """Close the local socket, and stop looking at tasks."""
        if self.stalls is not None:
            self.stalls.close()
        self._door.close()
        if self._ages is not None:
            self._ages.stop()
        if self._note.is_wanted:
            await _in_thread(self._worker.loop, self._note.remove)


class _WatchedWorker:
    """A worker as the watch for stalls sees it; a `StallPorts`."""

    def __init__(
        self, worker: InspectedWorker, take: Callable[..., WorkerSnapshot]
    ) -> None:
        self._worker = worker
        self.take = take
        self.name = worker.identity.name
        self.loop = worker.loop
        self.start_task = worker.start_task

    @property
    def ticked_ns(self) -> int | None:
        """See `StallPorts`, as for all members of this class."""
        return self._worker.sidecar.ticked_ns

    def long_calls(self, after_s: float) -> set[Hashable]:
        before_s = self.loop.time() - after_s
        return {
            (direction, link.peer.incarnation, one.call_id)
            for link in self._worker.directory.links
            for direction, calls in (("made", link.pending), ("served", link.served))
            for one in calls
            if 0 < one.began_s <= before_s
        }

    async def look_along(self, after_s: float) -> GroupView:
        look = await _inner_look(self._worker, self.take)
        return await look.along(after_s)

    async def in_thread(self, job: Callable[[], T]) -> T:
        return await _in_thread(self.loop, job)


async def _inner_look(
    worker: InspectedWorker, take: Callable[..., WorkerSnapshot]
) -> InnerLook:
    own = await _in_thread(worker.loop, take)
    return InnerLook(
        worker.directory,
        own,
        secret=worker.options.secret_bytes,
        in_thread=lambda job: _in_thread(worker.loop, job),
    )


async def _in_thread(loop: asyncio.AbstractEventLoop, job: Callable[[], T]) -> T:
    """Run a job in a new thread: all threads of the pools may be in use."""
    done: asyncio.Future[T] = loop.create_future()
    finish = outcome_to(done)

    def run() -> None:
        result, problem = None, None
        try:
            result = job()
        except Exception as error:  # noqa: BLE001  (raised in the awaiting task)
            problem = error
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(finish, result, problem)

    threading.Thread(target=run, name="asyncrpc-look", daemon=True).start()
    return await done
