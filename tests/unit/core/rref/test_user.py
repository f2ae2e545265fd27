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


def test_pending_reference_is_released_when_confirmed(table: UserTable) -> None:
    table.create(MINE, OWNER)
    assert table.drop_handle(MINE) == []
    assert table.confirmed(MINE) == [SendRelease(OWNER, MINE, 1)]
    assert len(table) == 0


def test_forks_of_a_reference_are_released_together(table: UserTable) -> None:
    table.receive_fork(THEIRS, OWNER)
    table.receive_fork(THEIRS, OWNER)
    assert table.drop_handle(THEIRS) == []
    assert table.drop_handle(THEIRS) == [SendRelease(OWNER, THEIRS, 2)]
    table.receive_fork(THEIRS, OWNER)  # was on its way: a new count
    assert table.drop_handle(THEIRS) == [SendRelease(OWNER, THEIRS, 1)]


def test_copied_handle_counts(table: UserTable) -> None:
    table.receive_fork(THEIRS, OWNER)
    table.add_handle(THEIRS)
    assert table.drop_handle(THEIRS) == []
    assert table.drop_handle(THEIRS) == [SendRelease(OWNER, THEIRS, 1)]


def test_absent_reference_cannot_be_used(table: UserTable) -> None:
    for wrong in (table.add_handle, table.drop_handle):
        with pytest.raises(LocalProtocolError):
            wrong(THEIRS)
    with pytest.raises(LocalProtocolError, match="not held"):
        table.lend(THEIRS, BORROWER)


def test_id_is_created_once(table: UserTable) -> None:
    table.create(MINE, OWNER)
    with pytest.raises(LocalProtocolError, match="taken"):
        table.create(MINE, OWNER)


def test_unkept_borrow_sends_nothing_to_the_owner(table: UserTable) -> None:
    assert table.borrow(THEIRS, OWNER, LENDER, 7) == []
    assert table.drop_handle(THEIRS) == []
    assert table.settle(THEIRS, LENDER, 7) == [SendLoanReturned(LENDER, 7)]
    assert len(table) == 0


def test_kept_borrow_is_registered_then_returned(table: UserTable) -> None:
    table.borrow(THEIRS, OWNER, LENDER, 7)
    assert table.settle(THEIRS, LENDER, 7) == REGISTER
    assert table.drop_handle(THEIRS) == []  # too late: the answer is on its way
    returned = [SendLoanReturned(LENDER, 7), SendRelease(OWNER, THEIRS, 1)]
    assert table.registered(THEIRS) == returned
    assert table.settle(THEIRS, LENDER, 7) == []


def test_holder_returns_a_loan_at_once(table: UserTable) -> None:
    table.receive_fork(THEIRS, OWNER)
    assert table.borrow(THEIRS, OWNER, LENDER, 7) == [SendLoanReturned(LENDER, 7)]


def test_creator_returns_a_loan_of_its_own_value_at_once(table: UserTable) -> None:
    table.create(MINE, OWNER)
    assert table.borrow(MINE, OWNER, LENDER, 7) == [SendLoanReturned(LENDER, 7)]
    assert state(table, MINE) is HoldingState.PENDING


def test_fork_makes_a_borrower_a_holder(table: UserTable) -> None:
    table.borrow(THEIRS, OWNER, LENDER, 7)
    assert table.receive_fork(THEIRS, OWNER) == [SendLoanReturned(LENDER, 7)]
    assert state(table) is HoldingState.CONFIRMED


def test_fork_during_registration_counts_in_addition(table: UserTable) -> None:
    table.borrow(THEIRS, OWNER, LENDER, 7)
    table.settle(THEIRS, LENDER, 7)
    assert table.receive_fork(THEIRS, OWNER) == []
    table.drop_handle(THEIRS)
    table.registered(THEIRS)
    assert table.drop_handle(THEIRS) == [SendRelease(OWNER, THEIRS, 2)]


def test_loan_of_an_ended_call_is_returned_while_another_protects(
    table: UserTable,
) -> None:
    """The loan of the call that still runs protects the handle: no registration."""
    table.borrow(THEIRS, OWNER, LENDER, 7)
    table.borrow(THEIRS, OWNER, OTHER, 8)
    assert table.settle(THEIRS, LENDER, 7) == [SendLoanReturned(LENDER, 7)]
    assert table.settle(THEIRS, OTHER, 8) == REGISTER


def test_loan_chain_is_returned_from_its_end(table: UserTable) -> None:
    table.borrow(THEIRS, OWNER, LENDER, 7)
    token = table.lend(THEIRS, BORROWER)
    table.drop_handle(THEIRS)
    assert table.settle(THEIRS, LENDER, 7) == []  # our borrower relies on us
    returned = [SendLoanReturned(LENDER, 7)]
    assert table.loan_returned(token, BORROWER) == returned
    assert len(table) == 0


