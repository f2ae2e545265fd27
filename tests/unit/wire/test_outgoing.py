"""A message that waits is sent once or dropped once, whatever it waits for."""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrpc.wire.frames import FrameKind
from asyncrpc.wire.outgoing import (
    TRANSITIONS,
    OutgoingMessage,
    OutgoingMessages,
    OutgoingState,
)

REQUEST, RESPONSE, ITEM = FrameKind.REQUEST, FrameKind.RESPONSE, FrameKind.STREAM_ITEM
NEW, SENT, DROPPED = OutgoingState.NEW, OutgoingState.SENT, OutgoingState.DROPPED
ENDS = {SENT, DROPPED}
WAITS = [state for state in OutgoingState if state not in {NEW, *ENDS}]


class Told:
    """Messages, and what whoever has them is told."""

    def __init__(self) -> None:
        self.outgoing = OutgoingMessages()
        self.events: list[str] = []

    def make(self, kind: int = REQUEST, call_id: int = 1) -> OutgoingMessage:
        return OutgoingMessage(
            kind, call_id, on_sent=partial(self.events.append, f"{call_id} ended")
        )

    def wait(self, message: OutgoingMessage, state: OutgoingState) -> None:
        back = partial(self.events.append, f"{message.call_id} back from {state.name}")
        self.outgoing.wait(message, state, back)


class TestTransitions:
    def test_every_state_is_reached_and_left_but_the_ends(self) -> None:
        assert TRANSITIONS.keys() == set(OutgoingState)
        reached = frozenset().union(*TRANSITIONS.values())
        assert reached == set(OutgoingState) - {NEW}
        assert {state for state in TRANSITIONS if not TRANSITIONS[state]} == ENDS

    def test_a_message_can_be_given_up_wherever_it_waits(self) -> None:
        assert all(DROPPED in TRANSITIONS[state] for state in WAITS)

    def test_it_never_waits_for_the_same_thing_again(self) -> None:
        order = list(OutgoingState)
        for state, following in TRANSITIONS.items():
            assert all(order.index(state) < order.index(one) for one in following)

    @pytest.mark.parametrize("state", WAITS)
    @pytest.mark.parametrize("later", WAITS)
    def test_a_move_that_is_not_listed_is_refused(
        self, state: OutgoingState, later: OutgoingState
    ) -> None:
        told, message = Told(), OutgoingMessage(REQUEST, 1)
        told.wait(message, state)
        if later in TRANSITIONS[state]:
            told.wait(message, later)
            assert message.state is later
        else:
            with pytest.raises(AssertionError, match="to OutgoingState"):
                told.wait(message, later)
            assert message.state is state


class TestDropping:
    @pytest.mark.parametrize("state", WAITS)
    def test_whoever_has_it_gives_it_back_and_it_ends(
        self, state: OutgoingState
    ) -> None:
        told = Told()
        message = told.make()
        told.wait(message, state)
        assert told.outgoing.drop(REQUEST, 1) is state
        assert told.events == [f"1 back from {state.name}", "1 ended"]
        assert message.state is DROPPED
        assert told.outgoing.drop(REQUEST, 1) is None
        assert not len(told.outgoing)

    def test_only_who_has_it_last_is_asked(self) -> None:
        told = Told()
        message = told.make()
        for state in (OutgoingState.NO_CREDIT, OutgoingState.BLOCKED):
            told.wait(message, state)
        told.outgoing.drop(REQUEST, 1)
        assert told.events == ["1 back from BLOCKED", "1 ended"]

    def test_kind_and_call_both_count(self) -> None:
        told = Told()
        told.wait(told.make(), OutgoingState.QUEUED)
        assert told.outgoing.drop(RESPONSE, 1) is None
        assert told.outgoing.drop(REQUEST, 2) is None
        assert len(told.outgoing) == 1

    def test_all_items_of_a_stream_go_together(self) -> None:
        told = Told()
        for _ in range(3):
            told.wait(told.make(ITEM, 4), OutgoingState.QUEUED)
        assert told.outgoing.drop(ITEM, 4)
        assert told.events == ["4 back from QUEUED", "4 ended"] * 3

    def test_what_tells_more_than_a_value_is_not_dropped_for_want_of_interest(
        self,
    ) -> None:
        told = Told()
        headed = OutgoingMessage(RESPONSE, 1, head=b"h")
        pinned = told.make(RESPONSE, 2)
        bare = OutgoingMessage(RESPONSE, 3)
        for message in (headed, pinned, bare):
            told.wait(message, OutgoingState.QUEUED)
        found = [told.outgoing.drop(RESPONSE, at, bare_only=True) for at in (1, 2, 3)]
        assert found == [None, None, OutgoingState.QUEUED]
        assert told.outgoing.drop(RESPONSE, 1)

    def test_whoever_is_told_may_drop_another(self) -> None:
        told = Told()
        messages = [told.make(ITEM) for _ in range(3)]
        messages[0].on_sent = lambda: told.events.append(
            str(told.outgoing.drop(ITEM, 1))
        )
        for message in messages:
            told.wait(message, OutgoingState.QUEUED)
        told.outgoing.sent(messages[0])
        assert told.events[-1] == "OutgoingState.QUEUED"
        assert [one.state for one in messages] == [SENT, DROPPED, DROPPED]


def test_one_that_never_waited_is_sent_all_the_same() -> None:
    told = Told()
    message = told.make()
    told.outgoing.sent(message)
    assert message.state is SENT
    assert told.events == ["1 ended"]


def test_the_end_of_the_connection_ends_all_of_them_once() -> None:
    told = Told()
    for call_id, state in enumerate(WAITS):
        told.wait(told.make(call_id=call_id), state)
    told.outgoing.clear()
    told.outgoing.clear()
    assert told.events == [f"{at} ended" for at in range(len(WAITS))]


@given(data=st.data())
def test_every_way_through_the_table_ends_a_message_once(data: st.DataObject) -> None:
    told = Told()
    message, way = told.make(), [NEW]
    while TRANSITIONS[way[-1]]:
        following = sorted(TRANSITIONS[way[-1]], key=lambda one: one.name)
        way.append(data.draw(st.sampled_from(following)))
        if way[-1] is SENT:
            told.outgoing.sent(message)
        elif way[-1] is DROPPED:
            if told.outgoing.drop(REQUEST, 1) is None:
                told.outgoing.forget(message)
        else:
            told.wait(message, way[-1])
    assert told.events.count("1 ended") == 1
    assert message.state is way[-1]
    assert all(later in TRANSITIONS[state] for state, later in pairwise(way))
    assert not len(told.outgoing)
