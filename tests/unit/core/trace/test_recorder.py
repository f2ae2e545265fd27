"""The recorder keeps the last events of each kind; a subscription iterates them."""

from __future__ import annotations

import asyncio
import threading

import pytest

from asyncrpc.core.ids import Incarnation, WorkerId
from asyncrpc.core.trace.stage_steps import STAGE_STEPS_MAX
from asyncrpc.errors import UsageError
from asyncrpc.trace import (
    ITEMS_MAX,
    KINDS,
    RECENT_MAX,
    CallEnded,
    EventRing,
    FlightRecorder,
    LinkChanged,
    MembershipChanged,
    StageSpan,
    StageStep,
    Subscription,
    TraceEvent,
)

PEER = WorkerId("b", Incarnation(7))


def link(at_s: float) -> tuple[object, ...]:
    return (at_s, PEER, "opened", "")


@pytest.fixture
def recorder() -> FlightRecorder:
    return FlightRecorder()


def test_each_kind_has_a_ring_of_its_own(recorder: FlightRecorder) -> None:
    rings = [ring for ring in vars(recorder).values() if isinstance(ring, EventRing)]
    assert [ring.kind for ring in rings] == list(KINDS)
    recorder.links.record(link(1.0))
    assert recorder.links.recent == [LinkChanged(1.0, PEER, "opened", "")]
    assert recorder.membership.recent == []


def test_last_steps_of_stages_are_kept(recorder: FlightRecorder) -> None:
    spans = (StageSpan("forward", 0, 0.0, 0.5),)
    for number in range(2 * STAGE_STEPS_MAX):
        step = StageStep(2.0, 1.0, None, number, "1f1b", 0, 2, spans)
        recorder.stage_steps.append(step)
    numbers = [step.number for step in recorder.stage_steps]
    assert numbers == list(range(STAGE_STEPS_MAX, 2 * STAGE_STEPS_MAX))


def test_subscription_has_room_for_the_recent_events_of_a_kind() -> None:
    assert RECENT_MAX <= ITEMS_MAX


def test_ring_keeps_the_last_events(recorder: FlightRecorder) -> None:
    for at_s in range(RECENT_MAX + 3):
        recorder.links.record(link(at_s))
    recent = recorder.links.recent
    assert len(recent) == RECENT_MAX
    assert (recent[0].at_s, recent[-1].at_s) == (3, RECENT_MAX + 2)


def test_sink_gets_each_event_beside_the_ring(recorder: FlightRecorder) -> None:
    events: list[tuple[object, ...]] = []
    also: list[tuple[object, ...]] = []
    recorder.links.record(link(1.0))
    recorder.links.add_sink(events.append)
    recorder.links.add_sink(also.append)
    recorder.links.record(link(2.0))
    recorder.links.remove_sink(events.append)
    recorder.links.record(link(3.0))
    assert [event[0] for event in events] == [2.0]
    assert [event[0] for event in also] == [2.0, 3.0]
    assert [event.at_s for event in recorder.links.recent] == [1.0, 2.0, 3.0]


def test_ring_without_sinks_records_directly(recorder: FlightRecorder) -> None:
    plain = recorder.links.record
    events: list[tuple[object, ...]] = []
    sink = events.append
    recorder.links.add_sink(sink)
    assert recorder.links.record != plain
    recorder.links.remove_sink(sink)
    assert recorder.links.record == plain


