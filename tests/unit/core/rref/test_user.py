"""A user's table, driven by stories; all is about THEIRS, unless it says `mine`."""

from __future__ import annotations

from asyncrpc.core.ids import Incarnation, RRefId
from asyncrpc.core.members import UNKNOWN_INCARNATION
from asyncrpc.core.rref.machine import (
    FindOwner,
    HandlesApart,
    HandlesLost,
    LossCause,
    SendLoanReturned,
    SendRegister,
    SendRelease,
    SendSettled,
    UserTable,
)
from asyncrpc.errors import LocalProtocolError, RemoteProtocolError, RRefDeletedError
from tests.unit.stories import Actions, Words, cases

OWNER, LENDER, OTHER, BORROWER = map(Incarnation, (2, 3, 4, 5))
MINE, THEIRS = RRefId(Incarnation(1), 1), RRefId(OWNER, 1)
WORDS = Words(
    subject=THEIRS,
    names={
        "mine": MINE,
        "owner": OWNER,
        "lender": LENDER,
        "other": OTHER,
        "borrower": BORROWER,
        "nobody": UNKNOWN_INCARNATION,
    },
    effects={
        "register": lambda rref: SendRegister(OWNER, rref),
        "release": lambda rref, count: SendRelease(OWNER, rref, count),
        "returned": lambda _, lender, token: SendLoanReturned(lender, token),
        "settled": lambda rref, prober: SendSettled(prober, rref),
        "owner-lost": lambda rref: HandlesLost(rref, LossCause.OWNER_LOST),
        "never-made": lambda rref: HandlesLost(rref, LossCause.NEVER_MADE),
        "freed": lambda rref: HandlesLost(rref, LossCause.FREED),
        "apart": HandlesApart,
        "find": lambda _, owner: FindOwner(owner),
    },
    errors={
        "local": LocalProtocolError,
        "remote": RemoteProtocolError,
        "deleted": RRefDeletedError,
    },
)
STORIES = """
pending reference is released when confirmed:
    create mine; drop mine; confirmed mine = release mine 1; len = 0
forks of a reference are released together, and one on its way by itself:
    fork; fork; drop; drop = release 2; fork; drop = release 1
copied handle counts:
    fork; copy; drop; drop = release 1
absent reference cannot be used:
    copy ! local .; drop ! local .; lend borrower ! local not held
id is created once:
    create mine; create mine ! local taken
unkept borrow sends nothing to the owner:
    borrow lender 7; drop; settle lender 7 = returned lender 7; len = 0
kept borrow is registered then returned:  # the drop is too late: an answer comes
    borrow lender 7; settle lender 7 = register; drop
    registered = returned lender 7, release 1; settle lender 7
holder returns a loan at once:
    fork; borrow lender 7 = returned lender 7
creator returns a loan of its own value at once:
    create mine; borrow mine lender 7 = returned lender 7; state mine = PENDING
fork makes a borrower a holder:
    borrow lender 7; fork = returned lender 7; state = CONFIRMED
fork during registration counts in addition:
    borrow lender 7; settle lender 7 = register; fork; drop
    registered = returned lender 7; drop = release 2
loan of an ended call is returned while another protects:  # no registration
    borrow lender 7; borrow other 8; settle lender 7 = returned lender 7
    settle other 8 = register
loan chain is returned from its end:  # our borrower relies on us
    borrow lender 7; lend borrower; drop; settle lender 7
    back borrower = returned lender 7; len = 0
borrower that lent on keeps its first loan:
    # A later loan may come from its own borrower: the two would hold each other.
    borrow lender 7; lend borrower; drop; settle lender 7; borrow borrower 8; drop
    settle borrower 8 = returned borrower 8; back borrower = returned lender 7; len = 0
borrower that lent on registers without its first lender:
    borrow lender 7; lend borrower; borrow borrower 8; lose lender = register
lent reference is not released:
    fork; lend borrower; drop; back borrower = release 1
unsent message is not a loan:
    fork; lend borrower; undo-lend; undo-lend; drop = release 1
borrower alone returns a loan:
    fork; lend borrower; back lender ! remote does not have
    back borrower 99 ! remote does not have; back borrower
reference sent to its owner is a loan:
    # Else our release could overtake a message whose payload is on its way.
    fork; lend owner; drop; back owner = release 1
lost owner loses every handle:  # and the call that creates one fails, too
    fork; create mine; lose owner = owner-lost, owner-lost mine
    lend borrower ! deleted its owner is lost; drop; refused mine; drop mine
    refused mine; len = 0
lost owner frees the lenders:
    borrow lender 7; lose owner = returned lender 7, owner-lost
reference from a lost owner is lost:
    lose owner; fork = owner-lost; fork = owner-lost
    borrow lender 7 = owner-lost, returned lender 7; lose owner; drop; drop; drop
    len = 0
loan of a lost worker's value starts a search for the owner:
    lose owner; borrow lender 7 = find owner; state = BORROWED
    lose owner = returned lender 7, owner-lost
call shows whether a lost owner is back:
    lose owner; create mine; state mine = PENDING; refused mine = never-made mine
lost reference stays lost beside a new one:  # the loan is of the time before
    fork; lend borrower; lose owner = owner-lost; is-lost owner = True
    forgive owner = apart; is-lost owner = False; len = 0; fork
    back borrower; state = CONFIRMED; drop = release 1
owner never lost is not forgiven:
    create mine; refused mine = never-made mine; forgive owner; state mine = LOST
orphaned borrower registers at once:
    borrow lender 7; lose lender = register; gone = freed; settle lender 7; drop
orphaned borrower registers for its own borrowers:
    borrow lender 7; lend borrower; drop; settle lender 7; lose lender = register
orphaned borrower without handles is removed:
    borrow lender 7; drop; lose lender; len = 0
second lender protects after the loss of the first:
    borrow lender 7; borrow other 8; lose lender; state = BORROWED
loan decoded after the death of its lender registers:
    lose lender; borrow lender 7 = register; borrow lender 8
lost borrower holds nothing:
    fork; lend borrower; drop; lose borrower = release 1; undo-lend
    fork; lend borrower; token = 0
loan without a token protects nothing:
    borrow lender 0 = register
lost worker that owns, lends and borrows ends everything:
    # One death ends the value, the debt and the loan, and sends nobody anything.
    borrow owner 7; lend owner; lose owner = owner-lost; drop; len = 0
running remote call answers a probe itself:
    create mine; probe mine owner; confirmed mine; probe mine owner = settled mine owner
refused remote call settles:
    create mine; probe mine owner; refused mine = settled mine owner, never-made mine
    probe mine owner = settled mine owner
probe from another worker is settled:
    create mine; probe mine other = settled mine other; probe mine owner
remote call without an owner settles:
    create mine nobody; refused mine = never-made mine
    probe mine owner = settled mine owner
unprobed creator sends nothing:
    create mine; refused mine = never-made mine
forks of a missing value are returned:
    borrow lender 7; settle lender 7 = register; fork
    gone = returned lender 7, release 1, freed; fork = freed, release 1
loss without handles is silent:  # it is lost until the loan is back
    fork; lend borrower; drop; lose owner; state = LOST; lose borrower; len = 0
unexpected answer is an error:
    registered ! remote released; fork; registered ! remote confirmed
    gone ! remote confirmed; confirmed ! remote confirmed; refused ! remote confirmed
    state = CONFIRMED
"""


