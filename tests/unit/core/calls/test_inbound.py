"""Calls that are given up: what their functions have returned, and their contexts."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from asyncrpc.core.calls.context import Deadlines, current_call_var
from asyncrpc.core.calls.inbound import InboundCall
from asyncrpc.core.calls.modes import Mode, Target
from asyncrpc.core.loop.tasks import Tasks
from asyncrpc.trace import FlightRecorder


class Host(Tasks):
    """A worker, as far as one call goes."""

    name = "b"
    is_draining = False

    def __init__(self) -> None:
        super().__init__(asyncio.get_running_loop())
        self.context = contextvars.Context()
        self.pool: Any = SimpleNamespace(submit=self._submit)
        self.propagators: list[Any] = []
        self.deadlines = Deadlines(self.loop, InboundCall.expire)
        self.recorder = FlightRecorder()
        self.options: Any = None
        self.ended: Any = None

    def _submit(self, job: Any, done: Any) -> None:
        self.ended = lambda: done(job(), None)  # as when a thread has ended


class Responder:
    """Takes note of calls of which nobody wants an answer."""

    caller = "a"
    backlog: Any = SimpleNamespace(is_pressed=False)

    def __init__(self) -> None:
        self.forgotten: list[InboundCall] = []
        self.has_forgotten = asyncio.Event()

    def forget(self, inbound: InboundCall, *, items: int = 0) -> None:
        self.forgotten.append(inbound)
        self.has_forgotten.set()

    def answer(self, inbound: InboundCall, value: Any) -> None:
        assert value is None


@pytest.mark.parametrize("steps", [0, 1, 2])
async def test_returned_future_is_cancelled_with_its_call_at_any_step(
    steps: int,
) -> None:
    """Also between the end of the function and the first step of what awaits it."""
    host, responder = Host(), Responder()
    returned: asyncio.Future[None] = host.loop.create_future()
    inbound = InboundCall(host, responder, 1, 0.0, None, {})  # type: ignore[arg-type]
    target = Target("give", lambda: returned, Mode.ASYNC_EXECUTION)
    inbound.run(target, [], {})
    host.ended()
    for _ in range(steps):
        await asyncio.sleep(0)
    inbound.cancel()
    await asyncio.wait([returned], timeout=60.0)
    assert returned.cancelled()
    await asyncio.wait_for(responder.has_forgotten.wait(), 60.0)
    assert responder.forgotten == [inbound]


async def test_call_variables_are_readable_while_a_thread_uses_the_context() -> None:
    host = Host()
    inbound = InboundCall(host, Responder(), 1, 0.0, None, {})  # type: ignore[arg-type]
    let_go, is_inside = threading.Event(), asyncio.Event()

    def hold() -> None:
        host.loop.call_soon_threadsafe(is_inside.set)
        let_go.wait()

    inbound.run(Target("hold", hold, Mode.THREAD), [], {})
    thread = threading.Thread(target=host.ended)
    thread.start()
    try:
        await is_inside.wait()
        value = inbound.in_context(lambda value: (current_call_var.get(), value), 2)
        assert value == (inbound, 2)
    finally:
        let_go.set()
        thread.join()
