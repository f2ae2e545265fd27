"""A subscription is an iterator: of one task, from any thread, until it is closed."""

from __future__ import annotations

import asyncio
import threading

import pytest

from asyncrpc.core.ids import Incarnation, WorkerId
from asyncrpc.errors import UsageError
from asyncrpc.trace import FlightRecorder, LinkChanged, Subscription

PEER = WorkerId("b", Incarnation(7))


@pytest.fixture
def recorder() -> FlightRecorder:
    return FlightRecorder()


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
