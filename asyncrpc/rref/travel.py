"""How references travel in messages: counted when encoded, counted when decoded.

A reference goes as [creator, serial, owner, owner's name, form, token].
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from asyncrpc.errors import (
    DecodeError,
    EncodeError,
    RemoteProtocolError,
)
from asyncrpc.ids import Incarnation, RRefId, WorkerId
from asyncrpc.rref import machine as m
from asyncrpc.rref.handle import RRef
from asyncrpc.rref.pins import MessagePins, Shared
from asyncrpc.rref.table import RRefTable
from asyncrpc.runtime.membership.members import UNKNOWN_INCARNATION
from asyncrpc.runtime.ports import PeerLink
from asyncrpc.runtime.worker import Worker

FORK, LOAN, HOME = 0, 1, 2  # from its owner; from another holder; to this worker itself


class Travel(RRefTable):
    """A `runtime.extensions.References`, as far as messages go."""

    handled: tuple[type, ...] = (RRef,)

    def __init__(self, worker: Worker) -> None:
        super().__init__(worker)
        self._link: PeerLink | None = None  # of the message at hand
        self._pins: MessagePins | None = None
        self._loans: list[tuple[RRefId | None, Incarnation, int]] = []
        self.lifted = 0

    def begin_encode(self, link: PeerLink) -> None:
        """A message to the other end of `link` is about to be encoded."""
        self._link = link
        self.meet(link)

    def end_encode(self, *, sent: bool) -> MessagePins | None:
        """It has been, or could not be."""
        pins, self._pins, self._link = self._pins, None, None
        if pins is not None and not sent:
            pins.undo()
            return None
        return pins

    def lower(self, value: RRef[Any]) -> object:
        """Return what travels in place of a reference, and count it."""
        link, shared = self._link, value._shared  # noqa: SLF001
        if link is None:
            raise EncodeError("an RRef can only travel in a call or its result")
        if self._notes:
            self.settle_notes()  # a handle made in a thread may not be counted yet
        if value._service is not self:  # noqa: SLF001
            raise EncodeError(f"{value!r} belongs to another worker of this process")
        shared.check()
        to = link.peer.incarnation
        if self._pins is None:
            self._pins = MessagePins(self, link)
        owner = shared.owner
        form, token = HOME, 0
        if to == self._me:
            self._count_handle(shared)
            self._pins.add_at_home(shared)
        elif shared.is_here:
            form = FORK
            self._owner.hand_out(value.rref_id, to)
            self._pins.add_fork(value.rref_id)
        elif owner.incarnation == UNKNOWN_INCARNATION:
            raise EncodeError(
                f"{value!r} cannot be sent yet: its owner has not been reached; await "
                "the reference, or any call of that worker, first"
            )
        else:
            form = LOAN
            token = self._pins.add_loan(self._user.lend(value.rref_id, to))
        return [*value.rref_id, owner.incarnation, owner.name, form, token]

    def begin_decode(self, link: PeerLink) -> None:
        """A message from the other end of `link` is about to be decoded."""
        self._link = link
        self._loans = []
        self.lifted = 0
        self.meet(link)

    def end_decode(self) -> Any:
        """It has been; return the loans that it brought."""
        self._link = None
        loans, self._loans = self._loans, []
        return loans or None

    def lift(self, tree: Any) -> RRef[Any]:
        """Make a handle of a reference that has arrived, and count it."""
        link = self._link
        self.lifted += 1
        rref_id, owner, form, token = _read_reference(tree)
        if link is None:
            raise DecodeError("an RRef outside of a call")
        if link.is_lost:
            raise DecodeError("an RRef from a worker that was lost meanwhile")
        sender = link.peer.incarnation
        self._names.setdefault(owner.incarnation, owner.name)  # hearsay renames nobody
        if form == HOME and sender != self._me:
            raise DecodeError("an RRef that claims to have stayed at home")
        if form == HOME:  # its count came with it
            return self.handle_class._make(self.whole, self._shared_of(rref_id, owner))
        if owner.incarnation == self._me:
            return self._lift_own(rref_id, sender, token)
        if form == FORK:
            if owner.incarnation != sender:
                raise DecodeError("an RRef that its owner did not send")
            effects = self._user.receive_fork(rref_id, sender)
        else:
            effects = self._user.borrow(rref_id, owner.incarnation, sender, token)
            self._loans.append((rref_id, sender, token))
        handle = self.handle_class._make(self.whole, self._shared_of(rref_id, owner))
        self._carry_out(effects)
        return handle

    def _lift_own(self, rref_id: RRefId, sender: Incarnation, token: int) -> RRef[Any]:
        """A reference to a value of this worker has come back to it."""
        effects = self._owner.came_home(rref_id)
        self.whole.value(rref_id)
        if token:
            self._loans.append((None, sender, token))
        shared = self._shared_of(rref_id, self.worker.id)
        handle = self.handle_class._make(self.whole, shared)
        self._carry_out(effects)
        return handle

    def _count_handle(self, shared: Shared) -> None:
        if shared.is_here:
            self._owner.local_acquire(shared.rref_id)
        else:
            self._user.add_handle(shared.rref_id)

    def drop_all(self, at_home: Iterable[Shared]) -> None:
        """Drop the counts of references that were to go to this worker itself."""
        for shared in at_home:
            self._note(self._dropped, shared)

    def settle_loans(self, link: PeerLink, loans: Any, *, answered: bool) -> list[int]:
        """The call is over: return the loans that go back with its answer."""
        self.settle_notes()
        if link.is_lost:
            return []  # and all that it lent with it
        to = link.peer.incarnation if answered else None
        here: list[int] = []
        for rref_id, lender, token in loans:
            if rref_id is None:  # a value of this worker, which looks after itself
                effects: list[m.Effect] = [m.SendLoanReturned(lender, token)]
            else:
                effects = self._user.settle(rref_id, lender, token)
            for effect in effects:
                if type(effect) is m.SendLoanReturned and effect.to == to:
                    here.append(effect.token)
                else:
                    self._carry_out((effect,))
        return here

    def take_back(self, from_: Incarnation, tokens: Iterable[int]) -> None:
        """Take back loans that came with an answer; a wrong one spoils no other.

        Raises:
            RemoteProtocolError: that worker does not have one of them.
        """
        problem: RemoteProtocolError | None = None
        for token in tokens:
            try:
                self._carry_out(self._user.loan_returned(token, from_))
            except RemoteProtocolError as error:
                problem = problem or error
        if problem is not None:
            raise problem

    def undo(self, to: Incarnation, forks: list[RRefId], loans: list[int]) -> None:
        """Take back what a message counted that nobody has read."""
        effects: list[m.Effect] = []
        for rref_id in forks:
            effects += self._owner.undo_hand_out(rref_id, to)
        for token in loans:
            effects += self._user.undo_lend(token)
        self._carry_out(effects)


def _read_reference(tree: Any) -> tuple[RRefId, WorkerId, int, int]:
    types = (int, int, int, str, int, int)
    if type(tree) is not list or len(tree) != len(types):
        raise DecodeError("an RRef that is no array of six")
    if any(type(value) is not kind for value, kind in zip(tree, types, strict=True)):
        raise DecodeError("an RRef with fields of the wrong types")
    creator, serial, incarnation, name, form, token = tree
    owner = WorkerId(name, Incarnation(incarnation))
    return RRefId(Incarnation(creator), serial), owner, form, token
