"""A worker that is used on an event loop that is not its own.

As with the session's fixture of a test suite whose tests have loops of their own.
"""

from __future__ import annotations

import asyncio
import contextvars
import json
import subprocess
import sys
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, closing
from typing import Any

import pytest

import asyncrpc
from asyncrpc.core.calls.context import current_worker_var
from tests.integration.core.groups import alone
from tests.integration.core.two_loops import (
    ASYNCIO,
    DOORS,
    RAN,
    STARTS,
    Program,
    note,
    on_second_loop,
    outcomes,
    without_loop,
)

CLOSED = asyncio.Event()
ON_SECOND = DOORS | STARTS | ASYNCIO
OWNER = "must be used on the event loop that"


@pytest.fixture
def program() -> Iterator[Program]:
    program = Program()
    with closing(program.home), closing(program.second):
        yield program
        program.home.run_until_complete(program.close())


def wrong(program: Program, did: dict[str, str], right: str) -> dict[str, str]:
    """Return what was not refused with these words, and what ran afterwards."""
    program.home.run_until_complete(program.wait_until_idle())
    others = {
        door: what
        for door, what in did.items()
        if not what.startswith("refused") or right not in what or "and ran" in what
    }
    return others | ({"afterwards": f"ran {RAN}"} if RAN else {})


def test_second_loop_of_the_thread_is_refused(program: Program) -> None:
    did = outcomes(program, ON_SECOND, on_second_loop)
    did.pop("start")  # it has been started
    assert wrong(program, did, "on another one") == {}


def test_loop_of_another_thread_is_refused(program: Program) -> None:
    did = program.home.run_until_complete(
        asyncio.to_thread(outcomes, program, ON_SECOND, on_second_loop)
    )
    did.pop("start")
    assert wrong(program, did, "on another one") == {}


def test_coroutine_without_a_running_loop_is_refused(program: Program) -> None:
    doors = {name: door for name, door in DOORS.items() if name != "two calls"}
    did = program.home.run_until_complete(
        asyncio.to_thread(outcomes, program, doors, without_loop)
    )
    for needs_a_loop in ("start", "Limiter", "Preemption"):  # which may be any
        assert did.pop(needs_a_loop).startswith("refused")
    assert wrong(program, did, "in a thread without one") == {}
    assert not RAN


def test_future_of_a_plain_thread_is_awaited_on_the_loop(program: Program) -> None:
    did = program.home.run_until_complete(
        asyncio.to_thread(outcomes, program, STARTS, without_loop)
    )
    assert all(OWNER in what for what in did.values()), did


def test_worker_with_a_closed_loop_is_refused() -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "tests.integration.core.two_loops"],
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    did = json.loads(ended.stdout)
    did.pop("start")
    assert {name: what for name, what in did.items() if "is closed;" not in what} == {}
    assert "and ran" not in ended.stdout


def test_call_may_start_between_two_runs_of_the_loop(program: Program) -> None:
    future = program.worker.parts.start_call("w", note, ("later",))
    assert program.home.run_until_complete(future) == "later"


def test_finished_future_is_awaited_on_any_loop(program: Program) -> None:
    future = program.worker.parts.start_call("w", note, ("later",))
    program.home.run_until_complete(future)

    async def use() -> str:
        return await future  # type: ignore[no-any-return]

    assert program.second.run_until_complete(use()) == "later"


def test_a_call_is_not_cancelled_once_its_loop_has_been_closed() -> None:
    loop = asyncio.new_event_loop()
    call: Any = asyncrpc.CallFuture(loop=loop, function="f", to="b")
    loop.close()
    assert not call.cancel()


async def until_closed() -> AsyncGenerator[int, None]:
    try:
        yield 1
        await asyncio.Event().wait()
    finally:
        CLOSED.set()


async def test_stream_closed_by_another_thread_ends_its_producer() -> None:
    async with alone("w") as worker:
        items: Any = worker.peer("w").stream(until_closed)
        await anext(items)
        await asyncio.to_thread(lambda: asyncio.run(items.aclose()))
        await CLOSED.wait()


async def test_context_and_deadline_may_end_in_another_task() -> None:
    async def hold() -> AsyncGenerator[None, None]:
        async with asyncrpc.autograd.context(), asyncrpc.deadline(3600.0):
            yield

    worker = alone("w")
    async with worker, aclosing(hold()) as held:
        await asyncio.create_task(held.asend(None))


def test_a_task_has_the_worker_of_its_own_loop(program: Program) -> None:
    """As in a test that has fixtures of several scopes: one context, several loops."""
    context = contextvars.copy_context()
    other = alone("other")

    async def current() -> Any:
        async with asyncrpc.autograd.context():
            return asyncrpc.current_worker()

    def on(loop: asyncio.AbstractEventLoop, work: Any) -> Any:
        return loop.run_until_complete(loop.create_task(work, context=context))

    on(program.second, other.__aenter__())
    context.run(current_worker_var.set, program.worker)
    assert on(program.home, current()) is program.worker
    assert on(program.second, current()) is other
    assert on(program.home, current()) is program.worker
    program.second.run_until_complete(other.__aexit__(None, None, None))
    with pytest.raises(asyncrpc.UsageError, match=OWNER):
        on(program.second, current())
