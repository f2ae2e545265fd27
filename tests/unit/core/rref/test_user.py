"""A user's table, driven directly."""

from __future__ import annotations

import pytest

from asyncrpc.core.ids import Incarnation, RRefId
from asyncrpc.core.members import UNKNOWN_INCARNATION
from asyncrpc.core.rref.machine import (
    FindOwner,
    HandlesApart,
    HandlesLost,
    HoldingState,
    LossCause,
    SendLoanReturned,
    SendRegister,
    SendRelease,
    SendSettled,
    UserTable,
)
from asyncrpc.errors import (
    LocalProtocolError,
    RemoteProtocolError,
    RRefDeletedError,
)

ME, OWNER, LENDER, OTHER, BORROWER = map(Incarnation, (1, 2, 3, 4, 5))
MINE = RRefId(ME, 1)
THEIRS = RRefId(OWNER, 1)
REGISTER = [SendRegister(OWNER, THEIRS)]


@pytest.fixture
def table() -> UserTable:
    return UserTable()


def state(table: UserTable, rref_id: RRefId = THEIRS) -> HoldingState | None:
    holding = table.get(rref_id)
    return holding.state if holding else None


def test_a_pending_one_is_released_when_confirmed(table: UserTable) -> None:
    table.create(MINE, OWNER)
    assert table.drop_handle(MINE) == []
    assert table.confirmed(MINE) == [SendRelease(OWNER, MINE, 1)]
    assert len(table) == 0


def test_all_forks_go_back_at_once(table: UserTable) -> None:
    table.receive_fork(THEIRS, OWNER)
    table.receive_fork(THEIRS, OWNER)
    assert table.drop_handle(THEIRS) == []
    assert table.drop_handle(THEIRS) == [SendRelease(OWNER, THEIRS, 2)]
    table.receive_fork(THEIRS, OWNER)  # was on its way: a new count
    assert table.drop_handle(THEIRS) == [SendRelease(OWNER, THEIRS, 1)]


def test_a_copied_handle_counts(table: UserTable) -> None:
    table.receive_fork(THEIRS, OWNER)
    table.add_handle(THEIRS)
    assert table.drop_handle(THEIRS) == []
    assert table.drop_handle(THEIRS) == [SendRelease(OWNER, THEIRS, 1)]


def test_what_is_not_there_cannot_be_used(table: UserTable) -> None:
    for wrong in (table.add_handle, table.drop_handle):
        with pytest.raises(LocalProtocolError):
            wrong(THEIRS)
    with pytest.raises(LocalProtocolError, match="not held"):
        table.lend(THEIRS, BORROWER)


def test_an_id_is_made_once(table: UserTable) -> None:
    table.create(MINE, OWNER)
    with pytest.raises(LocalProtocolError, match="taken"):
        table.create(MINE, OWNER)


def test_a_borrow_not_kept_concerns_no_owner(table: UserTable) -> None:
    assert table.borrow(THEIRS, OWNER, LENDER, 7) == []
    assert table.drop_handle(THEIRS) == []
    assert table.settle(THEIRS, LENDER, 7) == [SendLoanReturned(LENDER, 7)]
    assert len(table) == 0


def test_a_borrow_kept_is_registered_then_returned(table: UserTable) -> None:
    table.borrow(THEIRS, OWNER, LENDER, 7)
    assert table.settle(THEIRS, LENDER, 7) == REGISTER
    assert table.drop_handle(THEIRS) == []  # too late: the answer is on its way
    returned = [SendLoanReturned(LENDER, 7), SendRelease(OWNER, THEIRS, 1)]
    assert table.registered(THEIRS) == returned
    assert table.settle(THEIRS, LENDER, 7) == []


def test_a_holder_returns_a_loan_at_once(table: UserTable) -> None:
    table.receive_fork(THEIRS, OWNER)
    assert table.borrow(THEIRS, OWNER, LENDER, 7) == [SendLoanReturned(LENDER, 7)]


def test_a_creator_returns_a_loan_of_its_own_at_once(table: UserTable) -> None:
    table.create(MINE, OWNER)
    assert table.borrow(MINE, OWNER, LENDER, 7) == [SendLoanReturned(LENDER, 7)]
    assert state(table, MINE) is HoldingState.PENDING