def test_borrower_that_lent_on_keeps_its_first_loan(table: UserTable) -> None:
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


def test_borrower_that_lent_on_registers_without_its_first_lender(
    table: UserTable,
) -> None:
    table.borrow(THEIRS, OWNER, LENDER, 7)
    table.lend(THEIRS, BORROWER)
    table.borrow(THEIRS, OWNER, BORROWER, 8)
    assert table.worker_lost(LENDER) == REGISTER


def test_lent_reference_is_not_released(table: UserTable) -> None:
    table.receive_fork(THEIRS, OWNER)
    token = table.lend(THEIRS, BORROWER)
    assert table.drop_handle(THEIRS) == []
    release = [SendRelease(OWNER, THEIRS, 1)]
    assert table.loan_returned(token, BORROWER) == release


def test_unsent_message_is_not_a_loan(table: UserTable) -> None:
    table.receive_fork(THEIRS, OWNER)
    token = table.lend(THEIRS, BORROWER)
    assert table.undo_lend(token) == []
    assert table.undo_lend(token) == []
    assert table.drop_handle(THEIRS) == [SendRelease(OWNER, THEIRS, 1)]


def test_borrower_alone_returns_a_loan(table: UserTable) -> None:
    table.receive_fork(THEIRS, OWNER)
    lent = table.lend(THEIRS, BORROWER)
    for token, worker in ((lent, LENDER), (99, BORROWER)):
        with pytest.raises(RemoteProtocolError, match="does not have"):
            table.loan_returned(token, worker)
    table.loan_returned(lent, BORROWER)


def test_reference_sent_to_its_owner_is_a_loan(table: UserTable) -> None:
    """Else our release could overtake a message whose payload is on its way."""
    table.receive_fork(THEIRS, OWNER)
    token = table.lend(THEIRS, OWNER)
    assert table.drop_handle(THEIRS) == []
    assert table.loan_returned(token, OWNER) == [SendRelease(OWNER, THEIRS, 1)]


def test_lost_owner_loses_every_handle(table: UserTable) -> None:
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


def test_lost_owner_frees_the_lenders(table: UserTable) -> None:
    table.borrow(THEIRS, OWNER, LENDER, 7)
    lost = [SendLoanReturned(LENDER, 7), HandlesLost(THEIRS, LossCause.OWNER_LOST)]
    assert table.worker_lost(OWNER) == lost


def test_reference_from_a_lost_owner_is_lost(table: UserTable) -> None:
    table.worker_lost(OWNER)
    lost = HandlesLost(THEIRS, LossCause.OWNER_LOST)
    assert table.receive_fork(THEIRS, OWNER) == [lost]
    assert table.receive_fork(THEIRS, OWNER) == [lost]
    assert table.borrow(THEIRS, OWNER, LENDER, 7) == [lost, SendLoanReturned(LENDER, 7)]
    assert table.worker_lost(OWNER) == []
    for _ in range(3):
        assert table.drop_handle(THEIRS) == []
    assert len(table) == 0


def test_loan_of_a_lost_workers_value_starts_a_search_for_the_owner(
    table: UserTable,
) -> None:
    table.worker_lost(OWNER)
    assert table.borrow(THEIRS, OWNER, LENDER, 7) == [FindOwner(OWNER)]
    assert state(table) is HoldingState.BORROWED
    lost = HandlesLost(THEIRS, LossCause.OWNER_LOST)
    assert table.worker_lost(OWNER) == [SendLoanReturned(LENDER, 7), lost]


def test_call_shows_whether_a_lost_owner_is_back(table: UserTable) -> None:
    table.worker_lost(OWNER)
    table.create(MINE, OWNER)
    assert state(table, MINE) is HoldingState.PENDING
    assert table.refused(MINE) == [HandlesLost(MINE, LossCause.NEVER_MADE)]


def test_lost_reference_stays_lost_beside_a_new_one(table: UserTable) -> None:
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


def test_owner_never_lost_is_not_forgiven(table: UserTable) -> None:
    table.create(MINE, OWNER)
    table.refused(MINE)
    assert table.forgive(OWNER) == []
    assert len(table) == 1


def test_orphaned_borrower_registers_at_once(table: UserTable) -> None:
    table.borrow(THEIRS, OWNER, LENDER, 7)
    assert table.worker_lost(LENDER) == REGISTER
    assert table.gone(THEIRS) == [HandlesLost(THEIRS, LossCause.FREED)]
    assert table.settle(THEIRS, LENDER, 7) == []
    assert table.drop_handle(THEIRS) == []


def test_orphaned_borrower_registers_for_its_own_borrowers(table: UserTable) -> None:
    table.borrow(THEIRS, OWNER, LENDER, 7)
    table.lend(THEIRS, BORROWER)
    table.drop_handle(THEIRS)
    table.settle(THEIRS, LENDER, 7)
    assert table.worker_lost(LENDER) == REGISTER


