"""Looks after the meeting point of a group: a worker that comes back finds the group.

`machine.keeping` decides; this module looks, writes and waits.  Nothing runs before the
first member is gone, nor if the workers do not meet at a store of a named run.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from asyncrpc.core.identity import WorkerIdentity
from asyncrpc.core.members import Member, Rendezvous
from asyncrpc.core.membership.machine.keeping import (
    KeepingEvent,
    KeepingState,
    MeetingKeeping,
    event_of_change,
    judge,
    offer_of,
)
from asyncrpc.core.membership.machine.membership import (
    Membership,
)
from asyncrpc.core.membership.machine.records import (
    ChangeKind,
)
from asyncrpc.core.membership.stores import StoreRendezvous
from asyncrpc.core.services.ports import Scheduler

logger = logging.getLogger("asyncrpc")

LOOK_S: Final = 10.0  # for a name, a host and a store to answer


class MeetingPointKeeper:
    """Looks after the meeting point of one member's group."""

    def __init__(self, identity: WorkerIdentity, scheduler: Scheduler) -> None:
        self._identity = identity
        self._scheduler = scheduler
        self._machine = MeetingKeeping()
        self._point: StoreRendezvous | None = None
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def begin(self, rendezvous: Rendezvous, table: Membership) -> None:
        """Look after a meeting point from now on, if it can be looked after."""
        is_kept = isinstance(rendezvous, StoreRendezvous) and bool(rendezvous.run)
        if is_kept and not table.is_static:
            assert isinstance(rendezvous, StoreRendezvous)
            self._point, self._table = rendezvous, table

    def close(self) -> None:
        """Stop: this worker leaves the group."""
        self._point = None
        if self._task is not None:
            self._task.cancel()

    def on_change(self, kind: ChangeKind | None) -> None:
        """Take note that a member has changed."""
        if self._point is None or kind is None:
            return
        present, size = self._present, self._identity.world_size
        me = self._identity.member.incarnation
        self._machine.advance(event_of_change(me, present, size))
        self._changed.set()
        if self._machine.state is KeepingState.RESTING:
            return
        if self._task is None or self._task.done():
            self._task = self._scheduler.start_task(self._keep(self._point))

    @property
    def _present(self) -> list[Member]:
        return [record.member for record in self._table.records]

    async def _keep(self, point: StoreRendezvous) -> None:
        machine = self._machine
        while True:
            state = machine.state
            self._changed.clear()
            match state:
                case KeepingState.LOOKING:
                    event = await self._look(point)
                case KeepingState.OFFERING:
                    event = await self._offer(point)
                case KeepingState.PAUSING:
                    event = await self._pause(machine.pause_s)
                case _:
                    return
            if machine.state is state:  # else something has happened meanwhile
                machine.advance(event)

    async def _look(self, point: StoreRendezvous) -> KeepingEvent:
        try:
            finding = await point.look(LOOK_S)
        except OSError:  # TimeoutError is one
            return KeepingEvent.ABSENT
        me = self._identity.member.incarnation
        event = judge(finding, point.run, me, self._present)
        if event is KeepingEvent.TAKEN:
            logger.warning(
                "worker %r: another process with this name has registered at the "
                "meeting point; this worker no longer updates it",
                self._identity.name,
            )
        return event

    async def _offer(self, point: StoreRendezvous) -> KeepingEvent:
        offered = offer_of(self._present)
        if not await point.offer(offered):
            return KeepingEvent.ABSENT
        logger.info(
            "worker %r: the meeting point now lists %d members",
            self._identity.name,
            len(offered),
        )
        return KeepingEvent.WRITTEN

    async def _pause(self, pause_s: float) -> KeepingEvent:
        try:
            async with asyncio.timeout(pause_s):
                await self._changed.wait()
        except TimeoutError:
            return KeepingEvent.TIME_UP
        return KeepingEvent.LOSS
