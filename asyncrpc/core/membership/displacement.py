"""Displacement: another worker has this one's name, so all members refuse this one."""

from __future__ import annotations

import enum
import logging
from collections.abc import Awaitable, Callable, Iterable

from asyncrpc.core.identity import WorkerIdentity
from asyncrpc.core.ids import Incarnation
from asyncrpc.core.links.link import Link
from asyncrpc.core.members import Member
from asyncrpc.core.membership.machine.records import (
    Record,
)
from asyncrpc.core.services.ports import Scheduler
from asyncrpc.errors import TransportError

logger = logging.getLogger("asyncrpc")


class NameClaim(enum.Enum):
    """What is known of this worker's claim to its name."""

    UNDISPUTED = "no other worker is known to have the name"
    CONTESTED = "this worker looks for another life of the name"
    DISPLACED = "another life has the name"


class Displacement:
    """The claim of one worker to its name.

    Attributes:
        is_known: whether a member has compared records with this worker.
    """

    def __init__(
        self,
        identity: WorkerIdentity,
        scheduler: Scheduler,
        *,
        lost_after_s: float,
        has_taken: Callable[[Member], Awaitable[bool]],
        outlive: Callable[[Record], None],
        holders: Callable[[], Awaitable[list[Incarnation]]],
        links: Callable[[], Iterable[Link]],
    ) -> None:
        self.claim = NameClaim.UNDISPUTED
        self._identity = identity
        self._scheduler = scheduler
        self._lost_after_s = lost_after_s
        self._has_taken = has_taken
        self._outlive = outlive
        self._holders = holders
        self._links = links
        self.is_known = False  # to a member that it has compared records with
        self._succeeded_s: float | None = None  # since when a member says so

    @property
    def has_happened(self) -> bool:
        """Return whether another worker has the name."""
        return self.claim is NameClaim.DISPLACED

    def contest(self, record: Record) -> None:
        """Find out whether a later life of the name answers."""
        if self.claim is NameClaim.UNDISPUTED:
            self.claim = NameClaim.CONTESTED
            self._scheduler.start_task(self._contend(record))

    async def _contend(self, record: Record) -> None:
        try:
            is_there = await self._has_taken(record.member)
        except (TransportError, TimeoutError):
            is_there = False
        where = ", ".join(record.member.addresses)
        if is_there and await self._must_yield():
            self._on_displaced(where)
            return
        self._outlive(record)
        if not is_there:
            self.claim = NameClaim.UNDISPUTED
            return
        # It may say so again at once: one answer is enough for a while.
        loop = self._scheduler.loop
        loop.call_later(self._lost_after_s, self._on_rested)
        logger.error(
            "worker %r: another worker answers to its name at %s; the members know "
            "this one, which keeps it: shut the other one down",
            self._identity.name,
            where,
        )

    def _on_rested(self) -> None:
        if self.claim is NameClaim.CONTESTED:
            self.claim = NameClaim.UNDISPUTED

    async def _must_yield(self) -> bool:
        """Return whether another life that answers has the name.

        Whoever says so and answers under the name may be anybody.  So a worker that
        members have known for a while keeps it, unless more of them know the other.
        """
        if not self.is_known:
            return True
        held = await self._holders()
        ours = held.count(self._identity.incarnation)
        return ours == 0 or len(held) - ours > ours

    def on_succeeded(self, by: str, now_s: float) -> None:
        """Record that a member takes this worker for a former life of its name.

        The member may not know yet which of two lives is the later; the others tell it.
        """
        if self._succeeded_s is None:
            self._succeeded_s = now_s
        elif now_s - self._succeeded_s >= self._lost_after_s and not any(
            link.peer.name != by for link in self._links()
        ):
            self._on_displaced(f"as {by!r} says")

    def on_accepted(self) -> None:
        """Record that a member accepts this worker's identity."""
        self._succeeded_s = None
        self.is_known = True

    def _on_displaced(self, where: str) -> None:
        if self.claim is NameClaim.DISPLACED:
            return
        self.claim = NameClaim.DISPLACED
        logger.error(
            "worker %r: another worker (%s) has taken its name, so all members "
            "refuse this one; shut it down",
            self._identity.name,
            where,
        )
        for link in self._links():
            link.connection.close("another worker has its name now")