class TestSubscription:
    def test_subscription_takes_events_of_its_kinds(
        self, recorder: FlightRecorder
    ) -> None:
        events = recorder.subscribe([LinkChanged], 10, with_recent=False)
        recorder.membership.record((1.0, PEER, "joined"))
        recorder.links.record(link(2.0))
        assert events.take() == [LinkChanged(2.0, PEER, "opened", "")]
        assert events.take() == []

    def test_subscription_without_kinds_takes_all_events(
        self, recorder: FlightRecorder
    ) -> None:
        events: Subscription[TraceEvent] = recorder.subscribe((), 10, with_recent=False)
        recorder.membership.record((1.0, PEER, "joined"))
        recorder.links.record(link(2.0))
        assert [type(event) for event in events.take()] == [
            MembershipChanged,
            LinkChanged,
        ]

    def test_subscription_begins_with_recent_events_in_order(
        self, recorder: FlightRecorder
    ) -> None:
        recorder.links.record(link(2.0))
        recorder.membership.record((1.0, PEER, "joined"))
        events: Subscription[TraceEvent] = recorder.subscribe((), 10, with_recent=True)
        assert [event.at_s for event in events.take()] == [1.0, 2.0]

    def test_subscription_drops_the_oldest_and_counts_them(
        self, recorder: FlightRecorder
    ) -> None:
        events = recorder.subscribe([LinkChanged], 3, with_recent=False)
        for at_s in range(5):
            recorder.links.record(link(at_s))
        assert [event.at_s for event in events.take()] == [2, 3, 4]
        assert events.dropped == 2

    def test_closed_subscription_takes_nothing_more(
        self, recorder: FlightRecorder
    ) -> None:
        with recorder.subscribe([LinkChanged], 3, with_recent=False) as events:
            recorder.links.record(link(1.0))
        recorder.links.record(link(2.0))
        assert [event.at_s for event in events.take()] == [1.0]
        assert events.is_closed
        events.close()

    def test_subscription_ends_with_recorder(self, recorder: FlightRecorder) -> None:
        events = recorder.subscribe([LinkChanged], 3, with_recent=False)
        recorder.close()
        assert events.is_closed
        assert "closed" in repr(events)

    @pytest.mark.parametrize(
        ("kinds", "items_max", "with_recent", "text"),
        [
            ([int], 1, False, "kinds must be classes of asyncrpc.trace"),
            ([CallEnded], 0, False, "items_max must be an integer of at least 1"),
            ([CallEnded], 1, 1, "with_recent must be True or False"),
        ],
    )
    def test_subscription_refuses_wrong_arguments(
        self,
        recorder: FlightRecorder,
        kinds: list[type],
        items_max: int,
        with_recent: object,
        text: str,
    ) -> None:
        with pytest.raises(UsageError, match=text):
            recorder.subscribe(kinds, items_max, with_recent=with_recent)  # type: ignore[arg-type]


@pytest.fixture
def events(recorder: FlightRecorder) -> Subscription[LinkChanged]:
    return recorder.subscribe([LinkChanged], 100, with_recent=False)


async def waiting(events: Subscription[LinkChanged]) -> asyncio.Task[LinkChanged]:
    """Return a task that waits for the next event."""
    task = asyncio.ensure_future(anext(events))
    await asyncio.sleep(0)
    return task


async def test_recorded_event_is_available_at_once(
    recorder: FlightRecorder, events: Subscription[LinkChanged]
) -> None:
    recorder.links.record((1.0, PEER, "opened", ""))
    assert (await anext(events)).at_s == 1.0


async def test_waiting_task_is_woken(
    recorder: FlightRecorder, events: Subscription[LinkChanged]
) -> None:
    task = await waiting(events)
    recorder.links.record((1.0, PEER, "opened", ""))
    assert (await task).at_s == 1.0


async def test_waiting_task_is_woken_by_another_thread(
    recorder: FlightRecorder, events: Subscription[LinkChanged]
) -> None:
    task = await waiting(events)
    thread = threading.Thread(
        target=recorder.links.record, args=((1.0, PEER, "opened", ""),)
    )
    thread.start()
    assert (await task).at_s == 1.0
    thread.join()


async def test_closed_iteration_ends_after_recorded_events(
    recorder: FlightRecorder, events: Subscription[LinkChanged]
) -> None:
    recorder.links.record((1.0, PEER, "opened", ""))
    recorder.links.record((2.0, PEER, "ended", "gone"))
    events.close()
    assert [event.at_s async for event in events] == [1.0, 2.0]


async def test_closing_ends_a_waiting_task(events: Subscription[LinkChanged]) -> None:
    task = await waiting(events)
    events.close()
    with pytest.raises(StopAsyncIteration):
        await task


async def test_second_task_is_refused(
    recorder: FlightRecorder, events: Subscription[LinkChanged]
) -> None:
    task = await waiting(events)
    with pytest.raises(UsageError, match="subscribe once for each task"):
        await anext(events)
    recorder.links.record((1.0, PEER, "opened", ""))
    assert (await task).at_s == 1.0


async def test_cancellation_loses_no_event(
    recorder: FlightRecorder, events: Subscription[LinkChanged]
) -> None:
    task = await waiting(events)
    recorder.links.record((1.0, PEER, "opened", ""))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (await anext(events)).at_s == 1.0


async def test_subscription_may_move_to_another_loop(
    recorder: FlightRecorder, events: Subscription[LinkChanged]
) -> None:
    def wait_elsewhere() -> None:
        with pytest.raises(TimeoutError):
            asyncio.run(asyncio.wait_for(anext(events), 0.01))

    await asyncio.to_thread(wait_elsewhere)
    recorder.links.record((1.0, PEER, "opened", ""))  # that loop is closed
    assert (await anext(events)).at_s == 1.0
