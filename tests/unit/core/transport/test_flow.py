"""Water marks: one event on the way up, one on the way down, none between."""

from __future__ import annotations

import asyncio

import pytest

from asyncrpc.core.transport.flow import Gauge, WaterMarks
from asyncrpc.errors import UsageError
from asyncrpc.testing.conformance import Recorder


def test_water_marks_must_be_in_order() -> None:
    with pytest.raises(UsageError, match="low 2 and high 1"):
        WaterMarks(high_bytes=1, low_bytes=2)


async def test_events_come_at_the_marks_only() -> None:
    handler = Recorder()
    gauge = Gauge(handler, WaterMarks(high_bytes=100, low_bytes=20))
    gauge.add(100)
    assert handler.events == []
    gauge.add(1)
    gauge.add(50)
    assert handler.events == ["pause_writing"]
    gauge.remove(130)
    assert handler.events == ["pause_writing"]
    gauge.remove(1)
    gauge.remove(20)
    assert handler.events == ["pause_writing", "resume_writing"]
    assert gauge.queued_bytes == 0
    assert asyncio.get_running_loop().is_running()


async def test_changed_water_marks_hold_from_then_on() -> None:
    handler = Recorder()
    gauge = Gauge(handler, WaterMarks(high_bytes=100, low_bytes=20))
    gauge.use(WaterMarks(high_bytes=0, low_bytes=0))
    gauge.add(2)
    gauge.remove(1)
    assert handler.events == ["pause_writing"]
    gauge.remove(1)
    assert handler.events == ["pause_writing", "resume_writing"]


async def test_cleared_gauge_is_silent() -> None:
    handler = Recorder()
    gauge = Gauge(handler, WaterMarks(high_bytes=1, low_bytes=0))
    gauge.add(2)
    gauge.clear()
    gauge.remove(0)
    assert handler.events == ["pause_writing"]
    assert gauge.queued_bytes == 0
