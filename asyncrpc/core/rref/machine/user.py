"""A user's side: what this worker holds of other workers' values.

Whatever can change a holding's state is in this file.  The picture of `TRANSITIONS` in
docs/reference/rref-protocol.md is generated: edit the table, not the picture.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from asyncrpc.core.ids import Incarnation, RRefId
from asyncrpc.core.rref.machine.effects import (
    Effect,
    FindOwner,
    HandlesApart,
    HandlesLost,
    LossCause,
    SendLoanReturned,
    SendRegister,
    SendRelease,
    SendSettled,
)
from asyncrpc.core.rref.machine.index import Index, Tombstones
from asyncrpc.core.state_table import StateTable
from asyncrpc.errors import (
    LocalProtocolError,
    RemoteProtocolError,
    RRefDeletedError,
)


class HoldingState(enum.Enum):
    PENDING = "pending"  # made by our remote(), not confirmed by the owner
    BORROWED = "borrowed"  # lent by a third worker; the owner does not know of us
    REGISTERING = "registering"  # we keep it, and have asked the owner to count us
    CONFIRMED = "confirmed"  # the owner counts us
    LOST = "lost"  # the value is gone, or was never made
    RELEASED = "released"  # given back: no longer in the table

    __hash__ = object.__hash__  # Enum's is written in Python


class HoldingEvent(enum.Enum):
    CONFIRM = "confirmed by owner"
    REFUSE = "refused or never sent"
    FORK = "fork from owner"
    LOAN = "loan from lender"
    KEEP = "kept after the call, or lender lost"
    REGISTERED = "registered"
    GONE = "gone"
    LET_GO = "no handle, no pin"
    OWNER_LOST = "owner lost"

    __hash__ = object.__hash__


PENDING, BORROWED, REGISTERING, CONFIRMED, LOST, RELEASED = HoldingState
_E = HoldingEvent

TRANSITIONS: Final = StateTable(
    "a reference",
    {
        PENDING: {
            _E.CONFIRM: CONFIRMED,
            _E.REFUSE: LOST,
            _E.FORK: PENDING,
            _E.LOAN: PENDING,
            _E.OWNER_LOST: LOST,
        },
        BORROWED: {
            _E.FORK: CONFIRMED,
            _E.LOAN: BORROWED,
            _E.KEEP: REGISTERING,
            _E.LET_GO: RELEASED,
            _E.OWNER_LOST: LOST,
        },
        REGISTERING: {
            _E.FORK: REGISTERING,  # the answer is still to come, and counts one more
            _E.LOAN: REGISTERING,
            _E.REGISTERED: CONFIRMED,
            _E.GONE: LOST,
            _E.OWNER_LOST: LOST,
        },
        CONFIRMED: {
            _E.FORK: CONFIRMED,
            _E.LOAN: CONFIRMED,
            _E.LET_GO: RELEASED,
            _E.OWNER_LOST: LOST,
        },
        LOST: {
            _E.FORK: LOST,  # decoded after the loss
            _E.LOAN: LOST,
            _E.LET_GO: RELEASED,
        },
        RELEASED: {},  # a later fork or loan starts a new holding
    },
    error=RemoteProtocolError,
)


class Debt(NamedTuple):
    """A loan as the borrower sees it."""

    lender: Incarnation
    token: int


@dataclass(slots=True)
class Holding:
    """This worker's share in one RRef of another worker.

    Attributes:
        forks: given by the owner and not given back.
        pins: messages of ours, and loans, that rely on this holding (G2).
        debts: loans to return, in order of arrival; true while the call that brought
            one still runs.
        is_probed: the owner has asked whether our remote() is still to come.
    """

    owner: Incarnation
    state: HoldingState
    forks: int = 0
    handles: int = 0
    pins: int = 0
    cause: LossCause | None = None
    debts: dict[Debt, bool] = field(default_factory=dict)
    is_probed: bool = False


class _Loan(NamedTuple):
    """A reference on its way to another worker, or there."""

    rref_id: RRefId
    borrower: Incarnation
    holding: Holding


class UserTable:
    """The RRefs of other workers that this one refers to.

    Thread safety: none; all calls on the worker's loop.
    """

    def __init__(self) -> None:
        self._holdings: dict[RRefId, Holding] = {}
        self._loans: dict[int, _Loan] = {}
        self._last_token = 0
        self._held_from: Index[Incarnation, RRefId] = Index()
        self._owed_to: Index[Incarnation, tuple[RRefId, Debt]] = Index()
        self._lent_to: Index[Incarnation, int] = Index()
        self._dead = Tombstones()

    def __len__(self) -> int:
        return len(self._holdings)

    def __iter__(self) -> Iterator[RRefId]:
        return iter(tuple(self._holdings))

    def get(self, rref_id: RRefId) -> Holding | None:
        """Return the holding, to look at; only this table changes it."""
        return self._holdings.get(rref_id)

    # Handles, and calls of ours.

    def create(self, rref_id: RRefId, owner: Incarnation) -> None:
        """Begin a remote(), with the one handle that it returns.

        The owner may have been lost before: the call itself shows whether it is back.
        """
        if rref_id in self._holdings:
            raise LocalProtocolError(f"{rref_id} is taken: count ids, never reuse one")
        self._open(rref_id, owner, PENDING).handles = 1

    def rebind(self, rref_id: RRefId, owner: Incarnation) -> None:
        """Note which incarnation a remote() is about to be sent to, if not yet known.

        Nothing else may have been sent about the RRef.
        """
        holding = self._holdings.get(rref_id)
        if holding is not None and holding.state is PENDING:
            self._held_from.discard(holding.owner, rref_id)
            self._held_from.add(owner, rref_id)
            holding.owner = owner

    def add_handle(self, rref_id: RRefId) -> None:
        """Count a copy of a live handle."""
        holding = self._holdings.get(rref_id)
        if holding is None or not holding.handles:
            raise LocalProtocolError(f"{rref_id} has no handle here to copy")
        holding.handles += 1

    def drop_handle(self, rref_id: RRefId) -> list[Effect]:
        """Forget one handle; the last one may give the RRef back."""
        holding = self._holdings.get(rref_id)
        if holding is None or not holding.handles:
            raise LocalProtocolError(f"{rref_id} has no handle here to drop")
        holding.handles -= 1
        return self._review(rref_id, holding)

    def lend(self, rref_id: RRefId, to: Incarnation) -> int:
        """Pin the RRef for a message to `to`, which may be its owner."""
        holding = self._holdings.get(rref_id)
        if holding is None:
            raise LocalProtocolError(
                f"{rref_id} is not held here, so it cannot be sent"
            )
        if holding.state is LOST:
            cause = holding.cause.value if holding.cause else ""
            raise RRefDeletedError(f"{rref_id} cannot be sent: {cause}; make it again")
        if to in self._dead:
            return 0
        # The owner needs a loan too: our release would overtake a message whose payload
        # is still on its way, or in the hands of a thread that unpacks it.
        self._last_token += 1
        self._loans[self._last_token] = _Loan(rref_id, to, holding)
        self._lent_to.add(to, self._last_token)
        holding.pins += 1
        return self._last_token

    def undo_lend(self, token: int) -> list[Effect]:
        """End a loan whose message was never sent, not even in part."""
        if token not in self._loans:
            return []  # the receiver has died meanwhile
        return self._end_loan(token)

    # Messages from the owner.

    def confirmed(self, rref_id: RRefId) -> list[Effect]:
        """Note that our remote() has reached the owner, which counts us.

        Call it too if the function then raised: the owner counts us all the same.
        """
        holding = self._advance(rref_id, HoldingEvent.CONFIRM)
        holding.forks += 1
        return self._review(rref_id, holding)

    def refused(self, rref_id: RRefId) -> list[Effect]:
        """Note that our remote() was not accepted, or never sent.

        Only if that is certain (`Outcome.NOT_EXECUTED`).  If it is not, as after a
        timeout, wait for the owner's confirmation or death: it may count us, and a fork
        that we disown would never be given back.
        """
        known = self._holdings.get(rref_id)
        if known is None or known.state is LOST:
            return []  # the owner has died meanwhile
        holding = self._advance(rref_id, HoldingEvent.REFUSE)
        effects: list[Effect] = []
        if holding.is_probed:
            effects.append(SendSettled(holding.owner, rref_id))
        return effects + self._lose(rref_id, holding, LossCause.NEVER_MADE)

    def receive_fork(self, rref_id: RRefId, owner: Incarnation) -> list[Effect]:
        """Take a fork that the owner sent, with one handle.

        If the message cannot be decoded, call this and `drop_handle` all the same.
        """
        holding = self._arrive(rref_id, owner, CONFIRMED, HoldingEvent.FORK)
        if owner in self._dead:  # sent before its loss, decoded after
            return self._lose_with_owner(rref_id, holding)
        if holding.cause is not None:  # of a value never made
            lost = HandlesLost(rref_id, holding.cause)
            return [lost, SendRelease(owner, rref_id, 1)]
        holding.forks += 1
        if holding.state is CONFIRMED:
            return self._return_debts(rref_id, holding)
        return []

    def registered(self, rref_id: RRefId) -> list[Effect]:
        """Note that the owner counts us: the lenders need not hold on."""
        holding = self._advance(rref_id, HoldingEvent.REGISTERED)
        holding.forks += 1
        effects = self._return_debts(rref_id, holding)
        return effects + self._review(rref_id, holding)

    def gone(self, rref_id: RRefId) -> list[Effect]:
        """Note that the value is gone: a lender died before we were counted."""
        holding = self._advance(rref_id, HoldingEvent.GONE)
        return self._lose(rref_id, holding, LossCause.FREED)

    def probe(self, rref_id: RRefId, from_: Incarnation) -> list[Effect]:
        """Answer a worker to which `rref_id` was mentioned before our remote().

        No answer if the remote() to it is under way: that is the answer.  Whoever else
        asks makes no value of it, and hears so: he would wait for ever.
        """
        holding = self._holdings.get(rref_id)
        if holding is None or holding.state is not PENDING or holding.owner != from_:
            return [SendSettled(from_, rref_id)]
        holding.is_probed = True
        return []

    # Messages from borrowers and lenders.

    def borrow(
        self, rref_id: RRefId, owner: Incarnation, lender: Incarnation, token: int
    ) -> list[Effect]:
        """Take a loan, with one handle; `settle` it when the call that brought it ends.

        A loan that came in a response is settled at once.  If the message cannot be
        decoded, call this, `drop_handle` and `settle` all the same.
        """
        holding = self._arrive(rref_id, owner, BORROWED, HoldingEvent.LOAN)
        effects: list[Effect] = []
        if holding.cause is not None:
            effects = [HandlesLost(rref_id, holding.cause)]
        elif owner in self._dead:
            effects = [FindOwner(owner)]  # the lender, it seems, has not lost it
        return effects + self._owe(rref_id, holding, lender, token)

    def _owe(
        self, rref_id: RRefId, holding: Holding, lender: Incarnation, token: int
    ) -> list[Effect]:
        if holding.state is not BORROWED and holding.state is not REGISTERING:
            return [SendLoanReturned(lender, token)]  # we hold it in our own right
        if lender in self._dead or not token:
            return self._review(rref_id, holding)  # no other worker holds it for us
        debt = Debt(lender, token)
        holding.debts[debt] = True
        self._owed_to.add(lender, (rref_id, debt))
        return []

    def settle(self, rref_id: RRefId, lender: Incarnation, token: int) -> list[Effect]:
        """End the call that brought a loan; drop its handles first."""
        holding = self._holdings.get(rref_id)
        debt = Debt(lender, token)
        if holding is None or debt not in holding.debts:
            return []  # returned already, or its lender is dead
        holding.debts[debt] = False
        return self._review(rref_id, holding)

    def loan_returned(self, token: int, from_: Incarnation) -> list[Effect]:
        """Take back a loan."""
        loan = self._loans.get(token)
        if loan is None or loan.borrower != from_:
            raise RemoteProtocolError(
                f"worker {from_:016x} returned loan {token}, which it does not have"
            )
        return self._end_loan(token)

    def worker_lost(self, incarnation: Incarnation) -> list[Effect]:
        """Act on the loss of an owner, a lender or a borrower, or all in one."""
        self._dead.add(incarnation)
        effects: list[Effect] = []
        orphans = self._void_debts(incarnation)
        for rref_id in self._held_from.get(incarnation):
            if self._holdings[rref_id].state is not LOST:
                effects += self._lose_with_owner(rref_id, self._holdings[rref_id])
        for token in self._lent_to.pop(incarnation):
            effects += self._end_loan(token)
        for rref_id, lost_first in orphans.items():
            orphan = self._holdings.get(rref_id)
            if orphan is None:
                continue
            if lost_first and orphan.pins and orphan.state is BORROWED:
                effects += self._register(rref_id, orphan)
            else:
                effects += self._review(rref_id, orphan)
        return effects

    def _void_debts(self, lender: Incarnation) -> dict[RRefId, bool]:
        """Forget the loans of a worker; return by holding whether one was the first."""
        orphans: dict[RRefId, bool] = {}
        for rref_id, debt in self._owed_to.pop(lender):
            debts = self._holdings[rref_id].debts
            is_first = next(iter(debts)) == debt
            orphans[rref_id] = orphans.get(rref_id, False) or is_first
            del debts[debt]
        return orphans

    def is_lost(self, incarnation: Incarnation) -> bool:
        """Return whether a worker was lost and has not come back."""
        return incarnation in self._dead

    def forgive(self, incarnation: Incarnation) -> list[Effect]:
        """Begin anew with a worker that was declared lost, and lives.

        What was lost with it stays lost, apart from this table: so a reference that it
        sends from now on is another one.  Nothing of the time before may be fed to this
        table any more.
        """
        if incarnation not in self._dead:
            return []
        self._dead.discard(incarnation)
        effects: list[Effect] = []
        for rref_id in self._held_from.get(incarnation):
            if self._holdings[rref_id].state is LOST:
                self._held_from.discard(incarnation, rref_id)
                del self._holdings[rref_id]
                effects.append(HandlesApart(rref_id))
        return effects

    def _open(
        self, rref_id: RRefId, owner: Incarnation, state: HoldingState
    ) -> Holding:
        holding = Holding(owner, state)
        self._holdings[rref_id] = holding
        self._held_from.add(owner, rref_id)
        return holding

    def _arrive(
        self,
        rref_id: RRefId,
        owner: Incarnation,
        first: HoldingState,
        event: HoldingEvent,
    ) -> Holding:
        """Find the holding, or open one in the state `first`; count a handle."""
        if rref_id in self._holdings:
            holding = self._advance(rref_id, event)
        else:
            holding = self._open(rref_id, owner, first)
        holding.handles += 1
        return holding

    def _advance(self, rref_id: RRefId, event: HoldingEvent) -> Holding:
        holding = self._holdings.get(rref_id)
        state = RELEASED if holding is None else holding.state
        reached = TRANSITIONS[state].get(event)  # of every handle: without a call
        if holding is None or reached is None:
            raise TRANSITIONS.refusal(state, event, str(rref_id))
        holding.state = reached
        return holding

    def _review(self, rref_id: RRefId, holding: Holding) -> list[Effect]:
        """Give back, return or register whatever has become due."""
        state = holding.state
        is_wanted = holding.handles > 0 or holding.pins > 0
        if state is BORROWED:
            return self._review_borrowed(rref_id, holding, is_wanted=is_wanted)
        if is_wanted or state is PENDING or state is REGISTERING:
            return []
        self._close(rref_id)
        if state is LOST:
            return []
        return [SendRelease(holding.owner, rref_id, holding.forks)]

    def _review_borrowed(
        self, rref_id: RRefId, holding: Holding, *, is_wanted: bool
    ) -> list[Effect]:
        if any(holding.debts.values()):
            # A running call's loan protects us: the others can go back already.
            return self._return_ended(rref_id, holding)
        if not is_wanted:
            effects = self._return_debts(rref_id, holding)
            self._close(rref_id)
            return effects
        if holding.handles or not holding.debts:
            return self._register(rref_id, holding)
        # Only our borrowers rely on it: as they on us, so we on our first lender.
        return self._return_ended(rref_id, holding)

    def _register(self, rref_id: RRefId, holding: Holding) -> list[Effect]:
        self._advance(rref_id, HoldingEvent.KEEP)
        return [SendRegister(holding.owner, rref_id)]

    def _return_ended(self, rref_id: RRefId, holding: Holding) -> list[Effect]:
        """Return the loans of calls that have ended, except one that we may need.

        A later loan may come from a worker that relies on us: two that relied on each
        other would protect nothing, and never let go.  So the first stays while we have
        lent on.  It is older than all that we lent, its lender's first older still:
        thus no chain is a circle.  While we have lent nothing, any loan will do.
        """
        ended = [debt for debt, runs in holding.debts.items() if not runs]
        first = next(iter(holding.debts))
        if holding.pins and ended and ended[0] == first:
            del ended[0]
        return self._return(rref_id, holding, ended)

    def _return_debts(self, rref_id: RRefId, holding: Holding) -> list[Effect]:
        return self._return(rref_id, holding, list(holding.debts))

    def _return(
        self, rref_id: RRefId, holding: Holding, due: list[Debt]
    ) -> list[Effect]:
        for debt in due:
            del holding.debts[debt]
            self._owed_to.discard(debt.lender, (rref_id, debt))
        return [SendLoanReturned(lender, token) for lender, token in due]

    def _lose_with_owner(self, rref_id: RRefId, holding: Holding) -> list[Effect]:
        if holding.cause is not None:
            return [HandlesLost(rref_id, holding.cause)]
        self._advance(rref_id, HoldingEvent.OWNER_LOST)
        return self._lose(rref_id, holding, LossCause.OWNER_LOST)

    def _lose(
        self, rref_id: RRefId, holding: Holding, cause: LossCause
    ) -> list[Effect]:
        holding.cause = cause
        effects = self._return_debts(rref_id, holding)
        if holding.forks and holding.owner not in self._dead:
            effects.append(SendRelease(holding.owner, rref_id, holding.forks))
        holding.forks = 0
        if holding.handles:
            effects.append(HandlesLost(rref_id, cause))
        return effects + self._review(rref_id, holding)

    def _end_loan(self, token: int) -> list[Effect]:
        rref_id, borrower, holding = self._loans.pop(token)
        self._lent_to.discard(borrower, token)
        holding.pins -= 1
        if self._holdings.get(rref_id) is not holding:
            return []  # it was lost with its owner, and `forgive` set it apart
        return self._review(rref_id, holding)

    def _close(self, rref_id: RRefId) -> None:
        holding = self._advance(rref_id, HoldingEvent.LET_GO)
        del self._holdings[rref_id]
        self._held_from.discard(holding.owner, rref_id)