def test_a_fork_makes_a_borrower_a_holder(table: UserTable) -> None:
    table.borrow(THEIRS, OWNER, LENDER, 7)
    assert table.receive_fork(THEIRS, OWNER) == [SendLoanReturned(LENDER, 7)]
    assert state(table) is HoldingState.CONFIRMED


def test_a_fork_while_registering_counts_besides(table: UserTable) -> None:
    table.borrow(THEIRS, OWNER, LENDER, 7)
    table.settle(THEIRS, LENDER, 7)
    assert table.receive_fork(THEIRS, OWNER) == []
    table.drop_handle(THEIRS)
    table.registered(THEIRS)
    assert table.drop_handle(THEIRS) == [SendRelease(OWNER, THEIRS, 2)]


def test_one_of_two_calls_ends_and_its_loan_goes_back(table: UserTable) -> None:
    """The loan of the call that still runs protects the handle: no registration."""
    table.borrow(THEIRS, OWNER, LENDER, 7)
    table.borrow(THEIRS, OWNER, OTHER, 8)
    assert table.settle(THEIRS, LENDER, 7) == [SendLoanReturned(LENDER, 7)]
    assert table.settle(THEIRS, OTHER, 8) == REGISTER


def test_a_chain_is_returned_from_its_end(table: UserTable) -> None:
    table.borrow(THEIRS, OWNER, LENDER, 7)
    token = table.lend(THEIRS, BORROWER)
    table.drop_handle(THEIRS)
    assert table.settle(THEIRS, LENDER, 7) == []  # our borrower relies on us
    returned = [SendLoanReturned(LENDER, 7)]
    assert table.loan_returned(token, BORROWER) == returned
    assert len(table) == 0


def test_whoever_lent_on_keeps_its_first_loan(table: UserTable) -> None:
    """A later one may come from its own borrower: the two would hold each other."""
    table.borrow(THEIRS, OWNER, LENDER, 7)
    token = table.lend(THEIRS, BORROWER)
    table.drop_handle(THEIRS)
    table.settle(THEIRS, LENDER, 7)
    assert table.borrow(THEIRS, OWNER, BORROWER, 8) == []
    table.drop_handle(THEIRS)
    assert table.settle(THEIRS, BORROWER, 8) == [SendLoanReturned(BORROWER, 8)]
    assert table.loan_returned(token, BORROWER) == [SendLoanReturned(LENDER, 7)]
    assert len(table) == 0


def test_whoever_lent_on_and_loses_its_first_lender_registers(table: UserTable) -> None:
    table.borrow(THEIRS, OWNER, LENDER, 7)
    table.lend(THEIRS, BORROWER)
    table.borrow(THEIRS, OWNER, BORROWER, 8)
    assert table.worker_lost(LENDER) == REGISTER


def test_nothing_is_released_while_lent(table: UserTable) -> None:
    table.receive_fork(THEIRS, OWNER)
    token = table.lend(THEIRS, BORROWER)
    assert table.drop_handle(THEIRS) == []
    release = [SendRelease(OWNER, THEIRS, 1)]
    assert table.loan_returned(token, BORROWER) == release


def test_a_message_never_sent_is_no_loan(table: UserTable) -> None:
    table.receive_fork(THEIRS, OWNER)
    token = table.lend(THEIRS, BORROWER)
    assert table.undo_lend(token) == []
    assert table.undo_lend(token) == []
    assert table.drop_handle(THEIRS) == [SendRelease(OWNER, THEIRS, 1)]


def test_only_the_borrower_returns_a_loan(table: UserTable) -> None:
    table.receive_fork(THEIRS, OWNER)
    lent = table.lend(THEIRS, BORROWER)
    for token, worker in ((lent, LENDER), (99, BORROWER)):
        with pytest.raises(RemoteProtocolError, match="does not have"):
            table.loan_returned(token, worker)
    table.loan_returned(lent, BORROWER)


def test_the_way_home_is_a_loan(table: UserTable) -> None:
    """Else our release could overtake a message whose payload is on its way."""
    table.receive_fork(THEIRS, OWNER)
    token = table.lend(THEIRS, OWNER)
    assert table.drop_handle(THEIRS) == []
    assert table.loan_returned(token, OWNER) == [SendRelease(OWNER, THEIRS, 1)]


