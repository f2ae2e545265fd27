"""Items come out in order and once, and a producer never runs too far ahead."""

from __future__ import annotations

from itertools import permutations, product

import pytest

from asyncrpc.core.calls.machine.streams import (
    StreamCredit,
    StreamOrder,
    StreamState,
)

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