@cases(STORIES)
def test_user_follows_the_story(steps: list[str]) -> None:
    table, tokens = UserTable(), [0]

    def lend(rref: RRefId, borrower: Incarnation) -> None:
        tokens.append(table.lend(rref, borrower))

    def state(rref: RRefId) -> str:
        holding = table.get(rref)
        return holding.state.name if holding else ""

    actions: Actions = {
        "create": lambda rref, owner=OWNER: table.create(rref, owner),
        "fork": lambda rref: table.receive_fork(rref, OWNER),
        "copy": table.add_handle,
        "drop": table.drop_handle,
        "borrow": lambda rref, *loan: table.borrow(rref, OWNER, *loan),
        "settle": table.settle,
        "lend": lend,
        "token": lambda _: tokens[-1],
        "undo-lend": lambda _: table.undo_lend(tokens[-1]),
        "back": lambda _, by, at=-1: table.loan_returned(
            tokens[at] if at < 0 else at, by
        ),
        "lose": lambda _, worker: table.worker_lost(worker),
        "is-lost": lambda _, worker: table.is_lost(worker),
        "forgive": lambda _, owner: table.forgive(owner),
        "probe": table.probe,
        "registered": table.registered,
        "gone": table.gone,
        "confirmed": table.confirmed,
        "refused": table.refused,
        "state": state,
        "len": lambda _: len(table),
    }
    WORDS.play(steps, actions)
