"""Messages of other workers about references, and their loss: fed to the tables."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Final, TypeVar

from asyncrpc.core.ids import Incarnation, RRefId, WorkerId
from asyncrpc.core.rref import machine as m
from asyncrpc.core.rref.messages import (
    Gone,
    Probe,
    Register,
    Registered,
    Release,
    Returned,
    Settled,
)
from asyncrpc.core.rref.names import PeerNames
from asyncrpc.core.rref.notices import Notices
from asyncrpc.core.rref.shared import SharedById
from asyncrpc.core.rref.tables import REFERENCE_BYTES, Tables
from asyncrpc.core.services.ports import PeerLink
from asyncrpc.core.services.router import takes
from asyncrpc.core.services.schema import Notice
from asyncrpc.errors import OverloadedError, RemoteProtocolError

N = TypeVar("N", bound=Notice)

# References of a lost worker, some 2 us each.
LOST_IN_A_TURN: Final = 4096


class IncomingNotices:
    """The protocol's own messages as they come, and workers that go and come back."""

    def __init__(
        self,
        tables: Tables,
        names: PeerNames,
        notices: Notices,
        shared: SharedById,
        settle: Callable[[], None],
        *,
        call_soon: Callable[..., object],
    ) -> None:
        """Prepare to take messages.

        Args:
            notices: to workers; those to a lost one are dropped.
            shared: state of handles; that of a lost worker's values fails.
        """
        heard = self._heard
        self.routes = (
            takes(Register, heard(self._take_register)),
            takes(Registered, heard(self._take_registered)),
            takes(Gone, heard(self._take_gone)),
            takes(Probe, heard(self._take_probe)),
            takes(Settled, heard(self._take_settled)),
            takes(Release, heard(self._take_release)),
            takes(Returned, heard(self._take_returned)),
        )
        self._owner, self._user = tables.owner, tables.user
        self._carry_out = tables.carry_out
        self._names = names
        self._notices = notices
        self._shared = shared
        self._settle = settle
        self._call_soon = call_soon
        self._losing: set[Incarnation] = set()

    def _heard(
        self, take: Callable[[PeerLink, N], None]
    ) -> Callable[[PeerLink, N], None]:
        """Return a handler that feeds the machines, unless the sender is lost."""

        def take_from(link: PeerLink, notice: N) -> None:
            if link.is_lost:
                return  # of a time that both ends have declared over
            self.meet(link)
            self._names.note(link.peer)
            take(link, notice)

        return take_from

    def _take_release(self, link: PeerLink, notice: Release) -> None:
        """Take back forks; a wrong entry does not affect the others."""
        problem: RemoteProtocolError | None = None
        from_ = link.peer.incarnation
        for rref_id, forks in notice.released:
            try:
                self._carry_out(self._owner.release(rref_id, from_, forks))
            except RemoteProtocolError as error:
                problem = problem or error
        if problem is not None:
            raise problem

    def _take_returned(self, link: PeerLink, notice: Returned) -> None:
        self.take_back(link.peer.incarnation, notice.tokens)

    def take_back(self, from_: Incarnation, tokens: Iterable[int]) -> None:
        """Take back loans; a wrong one does not affect the others."""
        problem: RemoteProtocolError | None = None
        for token in tokens:
            try:
                self._carry_out(self._user.loan_returned(token, from_))
            except RemoteProtocolError as error:
                problem = problem or error
        if problem is not None:
            raise problem

    def _take_register(self, link: PeerLink, notice: Register) -> None:
        rref_id, from_ = notice.rref_id, link.peer.incarnation
        if self._owner.state(rref_id) is not m.EntryState.LIVE:
            try:
                link.check_room(REFERENCE_BYTES)
            except OverloadedError:
                self._carry_out((m.SendGone(from_, rref_id),))
                raise
        self._carry_out(self._owner.register(rref_id, from_))

    def _take_registered(self, link: PeerLink, notice: Registered) -> None:
        self._check_owner(notice.rref_id, link)
        self._carry_out(self._user.registered(notice.rref_id))

    def _take_gone(self, link: PeerLink, notice: Gone) -> None:
        self._check_owner(notice.rref_id, link)
        self._carry_out(self._user.gone(notice.rref_id))

    def _check_owner(self, rref_id: RRefId, link: PeerLink) -> None:
        """Refuse a message about a value that does not come from its owner."""
        holding = self._user.get(rref_id)
        if holding is not None and holding.owner != link.peer.incarnation:
            raise RemoteProtocolError(
                f"worker {link.peer.name!r} wrote about {rref_id}, which "
                f"worker {self._names.shown(holding.owner)!r} owns"
            )

    def _take_probe(self, link: PeerLink, notice: Probe) -> None:
        self._carry_out(self._user.probe(notice.rref_id, link.peer.incarnation))

    def _take_settled(self, link: PeerLink, notice: Settled) -> None:
        self._carry_out(self._owner.settled(notice.rref_id, link.peer.incarnation))

    # --- workers that go and come back -----------------------------------------------

    def on_peer_lost(self, peer: WorkerId, reason: str) -> None:
        """Drop what a lost worker held; fail what it owned."""
        self._settle()
        self._notices.forget(peer.incarnation)
        self._shared.lose_owner(peer, reason)
        self._carry_out(self._user.worker_lost(peer.incarnation))
        self._losing.add(peer.incarnation)
        self._go_on_losing(peer.incarnation)

    def _go_on_losing(self, lost: Incarnation, at_most: int = LOST_IN_A_TURN) -> None:
        """Drop some of what a lost worker held, and the rest in later turns."""
        if lost not in self._losing:
            return
        self._carry_out(self._owner.worker_lost(lost, at_most))
        if self._owner.kept_for(lost):
            self._call_soon(self._go_on_losing, lost)
            return
        self._losing.discard(lost)
        self._notices.forget(lost)
        self._names.forget(lost)

    def on_peer_back(self, peer: WorkerId) -> None:
        """Begin anew with a worker that was declared lost, and lives.

        What was lost stays lost: its handles here fail, and it holds nothing here.
        """
        self._settle()
        self._go_on_losing(peer.incarnation, sys.maxsize)
        self._owner.forgive(peer.incarnation)
        self._carry_out(self._user.forgive(peer.incarnation))

    def meet(self, link: PeerLink) -> None:
        """Record that a link to a worker is open, which may have been lost before.

        A worker may have been declared lost here alone, since it could not be reached.
        """
        peer = link.peer
        if self._user.is_lost(peer.incarnation) and not link.is_lost:
            self.on_peer_back(peer)