def test_orphaned_borrower_without_handles_is_removed(table: UserTable) -> None:
    table.borrow(THEIRS, OWNER, LENDER, 7)
    table.drop_handle(THEIRS)
    assert table.worker_lost(LENDER) == []
    assert len(table) == 0


def test_second_lender_protects_after_the_loss_of_the_first(table: UserTable) -> None:
    table.borrow(THEIRS, OWNER, LENDER, 7)
    table.borrow(THEIRS, OWNER, OTHER, 8)
    assert table.worker_lost(LENDER) == []
    assert state(table) is HoldingState.BORROWED


def test_loan_decoded_after_the_death_of_its_lender_registers(table: UserTable) -> None:
    table.worker_lost(LENDER)
    assert table.borrow(THEIRS, OWNER, LENDER, 7) == REGISTER
    assert table.borrow(THEIRS, OWNER, LENDER, 8) == []


def test_lost_borrower_holds_nothing(table: UserTable) -> None:
    table.receive_fork(THEIRS, OWNER)
    token = table.lend(THEIRS, BORROWER)
    table.drop_handle(THEIRS)
    assert table.worker_lost(BORROWER) == [SendRelease(OWNER, THEIRS, 1)]
    assert table.undo_lend(token) == []
    table.receive_fork(THEIRS, OWNER)
    assert table.lend(THEIRS, BORROWER) == 0


def test_loan_without_a_token_protects_nothing(table: UserTable) -> None:
    assert table.borrow(THEIRS, OWNER, LENDER, 0) == REGISTER


def test_lost_worker_that_owns_lends_and_borrows_ends_everything(
    table: UserTable,
) -> None:
    """One death ends the value, the debt and the loan, and sends nobody anything."""
    table.borrow(THEIRS, OWNER, OWNER, 7)
    table.lend(THEIRS, OWNER)
    lost = [HandlesLost(THEIRS, LossCause.OWNER_LOST)]
    assert table.worker_lost(OWNER) == lost
    assert table.drop_handle(THEIRS) == []
    assert len(table) == 0


def test_running_remote_call_answers_a_probe_itself(table: UserTable) -> None:
    table.create(MINE, OWNER)
    assert table.probe(MINE, OWNER) == []
    table.confirmed(MINE)
    assert table.probe(MINE, OWNER) == [SendSettled(OWNER, MINE)]


def test_refused_remote_call_settles(table: UserTable) -> None:
    table.create(MINE, OWNER)
    table.probe(MINE, OWNER)
    lost = HandlesLost(MINE, LossCause.NEVER_MADE)
    assert table.refused(MINE) == [SendSettled(OWNER, MINE), lost]
    assert table.probe(MINE, OWNER) == [SendSettled(OWNER, MINE)]


def test_probe_from_another_worker_is_settled(table: UserTable) -> None:
    table.create(MINE, OWNER)
    assert table.probe(MINE, OTHER) == [SendSettled(OTHER, MINE)]
    assert table.probe(MINE, OWNER) == []


def test_remote_call_without_an_owner_settles(table: UserTable) -> None:
    table.create(MINE, UNKNOWN_INCARNATION)
    table.refused(MINE)
    assert table.probe(MINE, OWNER) == [SendSettled(OWNER, MINE)]


def test_unprobed_creator_sends_nothing(table: UserTable) -> None:
    table.create(MINE, OWNER)
    assert table.refused(MINE) == [HandlesLost(MINE, LossCause.NEVER_MADE)]


def test_forks_of_a_missing_value_are_returned(table: UserTable) -> None:
    table.borrow(THEIRS, OWNER, LENDER, 7)
    table.settle(THEIRS, LENDER, 7)
    table.receive_fork(THEIRS, OWNER)
    lost = HandlesLost(THEIRS, LossCause.FREED)
    release = SendRelease(OWNER, THEIRS, 1)
    assert table.gone(THEIRS) == [SendLoanReturned(LENDER, 7), release, lost]
    assert table.receive_fork(THEIRS, OWNER) == [lost, release]


def test_loss_without_handles_is_silent(table: UserTable) -> None:
    table.receive_fork(THEIRS, OWNER)
    table.lend(THEIRS, BORROWER)
    table.drop_handle(THEIRS)
    assert table.worker_lost(OWNER) == []
    assert state(table) is HoldingState.LOST  # until the loan is back
    assert table.worker_lost(BORROWER) == []
    assert len(table) == 0


def test_unexpected_answer_is_an_error(table: UserTable) -> None:
    with pytest.raises(RemoteProtocolError, match="released"):
        table.registered(THEIRS)
    table.receive_fork(THEIRS, OWNER)
    for wrong in (table.registered, table.gone, table.confirmed, table.refused):
        with pytest.raises(RemoteProtocolError, match="confirmed"):
            wrong(THEIRS)
    assert state(table) is HoldingState.CONFIRMED
