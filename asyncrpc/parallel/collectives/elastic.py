"""The elastic groups of one worker: tells others its standing, and waits for theirs.

`machine.reconfiguration` decides.  A message is made when it is written, so a message
that waits for a connection is never out of date.  A waiting worker repeats its standing
each second to the workers that it waits for: a message lost by a failed dial does no
harm.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Final

from asyncrpc.errors import (
    AsyncRpcError,
    CollectiveError,
    CollectiveTimeoutError,
    GroupChangedError,
    QuorumLostError,
    UnknownWorkerError,
    UsageError,
)
from asyncrpc.extend import PeerLink, ServiceHost, WorkerId
from asyncrpc.parallel.collectives.machine.operations import CollectiveFailure
from asyncrpc.parallel.collectives.machine.reconfiguration import (
    EXCLUDED,
    MEMBER,
    Application,
    ElasticMember,
)
from asyncrpc.parallel.collectives.machine.views import View
from asyncrpc.parallel.collectives.matching import Matching
from asyncrpc.parallel.collectives.messages import (
    MemberStanding,
    notice_of,
    standing_of,
)

REPEAT_S: Final = 1.0
FIND_S: Final = 5.0  # for others to find an applicant that is not known here


class ElasticGroups:
    """All elastic groups of one worker, by name."""

    def __init__(self, worker: ServiceHost) -> None:
        self._worker = worker
        self._all: dict[str, ElasticSeries] = {}

    def series(self, name: str) -> ElasticSeries:
        """Return the worker's part in the group of a name; make it if need be."""
        series = self._all.get(name)
        if series is None:
            series = self._all[name] = ElasticSeries(self._worker, name)
        return series

    def drop(self, series: ElasticSeries) -> None:
        """Forget a group that this worker has left."""
        if self._all.get(series.name) is series:
            del self._all[series.name]

    def on_standing(self, link: PeerLink, message: MemberStanding) -> None:
        """Take what another worker says of a group."""
        standing = standing_of(message)
        series = self._all.get(message.group_name)
        if series is None:  # a newcomer waits until all workers have answered
            series = ElasticSeries(self._worker, message.group_name)
        series.machine.receive(link.peer, standing)
        series.carry_out()

    def on_peer_lost(self, peer: WorkerId) -> None:
        """Let every group go on without the worker."""
        for series in list(self._all.values()):
            series.machine.lose(peer)
            series.carry_out()

    def on_peer_back(self, peer: WorkerId) -> None:
        """Let every group talk to the worker again."""
        for series in self._all.values():
            series.machine.back(peer)

    def close(self) -> None:
        """Leave all groups."""
        for series in list(self._all.values()):
            series.leave()
        self._all.clear()


