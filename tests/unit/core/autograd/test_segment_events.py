"""What is kept of a segment: which messages fed it, and which ones it feeds."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from asyncrpc.core.autograd.functions import CrossingId
from asyncrpc.core.autograd.messages import PassId, PassIds
from asyncrpc.core.autograd.segment_events import SegmentEvents
from asyncrpc.core.ids import ContextId, Incarnation, MessageId
from asyncrpc.core.trace.events import MESSAGES_MAX
from asyncrpc.trace import FlightRecorder

ME, OTHER = Incarnation(1), Incarnation(2)
ONE: Any = SimpleNamespace(
    ids=PassIds(ContextId(ME, 7), PassId(ME, 9)),
    root="trainer",
)


def crossings(sender: int, *serials: int) -> list[CrossingId]:
    return [
        CrossingId(MessageId(Incarnation(sender), serial), position)
        for position, serial in enumerate(serials)
    ]


def noted(entered: list[CrossingId], left: list[CrossingId]) -> Any:
    recorder = FlightRecorder()
    SegmentEvents(recorder).note(ONE, 3, 1.0, entered, left)
    (event,) = recorder.segments.recent
    return event


@pytest.mark.parametrize(
    ("entered", "messages"),
    [
        ([], ()),
        (crossings(ME, 5), (MessageId(ME, 5),)),
        (crossings(ME, 5, 5, 6, 5), (MessageId(ME, 5), MessageId(ME, 6))),
        (crossings(0, 5), ()),  # a root of the pass
        (crossings(0, 5) + crossings(ME, 5), (MessageId(ME, 5),)),
    ],
)
def test_segment_event_lists_each_message_once(
    entered: list[CrossingId], messages: tuple[MessageId, ...]
) -> None:
    event = noted(entered, crossings(OTHER, 4))
    assert event.fed_by == messages
    assert event.feeds == (MessageId(OTHER, 4),)
    assert event.left_out == 0
    assert all(type(message) is MessageId for message in (*event.fed_by, *event.feeds))


@pytest.mark.parametrize(("more", "less"), [(3, 1), (0, 5), (2, 2 - MESSAGES_MAX)])
def test_segment_event_limits_its_messages_and_counts_the_rest(
    more: int, less: int
) -> None:
    entered = crossings(ME, *range(1, MESSAGES_MAX + more + 1))
    left = crossings(OTHER, *range(1, MESSAGES_MAX + less + 1))
    event = noted(entered, left)
    assert event.fed_by == tuple(
        crossing.message for crossing in entered[:MESSAGES_MAX]
    )
    assert event.feeds == tuple(crossing.message for crossing in left[:MESSAGES_MAX])
    assert event.left_out == more + max(less, 0)
