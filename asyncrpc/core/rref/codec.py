"""How references travel in messages: counted when encoded, counted when decoded.

A reference goes as [creator, serial, owner, owner's name, form, token].

What a message with references relies on, until its receiver has answered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from asyncrpc.core.ids import Incarnation, RRefId, WorkerId, is_name
from asyncrpc.core.members import UNKNOWN_INCARNATION
from asyncrpc.core.rref import machine as m
from asyncrpc.core.rref.handle import RRef, service_of, shared_of
from asyncrpc.core.rref.handles import Handles
from asyncrpc.core.rref.names import PeerNames
from asyncrpc.core.rref.shared import Shared, SharedById
from asyncrpc.core.rref.tables import Tables
from asyncrpc.core.rref.values import Values
from asyncrpc.core.services.ports import PeerLink
from asyncrpc.errors import DecodeError, EncodeError


class MessagePins:
    """What one sent message relies on; a `runtime.extensions.Pins`."""

    __slots__ = ("_at_home", "_codec", "_forks", "_link", "_loans")

    def __init__(self, codec: ReferenceCodec, link: PeerLink) -> None:
        self._codec = codec
        self._link = link
        self._forks: list[RRefId] = []  # counted at the owner, which is this worker
        self._loans: list[int] = []  # to be returned by the receiver
        self._at_home: list[Shared] = []  # sent to this worker itself

    def add_fork(self, rref_id: RRefId) -> None:
        """Count a fork of a value of ours that travels."""
        self._forks.append(rref_id)

    def add_loan(self, token: int) -> int:
        """Count a loan that travels; return its token."""
        self._loans.append(token)
        return token

    def add_at_home(self, shared: Shared) -> None:
        """Count a reference to this worker itself: its count travels with it."""
        self._at_home.append(shared)

    def on_sent(self) -> None:
        """Do nothing: the receiver returns its loans."""

    def undo(self) -> None:
        """Take the counts back: the message was not sent, or not to its end."""
        # The count of a lost peer went with it; an incarnation that came back has
        # another.
        forks = [] if self._link.is_lost else self._forks
        self._codec.undo(self._link.peer.incarnation, forks, self._loans)
        self._codec.drop_all(self._at_home)
        self._forks, self._loans, self._at_home = [], [], []


_GONE = m.EntryState.GONE
FORK, LOAN, HOME = 0, 1, 2  # from its owner; from another holder; to this worker itself


class ReferenceCodec:
    """References in the message at hand: a `runtime.extensions.References`, in part.

    Attributes:
        lifted: how many references of the message being decoded have been rebuilt.
    """

    def __init__(
        self,
        me: WorkerId,
        *,
        tables: Tables,
        handles: Handles,
        shared: SharedById,
        values: Values,
        names: PeerNames,
        meet: Callable[[PeerLink], None],
    ) -> None:
        self.lifted = 0
        self._me = me
        self._owner, self._user = tables.owner, tables.user
        self._carry_out = tables.carry_out
        self._handles = handles
        self._shared = shared
        self._values = values
        self._names = names
        self._meet = meet
        self._link: PeerLink | None = None  # of the message at hand
        self._pins: MessagePins | None = None
        self._loans: list[tuple[RRefId | None, Incarnation, int]] = []

    def begin_encode(self, link: PeerLink) -> None:
        """Begin to encode a message to the other end of `link`."""
        self._link = link
        self._meet(link)

    def end_encode(self, *, sent: bool) -> MessagePins | None:
        """End the encoding of a message, which was sent or could not be."""
        pins, self._pins, self._link = self._pins, None, None
        if pins is not None and not sent:
            pins.undo()
            return None
        return pins

    def lower(self, value: RRef[Any]) -> object:
        """Return what travels in place of a reference, and count it."""
        link, shared = self._link, shared_of(value)
        if link is None:
            raise EncodeError("an RRef can only travel in a call or its result")
        self._handles.settle()  # a handle made in a thread may not be counted yet
        if service_of(value) is not self._handles.service:
            raise EncodeError(f"{value!r} belongs to another worker of this process")
        shared.check()
        to = link.peer.incarnation
        pins = self._pins
        if pins is None:
            pins = self._pins = MessagePins(self, link)
        owner = shared.owner
        form, token = HOME, 0
        if to == self._me.incarnation:
            self._handles.count(shared)
            pins.add_at_home(shared)
        elif shared.is_here:
            form = FORK
            self._owner.hand_out(value.rref_id, to)
            pins.add_fork(value.rref_id)
        elif owner.incarnation == UNKNOWN_INCARNATION:
            raise EncodeError(
                f"{value!r} cannot be sent yet: its owner has not been reached; await "
                "the reference, or any call of that worker, first"
            )
        else:
            form = LOAN
            token = pins.add_loan(self._user.lend(value.rref_id, to))
        return [*value.rref_id, owner.incarnation, owner.name, form, token]

    def begin_decode(self, link: PeerLink) -> None:
        """Begin to decode a message from the other end of `link`."""
        self._link = link
        self._loans = []
        self.lifted = 0
        self._meet(link)

    def end_decode(self) -> Any:
        """End the decoding of a message; return the loans that it brought."""
        self._link = None
        loans, self._loans = self._loans, []
        return loans or None

    def lift(self, tree: Any) -> RRef[Any]:
        """Make a handle of a reference that has arrived, and count it."""
        link = self._link
        self.lifted += 1
        rref_id, owner, form, token = _read_reference(tree)
        if link is None:
            raise DecodeError("an RRef arrived outside of a call")
        if link.is_lost:
            raise DecodeError("an RRef arrived from a worker that was lost meanwhile")
        sender = link.peer.incarnation
        self._names.note_hearsay(owner)
        if form == HOME and sender != self._me.incarnation:
            raise DecodeError("an RRef of another worker is marked as sent to itself")
        if form == HOME:  # its count came with it
            return self._handles.make(self._shared.of(rref_id, owner))
        if form == FORK and owner.incarnation != sender:
            raise DecodeError("an RRef is marked as sent by its owner, but was not")
        known = self._other_owner(rref_id, owner.incarnation)
        if known is not None:
            self._send_back(link, rref_id, form, token)
            raise DecodeError(
                f"worker {link.peer.name!r} sent {rref_id} as a value of worker "
                f"{owner.name!r}, but it is of worker {self._names.shown(known)!r}"
            )
        if owner.incarnation == self._me.incarnation:
            return self._lift_own(rref_id, sender, token)
        if form == FORK:
            effects = self._user.receive_fork(rref_id, sender)
        else:
            effects = self._user.borrow(rref_id, owner.incarnation, sender, token)
            self._loans.append((rref_id, sender, token))
        handle = self._handles.make(self._shared.of(rref_id, owner))
        self._carry_out(effects)
        return handle

    def _other_owner(self, rref_id: RRefId, claimed: Incarnation) -> Incarnation | None:
        """Return the owner of a value that is known here, unless it is as claimed.

        Who knows the number of a value cannot make it another worker's.
        """
        shared, holding = self._shared.get(rref_id), self._user.get(rref_id)
        if shared is None and holding is None and self._owner.state(rref_id) is _GONE:
            return None  # nearly always, for one that comes for the first time
        known = [] if shared is None else [shared.owner.incarnation]
        known += [] if holding is None else [holding.owner]
        if self._owner.state(rref_id) is m.EntryState.LIVE:
            known.append(self._me.incarnation)
        expected = claimed, UNKNOWN_INCARNATION
        return next((owner for owner in known if owner not in expected), None)

    def _send_back(
        self, link: PeerLink, rref_id: RRefId, form: int, token: int
    ) -> None:
        """Give back a reference that is not taken: its sender counts it as arrived."""
        sender = link.peer.incarnation
        if form == FORK:
            self._carry_out((m.SendRelease(sender, rref_id, 1),))
        else:
            self._carry_out((m.SendLoanReturned(sender, token),))

    def _lift_own(self, rref_id: RRefId, sender: Incarnation, token: int) -> RRef[Any]:
        """Make a handle of a reference to a value of this worker that has come back."""
        effects = self._owner.came_home(rref_id)
        self._values.expect(rref_id)
        if token:
            self._loans.append((None, sender, token))
        handle = self._handles.make(self._shared.of(rref_id, self._me))
        self._carry_out(effects)
        return handle

    # --- what a message counted, after it has been sent or read ----------------------

    def settle_loans(self, link: PeerLink, loans: Any, *, answered: bool) -> list[int]:
        """Settle a call's loans at its end; return those that its answer takes back."""
        self._handles.settle()
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

    def undo(self, to: Incarnation, forks: list[RRefId], loans: list[int]) -> None:
        """Take back the counts of a message that was not read."""
        effects: list[m.Effect] = []
        for rref_id in forks:
            effects += self._owner.undo_hand_out(rref_id, to)
        for token in loans:
            effects += self._user.undo_lend(token)
        self._carry_out(effects)

    def drop_all(self, at_home: Iterable[Shared]) -> None:
        """Drop the counts of references that were to go to this worker itself."""
        self._handles.drop_all(at_home)


def _read_reference(tree: Any) -> tuple[RRefId, WorkerId, int, int]:
    types = (int, int, int, str, int, int)
    if type(tree) is not list or len(tree) != len(types):
        raise DecodeError("an RRef must be an array of six fields")
    if any(type(value) is not kind for value, kind in zip(tree, types, strict=True)):
        raise DecodeError("an RRef has fields of the wrong types")
    creator, serial, incarnation, name, form, token = tree
    if name and not is_name(name):
        raise DecodeError("an RRef names an owner that no worker can be")
    owner = WorkerId(name, Incarnation(incarnation))
    return RRefId(Incarnation(creator), serial), owner, form, token
