"""What is noted of a call's end takes nothing from who waits for it."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest

from asyncrpc.core.calls.futures import CallFuture
from asyncrpc.core.calls.outbound import CallEnds
from asyncrpc.core.ids import Incarnation, WorkerId
from asyncrpc.trace import CANCELLED, FlightRecorder

PEER = WorkerId("b", Incarnation(7))


@pytest.fixture
def recorder() -> FlightRecorder:
    return FlightRecorder()


async def test_unretrieved_error_is_still_logged(recorder: FlightRecorder) -> None:
    errors: list[dict[str, Any]] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: errors.append(context))
    call: CallFuture[Any] = CallFuture(loop=loop, function="add", to="b")
    call.set_exception(ValueError("it is not there"))
    CallEnds(PEER, recorder).note_unsent(call)
    del call
    gc.collect()
    assert [str(context["exception"]) for context in errors] == ["it is not there"]
    assert [event.outcome for event in recorder.calls.recent] == ["ValueError"]


async def test_abandoned_unsent_call_is_recorded_as_cancelled(
    recorder: FlightRecorder,
) -> None:
    call: CallFuture[Any] = CallFuture(
        loop=asyncio.get_running_loop(), function="add", to="b", began_s=1.0
    )
    call.cancel()
    CallEnds(PEER, recorder).note_unsent(call)
    (noted,) = recorder.calls.recent
    assert (noted.outcome, noted.began_s, noted.call_id) == (CANCELLED, 1.0, 0)


async def test_recorded_call_is_untracked_by_the_collector(
    recorder: FlightRecorder,
) -> None:
    """Thousands of events that it looks after cost calls a tenth of their rate."""
    noted: list[tuple[Any, ...]] = []
    recorder.calls.add_sink(noted.append)
    call: CallFuture[Any] = CallFuture(
        loop=asyncio.get_running_loop(), function="add", to="b", began_s=1.0
    )
    call.cancel()
    ends = CallEnds(PEER, recorder)
    gc.collect()  # it forgets the worker, which is in each event
    ends.note_unsent(call)
    gc.collect()
    assert [gc.is_tracked(fields) for fields in noted] == [False]
    (event,) = recorder.calls.recent
    assert event.to == PEER
    assert isinstance(event.to, WorkerId)