def test_a_lost_owner_loses_every_handle(table: UserTable) -> None:
    table.receive_fork(THEIRS, OWNER)
    table.create(MINE, OWNER)
    lost = table.worker_lost(OWNER)
    cause = LossCause.OWNER_LOST
    assert lost == [HandlesLost(THEIRS, cause), HandlesLost(MINE, cause)]
    with pytest.raises(RRefDeletedError, match="its owner is lost"):
        table.lend(THEIRS, BORROWER)
    assert table.drop_handle(THEIRS) == []
    assert table.refused(MINE) == []  # its call fails too
    assert table.drop_handle(MINE) == []
    assert table.refused(MINE) == []
    assert len(table) == 0


def test_a_lost_owner_frees_the_lenders(table: UserTable) -> None:
    table.borrow(THEIRS, OWNER, LENDER, 7)
    lost = [SendLoanReturned(LENDER, 7), HandlesLost(THEIRS, LossCause.OWNER_LOST)]
    assert table.worker_lost(OWNER) == lost


def test_what_comes_from_the_dead_is_lost(table: UserTable) -> None:
    table.worker_lost(OWNER)
    lost = HandlesLost(THEIRS, LossCause.OWNER_LOST)
    assert table.receive_fork(THEIRS, OWNER) == [lost]
    assert table.receive_fork(THEIRS, OWNER) == [lost]
    assert table.borrow(THEIRS, OWNER, LENDER, 7) == [lost, SendLoanReturned(LENDER, 7)]
    assert table.worker_lost(OWNER) == []
    for _ in range(3):
        assert table.drop_handle(THEIRS) == []
    assert len(table) == 0


def test_a_loan_of_what_a_lost_worker_owns_makes_us_look_for_it(
    table: UserTable,
) -> None:
    table.worker_lost(OWNER)
    assert table.borrow(THEIRS, OWNER, LENDER, 7) == [FindOwner(OWNER)]
    assert state(table) is HoldingState.BORROWED
    lost = HandlesLost(THEIRS, LossCause.OWNER_LOST)
    assert table.worker_lost(OWNER) == [SendLoanReturned(LENDER, 7), lost]


def test_a_call_shows_whether_a_lost_owner_is_back(table: UserTable) -> None:
    table.worker_lost(OWNER)
    table.create(MINE, OWNER)
    assert state(table, MINE) is HoldingState.PENDING
    assert table.refused(MINE) == [HandlesLost(MINE, LossCause.NEVER_MADE)]


def test_what_was_lost_stays_lost_apart_from_what_comes_later(
    table: UserTable,
) -> None:
    table.receive_fork(THEIRS, OWNER)
    token = table.lend(THEIRS, BORROWER)
    table.worker_lost(OWNER)
    assert table.is_lost(OWNER)
    assert table.forgive(OWNER) == [HandlesApart(THEIRS)]
    assert not table.is_lost(OWNER)
    assert len(table) == 0
    assert table.receive_fork(THEIRS, OWNER) == []
    assert table.loan_returned(token, BORROWER) == []  # of the time before
    assert state(table) is HoldingState.CONFIRMED
    assert table.drop_handle(THEIRS) == [SendRelease(OWNER, THEIRS, 1)]


def test_whoever_was_never_lost_is_not_forgiven(table: UserTable) -> None:
    table.create(MINE, OWNER)
    table.refused(MINE)
    assert table.forgive(OWNER) == []
    assert len(table) == 1


def test_an_orphan_registers_at_once(table: UserTable) -> None:
    table.borrow(THEIRS, OWNER, LENDER, 7)
    assert table.worker_lost(LENDER) == REGISTER
    assert table.gone(THEIRS) == [HandlesLost(THEIRS, LossCause.FREED)]
    assert table.settle(THEIRS, LENDER, 7) == []
    assert table.drop_handle(THEIRS) == []


def test_an_orphan_registers_for_its_borrowers(table: UserTable) -> None:
    table.borrow(THEIRS, OWNER, LENDER, 7)
    table.lend(THEIRS, BORROWER)
    table.drop_handle(THEIRS)
    table.settle(THEIRS, LENDER, 7)
    assert table.worker_lost(LENDER) == REGISTER


def test_an_orphan_without_handles_goes(table: UserTable) -> None:
    table.borrow(THEIRS, OWNER, LENDER, 7)
    table.drop_handle(THEIRS)
    assert table.worker_lost(LENDER) == []
    assert len(table) == 0


def test_another_lender_still_protects(table: UserTable) -> None:
    table.borrow(THEIRS, OWNER, LENDER, 7)
    table.borrow(THEIRS, OWNER, OTHER, 8)
    assert table.worker_lost(LENDER) == []
    assert state(table) is HoldingState.BORROWED


