"""Credit for large requests: who gets it, in which order, and that it comes back."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from asyncrpc.core.calls.machine.credit import (
    BEYOND_AFTER_S,
    PASSED_MAX,
    STALLED_AFTER_S,
    WANTS_MAX,
    WINDOW,
    WINDOW_BYTES_MAX,
    Account,
    CreditWanted,
    Grant,
    InboundBudget,
    WaitingRequests,
    Why,
)
from asyncrpc.errors import MalformedError

MIB = 1 << 20
SMALL_LIMIT = 1000  # so small that nobody is given a window

Budget = InboundBudget[str]
Granted = list[Grant[str]]


def opened(limit_bytes: int, *names: str) -> tuple[Budget, list[Account[str]]]:
    budget: Budget = InboundBudget(limit_bytes)
    return budget, [budget.open(name) for name in names]


def calls(grants: Sequence[Grant[str]]) -> list[tuple[str, int]]:
    return [(grant.peer, grant.call_id) for grant in grants]


def want(
    budget: Budget,
    account: Account[str],
    call_id: int,
    nbytes: int,
    *,
    nested: bool = False,
    now_s: float = 0.0,
) -> Granted:
    return budget.want(account, call_id, nbytes, now_s, nested=nested)


def serve(budget: Budget, account: Account[str], call_id: int, nbytes: int) -> int:
    """Let a request arrive, and its call begin."""
    budget.begin(account, call_id, nbytes)
    return budget.take(account, call_id)


class TestTickets:
    def test_request_that_fits_is_granted_at_once(self) -> None:
        budget, (a,) = opened(SMALL_LIMIT, "a")
        assert want(budget, a, 1, 600) == [Grant("a", 1, 600, Why.FITS)]
        assert budget.free_bytes == 400

    def test_request_that_does_not_fit_waits_until_a_call_ends(self) -> None:
        budget, (a,) = opened(SMALL_LIMIT, "a")
        want(budget, a, 1, 600)
        assert want(budget, a, 2, 600) == []
        assert budget.waiting == 1
        held = serve(budget, a, 1, 600)
        assert (held, budget.held_bytes) == (600, 600)
        assert calls(budget.release(a, held, 1.0)) == [("a", 2)]
        assert not budget.has_waiting

    def test_first_request_in_turn_is_not_overtaken_by_smaller_ones(self) -> None:
        budget, (a, b) = opened(SMALL_LIMIT, "a", "b")
        want(budget, a, 1, 600)
        assert want(budget, a, 2, 500) == []
        assert want(budget, b, 1, 10) == []
        held = serve(budget, a, 1, 600)
        assert calls(budget.release(a, held, 1.0)) == [("a", 2), ("b", 1)]

    def test_peers_take_turns(self) -> None:
        budget, (a, b) = opened(SMALL_LIMIT, "a", "b")
        want(budget, a, 1, SMALL_LIMIT)
        for call_id in range(2, 6):
            want(budget, a, call_id, 100)
        want(budget, b, 1, 100)
        want(budget, b, 2, 100)
        held = serve(budget, a, 1, SMALL_LIMIT)
        assert calls(budget.release(a, held, 1.0)) == [
            *(("a", 2), ("b", 1), ("a", 3), ("b", 2), ("a", 4), ("a", 5)),
        ]

    def test_request_over_the_limit_is_granted_alone(self) -> None:
        budget, (a,) = opened(SMALL_LIMIT, "a")
        want(budget, a, 1, 10)
        assert want(budget, a, 2, 5000) == []
        held = serve(budget, a, 1, 10)
        assert budget.release(a, held, 1.0) == [Grant("a", 2, 5000, Why.ALONE)]
        assert want(budget, a, 3, 10) == []
        held = serve(budget, a, 2, 5000)
        assert calls(budget.release(a, held, 2.0)) == [("a", 3)]

    def test_request_of_the_whole_limit_is_granted_beside_windows(self) -> None:
        budget, (a, b) = opened(64 * MIB, "a", "b")
        assert budget.welcome(b)
        assert want(budget, a, 1, 64 * MIB) == [Grant("a", 1, 64 * MIB, Why.FITS)]

    def test_ticket_may_be_used_in_part(self) -> None:
        budget, (a,) = opened(SMALL_LIMIT, "a")
        want(budget, a, 1, 600)
        assert serve(budget, a, 1, 100) == 100
        assert budget.free_bytes == 900


class TestNested:
    def test_nested_request_goes_first(self) -> None:
        budget, (a, b) = opened(SMALL_LIMIT, "a", "b")
        want(budget, a, 1, SMALL_LIMIT)
        want(budget, a, 2, 100)
        want(budget, b, 1, 100, nested=True)
        held = serve(budget, a, 1, SMALL_LIMIT)
        assert calls(budget.release(a, held, 1.0)) == [("b", 1), ("a", 2)]

    def test_nested_requests_do_not_starve_others(self) -> None:
        budget, (a, b) = opened(SMALL_LIMIT, "a", "b")
        want(budget, a, 1, SMALL_LIMIT)
        want(budget, a, 2, SMALL_LIMIT)
        granted: list[tuple[str, int]] = []
        held = serve(budget, a, 1, SMALL_LIMIT)
        want(budget, b, 1, SMALL_LIMIT, nested=True)
        for call_id in range(2, PASSED_MAX + 3):
            want(budget, b, call_id, SMALL_LIMIT, nested=True)
            granted += calls(budget.release(b, held, 1.0))
            account = a if granted[-1][0] == "a" else b
            held = serve(budget, account, granted[-1][1], SMALL_LIMIT)
        assert granted.index(("a", 2)) == PASSED_MAX

    def test_nested_request_exceeds_the_limit_after_a_long_stall(self) -> None:
        budget, (a, b) = opened(SMALL_LIMIT, "a", "b")
        want(budget, a, 1, 900)
        serve(budget, a, 1, 900)
        assert budget.due_s is None
        want(budget, b, 7, 500, nested=True, now_s=10.0)
        want(budget, b, 8, 500, nested=True, now_s=10.0)
        due_s = 10.0 + BEYOND_AFTER_S
        assert budget.due_s == due_s
        assert budget.on_time(due_s - 0.1) == []
        assert budget.on_time(due_s) == [Grant("b", 7, 500, Why.BEYOND)]
        assert budget.on_time(due_s) == []  # one at a time
        assert budget.due_s == due_s + BEYOND_AFTER_S

    def test_ended_call_shows_progress(self) -> None:
        budget, (a, b) = opened(SMALL_LIMIT, "a", "b")
        for call_id in (1, 2):
            want(budget, a, call_id, 450)
            serve(budget, a, call_id, 450)
        want(budget, b, 7, 900, nested=True, now_s=10.0)
        budget.release(a, 450, 10.5)
        assert budget.due_s == 10.5 + BEYOND_AFTER_S

    def test_plain_request_never_exceeds_the_limit(self) -> None:
        budget, (a,) = opened(SMALL_LIMIT, "a")
        want(budget, a, 1, 900)
        want(budget, a, 2, 900)
        assert budget.due_s is None
        assert budget.on_time(1e9) == []
        assert budget.stalled_s == STALLED_AFTER_S


class TestWindows:
    def test_new_peer_has_a_small_window_that_grows_with_use(self) -> None:
        budget, (a,) = opened(1024 * MIB, "a")
        (grant,) = budget.welcome(a)
        assert (grant.call_id, grant.nbytes) == (WINDOW, MIB)
        (grant,) = budget.release(a, serve(budget, a, 1, MIB), 1.0)
        assert (grant.call_id, grant.nbytes) == (WINDOW, a.window)
        assert a.window == 8 * MIB

    def test_window_is_refilled_when_half_empty(self) -> None:
        budget, (a,) = opened(1024 * MIB, "a")
        budget.welcome(a)
        budget.release(a, serve(budget, a, 1, MIB), 1.0)
        assert budget.release(a, serve(budget, a, 2, MIB), 2.0) == []
        (grant,) = budget.release(a, serve(budget, a, 3, 4 * MIB), 3.0)
        assert grant.nbytes == 5 * MIB

    def test_windows_together_take_an_eighth_at_most(self) -> None:
        names = [f"w{number}" for number in range(1000)]
        budget, accounts = opened(1024 * MIB, *names)
        for account in accounts:
            budget.welcome(account)
            want(budget, account, 1, 1)
        assert sum(account.window for account in accounts) == budget.windows_bytes
        assert budget.windows_bytes <= 128 * MIB
        assert max(account.window for account in accounts) <= WINDOW_BYTES_MAX

    def test_window_is_not_refilled_while_a_request_waits(self) -> None:
        budget, (a, b) = opened(1024 * MIB, "a", "b")
        budget.welcome(a)
        want(budget, b, 1, 1000 * MIB)
        held = serve(budget, a, 1, MIB)
        want(budget, b, 2, 1000 * MIB)
        assert budget.release(a, held, 1.0) == []


class TestGivingBack:
    def test_abandoned_want_lets_the_next_one_go(self) -> None:
        budget, (a, b) = opened(SMALL_LIMIT, "a", "b")
        want(budget, a, 1, 900)
        want(budget, a, 2, 900)
        want(budget, b, 1, 50)
        assert calls(budget.cancel(a, 2, 0, 1.0)) == [("b", 1)]

    def test_ticket_of_an_abandoned_call_returns(self) -> None:
        budget, (a,) = opened(SMALL_LIMIT, "a")
        want(budget, a, 1, 900)
        want(budget, a, 2, 900)
        assert calls(budget.cancel(a, 1, 0, 1.0)) == [("a", 2)]

    def test_credit_of_an_arriving_request_returns(self) -> None:
        budget, (a,) = opened(SMALL_LIMIT, "a")
        want(budget, a, 1, 900)
        budget.begin(a, 1, 900)
        assert budget.cancel(a, 1, 900, 1.0) == []
        assert budget.free_bytes == SMALL_LIMIT

    def test_window_credit_of_an_unsent_request_returns(self) -> None:
        budget, (a,) = opened(1024 * MIB, "a")
        budget.welcome(a)
        assert budget.cancel(a, 1, MIB, 1.0)
        assert budget.held_bytes == 0
        assert a.window == budget.windows_bytes

    def test_cancel_of_a_running_or_ended_call_returns_nothing(self) -> None:
        budget, (a,) = opened(SMALL_LIMIT, "a")
        want(budget, a, 1, 900)
        held = serve(budget, a, 1, 900)
        assert budget.cancel(a, 1, 0, 1.0) == []
        assert budget.held_bytes == held
        budget.release(a, held, 2.0)
        assert budget.cancel(a, 1, 0, 3.0) == []
        assert budget.free_bytes == SMALL_LIMIT

    def test_lost_peer_keeps_only_what_its_calls_hold(self) -> None:
        budget, (a, b) = opened(64 * MIB, "a", "b")
        budget.welcome(a)
        want(budget, a, 1, 20 * MIB)
        held = serve(budget, a, 1, 20 * MIB)
        want(budget, a, 2, 20 * MIB)
        want(budget, a, 3, 20 * MIB)
        budget.begin(a, 3, 20 * MIB)
        want(budget, a, 4, 20 * MIB)
        want(budget, b, 1, 40 * MIB)
        assert calls(budget.close(a, 1.0)) == [("b", 1)]
        assert budget.free_bytes == 4 * MIB
        assert budget.release(a, held, 2.0) == []  # no window for who is gone
        assert budget.free_bytes == 24 * MIB


class TestPeersThatBreakTheRules:
    def test_request_without_credit_is_refused(self) -> None:
        budget, (a,) = opened(SMALL_LIMIT, "a")
        with pytest.raises(MalformedError, match="with a credit of 0 bytes"):
            budget.begin(a, 1, 1)
        want(budget, a, 1, 10)
        with pytest.raises(MalformedError, match="with a credit of 10 bytes"):
            budget.begin(a, 1, 11)

    def test_request_cannot_arrive_twice(self) -> None:
        budget, (a,) = opened(1024 * MIB, "a")
        budget.welcome(a)
        budget.begin(a, 1, 10)
        with pytest.raises(MalformedError):
            budget.begin(a, 1, 10)

    @pytest.mark.parametrize(("call_id", "nbytes"), [(0, 5), (1, 0), (1, -5)])
    def test_want_of_nothing_is_refused(self, call_id: int, nbytes: int) -> None:
        budget, (a,) = opened(SMALL_LIMIT, "a")
        with pytest.raises(MalformedError, match="wants credit for"):
            want(budget, a, call_id, nbytes)

    @pytest.mark.parametrize("nested", [False, True])
    def test_want_is_made_once(self, *, nested: bool) -> None:
        budget, (a,) = opened(SMALL_LIMIT, "a")
        want(budget, a, 1, 900)
        want(budget, a, 2, 900)
        for call_id in (1, 2):
            with pytest.raises(MalformedError, match="twice"):
                want(budget, a, call_id, 10, nested=nested)

    def test_wants_are_limited(self) -> None:
        budget, (a,) = opened(SMALL_LIMIT, "a")
        want(budget, a, 1, SMALL_LIMIT)
        for call_id in range(2, WANTS_MAX + 2):
            want(budget, a, call_id, 1)
        with pytest.raises(MalformedError, match="at once"):
            want(budget, a, WANTS_MAX + 2, 1)

    def test_returned_credit_cannot_exceed_the_granted(self) -> None:
        budget, (a,) = opened(SMALL_LIMIT, "a")
        with pytest.raises(MalformedError):
            budget.cancel(a, 1, 10, 0.0)


class TestWaitingRequests:
    def test_request_within_the_window_goes_at_once(self) -> None:
        waiting: WaitingRequests[str] = WaitingRequests()
        assert not waiting.spend(10)
        assert waiting.on_credit(WINDOW, 15) == (None, [])
        assert waiting.spend(10)
        assert not waiting.spend(10)
        assert waiting.window == 5

    def test_request_beyond_the_window_waits_and_holds_later_ones(self) -> None:
        waiting: WaitingRequests[str] = WaitingRequests()
        assert waiting.wait(7, 10, "seven", nested=False) == [
            CreditWanted(7, 10, nested=False)
        ]
        waiting.on_credit(WINDOW, 100)
        assert not waiting.spend(1)
        assert waiting.on_credit(7, 10) == ("seven", [])
        assert waiting.spend(1)

    def test_wants_of_each_kind_are_limited(self) -> None:
        waiting: WaitingRequests[int] = WaitingRequests()
        for call_id in range(1, WANTS_MAX + 1):
            assert waiting.wait(call_id, 10, call_id, nested=False)
        last = WANTS_MAX + 1
        assert waiting.wait(last, 10, last, nested=False) == []
        assert waiting.wait(last + 1, 10, last, nested=True)
        assert len(waiting) == last + 1
        assert set(waiting) == set(range(1, last + 2))
        assert waiting.on_credit(3, 10) == (3, [CreditWanted(last, 10, nested=False)])

    def test_withdrawn_request_makes_room_for_the_next(self) -> None:
        waiting: WaitingRequests[int] = WaitingRequests()
        for call_id in range(1, WANTS_MAX + 3):
            waiting.wait(call_id, 10, call_id, nested=False)
        last = WANTS_MAX + 2
        assert waiting.withdraw(last) == (False, [])
        assert waiting.withdraw(1) == (True, [CreditWanted(last - 1, 10, nested=False)])
        assert 1 not in waiting
        assert waiting.on_credit(1, 10) == (None, [])  # it crossed the cancel

    def test_lost_peer_clears_all_waiting_requests(self) -> None:
        waiting: WaitingRequests[int] = WaitingRequests()
        waiting.on_credit(WINDOW, 5)
        for call_id in range(1, WANTS_MAX + 3):
            waiting.wait(call_id, 10, call_id, nested=False)
        assert waiting.clear() == set(range(1, WANTS_MAX + 3))
        assert not waiting.window
        assert not len(waiting)
        assert waiting.wait(1, 10, 1, nested=False)

    def test_credit_of_nothing_is_refused(self) -> None:
        waiting: WaitingRequests[int] = WaitingRequests()
        with pytest.raises(MalformedError):
            waiting.on_credit(WINDOW, 0)
