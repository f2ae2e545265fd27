"""A message that waits is sent once or dropped once, whatever it waits for."""

from __future__ import annotations

from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrpc.core.wire.frames import FrameKind
from asyncrpc.core.wire.outgoing import (
    TRANSITIONS,
    OutgoingEvent,
    OutgoingMessage,
    OutgoingMessages,
    OutgoingState,
)

REQUEST, RESPONSE, ITEM = FrameKind.REQUEST, FrameKind.RESPONSE, FrameKind.STREAM_ITEM
NEW, SENT, DROPPED = OutgoingState.NEW, OutgoingState.SENT, OutgoingState.DROPPED
ENDS = {SENT, DROPPED}
WAITS = [event for event in OutgoingEvent if TRANSITIONS[NEW][event] not in ENDS]


class Told:
    """Messages, and what whoever has them is told."""

    def __init__(self) -> None:
        self.outgoing = OutgoingMessages()
        self.events: list[str] = []

    def make(self, kind: int = REQUEST, call_id: int = 1) -> OutgoingMessage:
        buffers = [memoryview(b"payload")]
        return OutgoingMessage(
            kind,
            call_id,
            buffers=buffers,
            on_sent=partial(self.events.append, f"{call_id} ended"),
        )

    def wait(self, message: OutgoingMessage, event: OutgoingEvent) -> None:
        back = partial(self.events.append, f"{message.call_id} back: {event.name}")
        self.outgoing.wait(message, event, back)


class TestDropping:
    @pytest.mark.parametrize("event", WAITS)
    def test_dropped_message_is_returned_by_its_holder_and_ends(
        self, event: OutgoingEvent
    ) -> None:
        queue = Told()
        message = queue.make()
        queue.wait(message, event)
        assert queue.outgoing.drop(REQUEST, 1) is TRANSITIONS[NEW][event]
        assert queue.events == [f"1 back: {event.name}", "1 ended"]
        assert message.state is DROPPED
        assert queue.outgoing.drop(REQUEST, 1) is None
        assert not len(queue.outgoing)

    def test_drop_asks_the_last_holder_only(self) -> None:
        queue = Told()
        message = queue.make()
        for event in (OutgoingEvent.AWAIT_CREDIT, OutgoingEvent.BLOCK):
            queue.wait(message, event)
        queue.outgoing.drop(REQUEST, 1)
        assert queue.events == ["1 back: BLOCK", "1 ended"]

    def test_drop_matches_kind_and_call(self) -> None:
        queue = Told()
        queue.wait(queue.make(), OutgoingEvent.QUEUE)
        assert queue.outgoing.drop(RESPONSE, 1) is None
        assert queue.outgoing.drop(REQUEST, 2) is None
        assert len(queue.outgoing) == 1

    def test_drop_takes_all_items_of_a_stream(self) -> None:
        queue = Told()
        for _ in range(3):
            queue.wait(queue.make(ITEM, 4), OutgoingEvent.QUEUE)
        assert queue.outgoing.drop(ITEM, 4)
        assert queue.events == ["4 back: QUEUE", "4 ended"] * 3

    def test_answer_with_more_than_a_value_is_not_dropped_as_unwanted(self) -> None:
        queue = Told()
        headed = OutgoingMessage(RESPONSE, 1, head=b"h")
        pinned = queue.make(RESPONSE, 2)
        bare = OutgoingMessage(RESPONSE, 3)
        for message in (headed, pinned, bare):
            queue.wait(message, OutgoingEvent.QUEUE)
        states = [queue.outgoing.drop(RESPONSE, at, bare_only=True) for at in (1, 2, 3)]
        assert states == [None, None, OutgoingState.QUEUED]
        assert queue.outgoing.drop(RESPONSE, 1)

    def test_callback_may_drop_another_message(self) -> None:
        queue = Told()
        messages = [queue.make(ITEM) for _ in range(3)]
        messages[0].on_sent = lambda: queue.events.append(
            str(queue.outgoing.drop(ITEM, 1))
        )
        for message in messages:
            queue.wait(message, OutgoingEvent.QUEUE)
        queue.outgoing.sent(messages[0])
        assert queue.events[-1] == "OutgoingState.QUEUED"
        assert [dropped.state for dropped in messages] == [SENT, DROPPED, DROPPED]


def test_message_that_never_waited_is_sent() -> None:
    queue = Told()
    message = queue.make()
    queue.outgoing.sent(message)
    assert message.state is SENT
    assert queue.events == ["1 ended"]


def test_end_of_the_connection_ends_all_messages_once() -> None:
    queue = Told()
    for call_id, event in enumerate(WAITS):
        queue.wait(queue.make(call_id=call_id), event)
    queue.outgoing.clear()
    queue.outgoing.clear()
    assert queue.events == [f"{at} ended" for at in range(len(WAITS))]


@given(data=st.data())
def test_every_path_through_the_table_ends_a_message_once(data: st.DataObject) -> None:
    queue = Told()
    message = queue.make()
    while row := TRANSITIONS[message.state]:
        event = data.draw(st.sampled_from(list(row)))
        if event is OutgoingEvent.SEND:
            queue.outgoing.sent(message)
        elif event is not OutgoingEvent.DROP:
            queue.wait(message, event)
        elif queue.outgoing.drop(REQUEST, 1) is None:
            queue.outgoing.forget(message)
        assert message.state is row[event]
    assert queue.events.count("1 ended") == 1
    assert message.buffers == ()
    assert not len(queue.outgoing)


def test_sent_answer_that_waited_reports_less_kept() -> None:
    queue = Told()
    queue.outgoing.on_less = partial(queue.events.append, "less")
    for kind in (REQUEST, RESPONSE, ITEM):
        message = queue.make(kind)
        message.on_sent = None
        queue.wait(message, OutgoingEvent.COPY)
        assert queue.outgoing.answer_bytes == (0 if kind == REQUEST else 7)
        queue.outgoing.sent(message)
        assert queue.outgoing.answer_bytes == 0
    at_once = queue.make(RESPONSE)
    at_once.on_sent = None
    queue.outgoing.sent(at_once)
    assert queue.events == ["less", "less"]
