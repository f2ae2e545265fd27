"""The books of one connection, the order of its streams, and the rate of its calls."""

from __future__ import annotations

from itertools import permutations, product

import pytest

from asyncrpc.core.calls.machine.calls import PendingCalls, ServedCalls
from asyncrpc.core.calls.machine.served_rate import (
    QUIET_S,
    RETRY_AFTER_MAX_S,
    RETRY_AFTER_S,
    ServedRate,
)
from asyncrpc.core.calls.machine.streams import (
    StreamCredit,
    StreamOrder,
    StreamState,
)
from asyncrpc.errors import MalformedError


class TestPendingCalls:
    def test_id_is_used_once(self) -> None:
        pending = PendingCalls[str]()
        first = pending.open("a")
        pending.take(first)
        assert pending.open("b") != first

    def test_answer_takes_its_call(self) -> None:
        pending = PendingCalls[str]()
        call_id = pending.open("a")
        assert pending.get(call_id) == "a"
        assert len(pending) == 1
        assert pending.take(call_id) == "a"
        assert pending.get(call_id) is None
        assert len(pending) == 0

    def test_late_answer_is_not_an_error(self) -> None:
        pending = PendingCalls[str]()
        call_id = pending.open("a")
        pending.take(call_id)
        assert pending.take(call_id) is None

    @pytest.mark.parametrize("call_id", [0, 2, 1 << 64])
    def test_answer_to_unknown_call_is_fault_of_the_peer(self, call_id: int) -> None:
        pending = PendingCalls[str]()
        pending.open("a")
        with pytest.raises(MalformedError, match=f"call {call_id}, which was never"):
            pending.take(call_id)

    def test_pending_calls_may_end_during_iteration(self) -> None:
        pending = PendingCalls[int]()
        ids = [pending.open(index) for index in range(3)]
        for record in pending:
            pending.take(ids[record])
        assert len(pending) == 0

    def test_lost_connection_hands_out_every_call_once(self) -> None:
        pending = PendingCalls[str]()
        pending.open("a")
        pending.open("b")
        assert pending.take_all() == ["a", "b"]
        assert pending.take_all() == []


class TestServedCalls:
    def test_served_call_runs_until_it_ends(self) -> None:
        served = ServedCalls[str]()
        served.begin(7, "a")
        assert served.get(7) == "a"
        assert list(served) == ["a"]
        served.end(7)
        assert served.get(7) is None
        assert len(served) == 0

    def test_running_id_cannot_be_reused(self) -> None:
        served = ServedCalls[str]()
        served.begin(7, "a")
        with pytest.raises(MalformedError, match="call 7 was made twice"):
            served.begin(7, "b")
        assert served.get(7) == "a"

    def test_served_calls_may_end_during_iteration(self) -> None:
        served = ServedCalls[int]()
        for call_id in range(3):
            served.begin(call_id, call_id)
        for record in served:
            served.end(record)
        assert len(served) == 0


END = -1


@pytest.mark.parametrize("arrivals", list(permutations([0, 1, 2, END])))
@pytest.mark.parametrize("is_eager", [False, True])
def test_stream_is_in_order_for_every_order_of_arrival(
    arrivals: tuple[int, ...], *, is_eager: bool
) -> None:
    """Taken as they come, or when all are here: the same, and nothing is missed."""
    order = StreamOrder[int]()
    taken: list[int] = []
    for number, arrival in enumerate(arrivals, 1):
        if arrival == END:
            order.end = 3
        else:
            assert not order.has(arrival)
            order.add(arrival, arrival)
            assert order.has(arrival)
        while is_eager and order.has_next:
            taken.append(order.take())
        is_ended = order.end is not None
        assert order.received == number - is_ended
        if not is_ended:
            assert order.state is StreamState.OPEN
        elif number < len(arrivals):
            assert order.state is StreamState.ENDED
    assert order.state is StreamState.WHOLE
    while order.has_next:
        taken.append(order.take())
    assert taken == [0, 1, 2]
    assert order.is_over
    assert order.is_empty


def test_empty_stream_is_whole_at_its_end() -> None:
    order = StreamOrder[int]()
    assert not order.is_over
    order.end = 0
    assert (order.is_over, order.state) == (True, StreamState.WHOLE)


@pytest.mark.parametrize("plan", list(product("sg", repeat=7)))
def test_producer_stops_at_its_limits(plan: tuple[str, ...]) -> None:
    """At three items, or ten bytes; one item may always be on its way."""
    credit = StreamCredit(3, 10)
    sizes: list[int] = []
    for step, what in enumerate(plan):
        if what == "s" and credit.has_room:
            credit.spend(step * 2)
            sizes.append(step * 2)
        elif what == "g":
            credit.grant(1)
            del sizes[:1]
        assert credit.outstanding == len(sizes) <= 3
        assert credit.has_room == (len(sizes) < 3 and sum(sizes) < 10)
    assert StreamCredit(1, 1).has_room


def test_excess_stream_credit_is_ignored() -> None:
    credit = StreamCredit(2, 10)
    credit.spend(5)
    credit.grant(100)
    credit.spend(5)
    credit.spend(5)
    assert not credit.has_room


def test_first_refusal_gives_the_default_delay() -> None:
    assert ServedRate().retry_after_s(10**6, 100, 5.0) == RETRY_AFTER_S


def test_delay_is_the_time_in_which_as_many_calls_ended() -> None:
    rate = ServedRate()
    rate.retry_after_s(1000, 100, 5.0)
    assert rate.retry_after_s(1050, 100, 5.5) == pytest.approx(1.0)


def test_rate_covers_the_last_seconds() -> None:
    rate = ServedRate()
    for tenth in range(50):  # 100 calls/s
        rate.retry_after_s(10 * tenth, 100, tenth / 10)
    for tenth in range(1, 31):  # then 1,000 calls/s
        delay_s = rate.retry_after_s(490 + 100 * tenth, 100, 4.9 + tenth / 10)
    assert delay_s == pytest.approx(0.1)


def test_quiet_period_gives_the_default_delay() -> None:
    rate = ServedRate()
    rate.retry_after_s(0, 100, 0.0)
    assert rate.retry_after_s(1, 100, QUIET_S + 1) == RETRY_AFTER_S
    assert rate.retry_after_s(201, 100, QUIET_S + 2) == pytest.approx(0.5)


def test_stalled_rate_gives_the_default_delay_and_has_a_limit() -> None:
    rate = ServedRate()
    rate.retry_after_s(7, 100, 0.0)
    assert rate.retry_after_s(7, 100, 0.5) == RETRY_AFTER_S
    assert rate.retry_after_s(8, 100, 0.0) == RETRY_AFTER_S, "no time has passed"
    assert rate.retry_after_s(8, 10**6, 0.9) == RETRY_AFTER_MAX_S