class ElasticSeries:
    """One elastic group at one worker, generation after generation.

    Attributes:
        machine: decides; its callers call `carry_out` afterwards.
    """

    def __init__(self, worker: ServiceHost, name: str) -> None:
        self.name = name
        self.machine = ElasticMember(worker.id, worker.rank)
        self.current: Matching | None = None
        self._worker = worker
        self._ended: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._dials: set[str] = set()

    async def come(self, application: Application, timeout_s: float | None) -> View:
        """Ask for the next view; return it.

        Args:
            timeout_s: seconds to wait; None: no limit.
        """
        machine, before = self.machine, self.machine.view.generation
        if machine.is_here:
            raise UsageError(
                f"this worker already waits for the next members of group "
                f"{self.name!r}: call reconfigure once at a time"
            )
        machine.come(application, self._others())
        self._repeat_later()
        self.carry_out()
        try:
            async with asyncio.timeout(timeout_s):
                while machine.is_here:
                    self._ended = self._worker.loop.create_future()
                    await self._ended
        except TimeoutError:
            if machine.is_here:
                raise self._late(timeout_s or 0.0) from None
        finally:
            self._ended = None
            if machine.is_here:
                machine.give_up()
                self.carry_out()
        view = self._outcome(before)
        await self._meet(view)
        return view

    async def _meet(self, view: View) -> None:
        """Find the members that this worker does not know yet."""
        worker = self._worker
        for member in view.members:
            if worker.incarnation_of(member.name) is None:
                with contextlib.suppress(AsyncRpcError):  # its loss will be noticed
                    await worker.find_member(member.name, FIND_S)

    def leave(self) -> None:
        """Leave the group for good; others do not wait for this worker."""
        self.machine.leave()
        self.carry_out()

    # --- outcome ---------------------------------------------------------------------

    def _outcome(self, before: int) -> View:
        machine = self.machine
        view = machine.view
        if machine.state is MEMBER and view.generation > before:
            return view
        if machine.state is EXCLUDED:
            raise self.excluded()
        if not machine.has_quorum:
            raise self._too_few()
        raise GroupChangedError(
            f"worker {self._worker.name!r} has left group {self.name!r} meanwhile"
        )

    def _late(self, timeout_s: float) -> CollectiveError:
        missing, machine = self.machine.missing, self.machine
        problem = f"group {self.name!r} did not agree on members in {timeout_s:g} s"
        if missing:
            who = ", ".join(map(repr, missing))
            return CollectiveTimeoutError(
                f"{problem}: these workers did not come: {who}", ranks=missing
            )
        size, least = machine.size, machine.least
        return QuorumLostError(
            f"{problem}: {size} of at least {least} workers came; start more workers, "
            "or ask for a smaller min_size"
        )

    def _too_few(self) -> CollectiveError:
        lost = self.machine.absent
        who, view = ", ".join(map(repr, lost)), self.machine.lost_view
        return QuorumLostError(
            f"group {self.name!r} (generation {view.generation} of "
            f"{len(view.members)}) has lost {who}: the remaining members are not a "
            "majority; a partitioned part of the group may continue elsewhere.  If "
            'that is impossible, reconfigure with quorum="any"; a newcomer calls '
            "join_group again",
            ranks=lost,
        )

    def excluded(self) -> CollectiveError:
        """Return the error for a worker that its group has excluded."""
        view = self.machine.excluded_from
        names = tuple(member.name for member in view.members)
        return GroupChangedError(
            f"group {self.name!r} declared worker {self._worker.name!r} lost and "
            f"continued as generation {view.generation} "
            f"({', '.join(map(repr, names))}); call join_group again",
            ranks=(self._worker.name,),
        )

    # --- carrying out ----------------------------------------------------------------

    def carry_out(self) -> None:
        """Send what the machine wants to tell others; wake the waiting program."""
        machine = self.machine
        if machine.farewell is not None:
            (standing, names), machine.farewell = machine.farewell, None
            for name in names:
                link = self._link_to(name)
                if link is not None:
                    link.tell(notice_of(self.name, standing), at_once=True)
        while machine.outbox:
            name, _ = machine.outbox.popitem()
            self._tell(name)
        if machine.state is EXCLUDED and self.current is not None:
            error, current, self.current = self.excluded(), self.current, None
            failure = CollectiveFailure(error.code, str(error), error.ranks)
            current.lose(failure, tell=False)
        if not machine.is_here:
            self._stop()

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(None)

    def _tell(self, name: str) -> None:
        worker, link = self._worker, self._link_to(name)
        if link is not None:
            link.tell(notice_of(self.name, self.machine.standing), at_once=True)
        elif name not in self._dials and not worker.is_draining:
            self._dials.add(name)
            dial = worker.start_task(self._dial_and_tell(name))
            dial.add_done_callback(lambda _: self._dials.discard(name))

    def _link_to(self, name: str) -> PeerLink | None:
        try:
            return self._worker.open_link_to(name)
        except UnknownWorkerError:  # it has just joined, and another worker knows it
            return None

    async def _dial_and_tell(self, name: str) -> None:
        worker = self._worker
        try:
            try:
                link = await worker.link_to(name)
            except UnknownWorkerError:
                await worker.find_member(name, FIND_S)
                link = await worker.link_to(name)
        except AsyncRpcError:
            self.machine.cannot_reach(name)
            self.carry_out()
            return
        link.tell(notice_of(self.name, self.machine.standing), at_once=True)

    def _repeat_later(self) -> None:
        self._timer = self._worker.loop.call_later(REPEAT_S, self._repeat)

    def _repeat(self) -> None:
        self.machine.meet(self._others())
        self.machine.repeat()
        self._repeat_later()
        self.carry_out()

    def _others(self) -> list[str]:
        known = self._worker.known_members
        return [worker.name for worker in known if worker.name != self._worker.name]
