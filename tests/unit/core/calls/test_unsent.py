"""What goes wrong before a call is sent fails the call, and says that it never ran."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from asyncrpc import (
    AsyncRpcError,
    DeadlineExceededError,
    Outcome,
    UsageError,
    WorkerLostError,
)
from asyncrpc.core.calls.futures import CallFuture
from asyncrpc.core.calls.unsent import UnsentCalls
from asyncrpc.core.loop.clock import Deadline
from asyncrpc.errors import EncodeError


def call_to_b() -> CallFuture[Any]:
    return CallFuture(loop=asyncio.get_running_loop(), function="add", to="b")


async def test_unsent_call_is_counted_while_it_waits() -> None:
    unsent, call = UnsentCalls(), call_to_b()
    with unsent.waiting(call, None, "it had a connection"):
        assert unsent.count == 1
    assert unsent.count == 0
    assert not call.done()
    call.cancel()


@pytest.mark.parametrize(
    ("raised", "kind"),
    [
        (EncodeError("no"), EncodeError),
        (UsageError("no"), UsageError),
        (TimeoutError(), DeadlineExceededError),
        (ValueError("no"), ValueError),
    ],
)
async def test_error_before_the_sending_fails_the_call(
    raised: Exception, kind: type[Exception]
) -> None:
    unsent, call = UnsentCalls(), call_to_b()
    with unsent.waiting(call, Deadline.after(2.0, 0.0), "it had a connection"):
        raise raised
    assert unsent.count == 0
    with pytest.raises(kind) as caught:
        await call
    error: Any = caught.value
    if isinstance(error, EncodeError | DeadlineExceededError):
        assert (error.function, error.to) == ("add", "b")
    if isinstance(error, DeadlineExceededError):
        assert error.outcome is Outcome.NOT_EXECUTED
        assert "2 s" in str(error)


async def test_cancelled_wait_fails_the_call_with_what_was_missing() -> None:
    unsent, call = UnsentCalls(), call_to_b()

    async def wait() -> None:
        with unsent.waiting(call, None, "it had a connection"):
            await asyncio.Event().wait()

    waiting = asyncio.create_task(wait())
    await asyncio.sleep(0)
    assert unsent.count == 1
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert unsent.count == 0
    with pytest.raises(WorkerLostError, match="before it had a connection") as caught:
        await call
    assert caught.value.outcome is Outcome.NOT_EXECUTED
    assert isinstance(caught.value, AsyncRpcError)