def test_a_loan_decoded_after_its_lenders_death_registers(table: UserTable) -> None:
    table.worker_lost(LENDER)
    assert table.borrow(THEIRS, OWNER, LENDER, 7) == REGISTER
    assert table.borrow(THEIRS, OWNER, LENDER, 8) == []


def test_a_lost_borrower_holds_nothing(table: UserTable) -> None:
    table.receive_fork(THEIRS, OWNER)
    token = table.lend(THEIRS, BORROWER)
    table.drop_handle(THEIRS)
    assert table.worker_lost(BORROWER) == [SendRelease(OWNER, THEIRS, 1)]
    assert table.undo_lend(token) == []
    table.receive_fork(THEIRS, OWNER)
    assert table.lend(THEIRS, BORROWER) == 0


def test_a_loan_from_one_who_has_lost_us_protects_nothing(table: UserTable) -> None:
    assert table.borrow(THEIRS, OWNER, LENDER, 0) == REGISTER


def test_owner_lender_and_borrower_in_one(table: UserTable) -> None:
    """One death ends the value, the debt and the loan, and sends nobody anything."""
    table.borrow(THEIRS, OWNER, OWNER, 7)
    table.lend(THEIRS, OWNER)
    lost = [HandlesLost(THEIRS, LossCause.OWNER_LOST)]
    assert table.worker_lost(OWNER) == lost
    assert table.drop_handle(THEIRS) == []
    assert len(table) == 0


def test_a_remote_call_under_way_answers_a_probe_itself(table: UserTable) -> None:
    table.create(MINE, OWNER)
    assert table.probe(MINE, OWNER) == []
    table.confirmed(MINE)
    assert table.probe(MINE, OWNER) == [SendSettled(OWNER, MINE)]


def test_a_refused_remote_call_settles(table: UserTable) -> None:
    table.create(MINE, OWNER)
    table.probe(MINE, OWNER)
    lost = HandlesLost(MINE, LossCause.NEVER_MADE)
    assert table.refused(MINE) == [SendSettled(OWNER, MINE), lost]
    assert table.probe(MINE, OWNER) == [SendSettled(OWNER, MINE)]


def test_a_probe_of_another_worker_is_settled(table: UserTable) -> None:
    table.create(MINE, OWNER)
    assert table.probe(MINE, OTHER) == [SendSettled(OTHER, MINE)]
    assert table.probe(MINE, OWNER) == []


def test_a_remote_call_that_never_had_an_owner_settles(table: UserTable) -> None:
    table.create(MINE, UNKNOWN_INCARNATION)
    table.refused(MINE)
    assert table.probe(MINE, OWNER) == [SendSettled(OWNER, MINE)]


def test_an_unasked_creator_says_nothing(table: UserTable) -> None:
    table.create(MINE, OWNER)
    assert table.refused(MINE) == [HandlesLost(MINE, LossCause.NEVER_MADE)]


def test_forks_of_what_was_never_made_go_back(table: UserTable) -> None:
    table.borrow(THEIRS, OWNER, LENDER, 7)
    table.settle(THEIRS, LENDER, 7)
    table.receive_fork(THEIRS, OWNER)
    lost = HandlesLost(THEIRS, LossCause.FREED)
    release = SendRelease(OWNER, THEIRS, 1)
    assert table.gone(THEIRS) == [SendLoanReturned(LENDER, 7), release, lost]
    assert table.receive_fork(THEIRS, OWNER) == [lost, release]


def test_a_loss_that_no_handle_sees_is_silent(table: UserTable) -> None:
    table.receive_fork(THEIRS, OWNER)
    table.lend(THEIRS, BORROWER)
    table.drop_handle(THEIRS)
    assert table.worker_lost(OWNER) == []
    assert state(table) is HoldingState.LOST  # until the loan is back
    assert table.worker_lost(BORROWER) == []
    assert len(table) == 0


def test_an_answer_nobody_waits_for_is_an_error(table: UserTable) -> None:
    with pytest.raises(RemoteProtocolError, match="released"):
        table.registered(THEIRS)
    table.receive_fork(THEIRS, OWNER)
    for wrong in (table.registered, table.gone, table.confirmed, table.refused):
        with pytest.raises(RemoteProtocolError, match="confirmed"):
            wrong(THEIRS)
    assert state(table) is HoldingState.CONFIRMED
