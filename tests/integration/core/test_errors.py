"""What a function raises is raised at its caller: its type, its text, its cause."""

from __future__ import annotations

import os
import traceback
from typing import Any

import pytest

import asyncrpc
from asyncrpc import Outcome, RemoteError, Worker
from asyncrpc.testing import acting_as
from tests.integration.core import failures, remote
from tests.integration.core.conftest import Trio
from tests.integration.core.failures import TwoArgumentsError
from tests.integration.core.groups import processes


async def raised(trio: Trio, function: Any, *args: Any) -> RemoteError:
    """Call on b, and return the error; afterwards b must work as before."""
    a, _, _ = trio
    with pytest.raises(RemoteError) as caught:
        await a.peer("b").call(function, *args)
    assert await a.peer("b").call(remote.add, 1) == 2
    return caught.value


@pytest.mark.parametrize(
    "function",
    [failures.with_text, failures.with_text_async, failures.with_text_on_loop],
)
async def test_remote_error_has_both_classes_and_text(
    wired: Trio, function: Any
) -> None:
    error = await raised(wired, function)
    assert isinstance(error, ValueError)
    assert (error.args, error.remote_message) == ((failures.TEXT,), failures.TEXT)
    assert error.remote_type.endswith("ValueError")
    assert (error.worker, error.pid, error.to) == ("b", os.getpid(), "b")
    assert error.outcome is Outcome.EXECUTED


async def test_remote_error_is_caught_by_each_of_its_classes(a: Worker) -> None:
    for kind in (ValueError, RemoteError, asyncrpc.CallError, asyncrpc.AsyncRpcError):
        with pytest.raises(kind):
            await a.peer("b").call(failures.with_text)


async def test_the_remote_traceback_is_shown_with_ours(trio: Trio) -> None:
    error = await raised(trio, failures.chained)
    shown = "".join(traceback.format_exception(error))
    assert "on worker 'b'" in shown
    assert "in chained" in shown
    assert 'raise ValueError("outer") from error' in shown
    assert "failures.py" in error.remote_traceback
    assert "/asyncrpc/core/" not in error.remote_traceback


async def test_errors_with_other_constructors_are_rebuilt(trio: Trio) -> None:
    error = await raised(trio, failures.two_arguments)
    assert isinstance(error, TwoArgumentsError)
    assert (error.code, error.reason) == (7, "seven")
    other = await raised(trio, failures.keyword_only)
    assert isinstance(other, failures.KeywordOnlyError)
    assert vars(other)["code"] == 7


async def test_causes_and_contexts_are_kept(trio: Trio) -> None:
    error = await raised(trio, failures.chained)
    assert isinstance(error.__cause__, KeyError)
    assert error.__cause__.args == ("missing",)
    error = await raised(trio, failures.in_context)
    assert isinstance(error.__context__, KeyError)


async def test_exception_groups_can_be_split(trio: Trio) -> None:
    error = await raised(trio, failures.grouped)
    assert isinstance(error, ExceptionGroup)
    matching, rest = error.split(TwoArgumentsError)
    assert matching is not None
    assert rest is not None
    assert isinstance(rest.exceptions[0], ValueError)


async def test_notes_are_kept(trio: Trio) -> None:
    assert "the note" in (await raised(trio, failures.noted)).__notes__


@pytest.mark.parametrize(
    ("function", "remote_type", "text"),
    [
        (failures.unpicklable, "UnpicklableError", "it has a lock"),
        (failures.made_on_the_spot, "LocalError", "only this call knows"),
        (failures.hostile, "HostileError", ""),
        (failures.exit_at_once, "SystemExit", ""),
        (failures.exit_async, "SystemExit", ""),
        (failures.exit_on_loop, "SystemExit", ""),
        (failures.interrupt, "KeyboardInterrupt", ""),
        (failures.stop_iteration, "StopIteration", ""),
        (failures.cancel_itself, "CancelledError", ""),
    ],
)
async def test_error_that_is_not_rebuilt_keeps_its_type_and_text(
    trio: Trio, function: Any, remote_type: str, text: str
) -> None:
    """What would end the caller's process, task or generator is only told of."""
    error = await raised(trio, function)
    assert remote_type in error.remote_type
    assert text in error.remote_message
    assert not isinstance(error, SystemExit | KeyboardInterrupt | StopIteration)


async def test_relayed_error_names_the_first_worker(trio: Trio) -> None:
    error = await raised(trio, failures.relay, "c", failures.two_arguments)
    assert isinstance(error, TwoArgumentsError)
    assert (error.worker, error.to) == ("c", "b")


async def test_errors_reach_a_thread_that_waits(trio: Trio) -> None:
    error = await raised(trio, remote.forward_sync, ["c"], failures.two_arguments)
    assert isinstance(error, TwoArgumentsError)
    assert error.reason == "seven"


async def test_mismatched_arguments_raise_a_type_error(trio: Trio) -> None:
    assert isinstance(await raised(trio, remote.add), TypeError)
    assert isinstance(await raised(trio, remote.add_async, 1, 2, 3), TypeError)
    assert isinstance(await raised(trio, remote.add_on_loop), TypeError)


async def test_unawaited_failed_future_is_logged_with_its_origin(a: Worker) -> None:
    said = []
    loop = a.loop
    before = loop.get_exception_handler()
    loop.set_exception_handler(lambda _loop, context: said.append(context))
    try:
        with acting_as(a):
            call = asyncrpc.rpc_async("b", failures.with_text)
        await a.peer("b").call(failures.relay, "a", remote.where_async)
        while not call.done():
            await a.peer("b").call(remote.add, 1)
        del call
    finally:
        loop.set_exception_handler(before)
    assert len(said) == 1
    assert __file__ in repr(said[0]["future"])


async def test_errors_cross_processes() -> None:
    async with processes("b", transport="tcp") as a:
        with pytest.raises(TwoArgumentsError) as caught:
            await a.peer("b").call(failures.two_arguments)
        assert caught.value.reason == "seven"
        with pytest.raises(RemoteError, match="SystemExit") as ended:
            await a.peer("b").call(failures.exit_async)
        assert ended.value.pid != os.getpid()
        assert await a.peer("b").call(remote.add, 1) == 2
