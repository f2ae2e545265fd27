"""What a function raises is raised at its caller: its type, its text, its cause."""

from __future__ import annotations

import os
import traceback
from typing import Any

import pytest

import asyncrpc
from asyncrpc import Outcome, RemoteError
from asyncrpc.testing import ProcessCluster, acting_as
from tests.integration.core import failures, remote
from tests.integration.core.conftest import Trio
from tests.integration.core.failures import TwoArgumentsError


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
async def test_remote_error_has_both_classes_and_its_whole_text(
    wired: Trio, function: Any
) -> None:
    error = await raised(wired, function)
    assert isinstance(error, ValueError)
    assert error.args == (failures.TEXT,)
    assert error.remote_message == failures.TEXT
    assert error.remote_type.endswith("ValueError")
    assert (error.worker, error.pid, error.to) == ("b", os.getpid(), "b")
    assert error.outcome is Outcome.EXECUTED


async def test_remote_error_is_caught_by_each_of_its_classes(trio: Trio) -> None:
    a, _, _ = trio
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
    error = await raised(trio, failures.noted)
    assert "the note" in error.__notes__


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (failures.unpicklable, "it has a lock"),
        (failures.made_on_the_spot, "only this call knows"),
    ],
)
async def test_unrebuildable_error_keeps_its_name_and_text(
    trio: Trio, function: Any, text: str
) -> None:
    error = await raised(trio, function)
    assert text in error.remote_message
    assert "Error" in error.remote_type


async def test_error_without_a_text_is_raised(trio: Trio) -> None:
    assert "HostileError" in (await raised(trio, failures.hostile)).remote_type


@pytest.mark.parametrize(
    "function", [failures.exit_at_once, failures.exit_async, failures.exit_on_loop]
)
async def test_function_that_exits_ends_neither_worker(
    trio: Trio, function: Any
) -> None:
    error = await raised(trio, function)
    assert "SystemExit" in error.remote_type
    assert not isinstance(error, SystemExit)


async def test_remote_keyboard_interrupt_does_not_interrupt_the_caller(
    trio: Trio,
) -> None:
    error = await raised(trio, failures.interrupt)
    assert "KeyboardInterrupt" in error.remote_type


async def test_stop_iteration_does_not_end_the_callers_generator(trio: Trio) -> None:
    error = await raised(trio, failures.stop_iteration)
    assert "StopIteration" in error.remote_type


async def test_a_function_that_cancels_itself_does_not_cancel_its_caller(
    trio: Trio,
) -> None:
    error = await raised(trio, failures.cancel_itself)
    assert "CancelledError" in error.remote_type


async def test_relayed_error_names_the_first_worker(trio: Trio) -> None:
    error = await raised(trio, failures.relay, "c", failures.two_arguments)
    assert isinstance(error, TwoArgumentsError)
    assert error.worker == "c"
    assert error.to == "b"


async def test_errors_reach_a_thread_that_waits(trio: Trio) -> None:
    error = await raised(trio, remote.forward_sync, ["c"], failures.two_arguments)
    assert isinstance(error, TwoArgumentsError)
    assert error.reason == "seven"


async def test_mismatched_arguments_raise_a_type_error(trio: Trio) -> None:
    assert isinstance(await raised(trio, remote.add), TypeError)
    assert isinstance(await raised(trio, remote.add_async, 1, 2, 3), TypeError)
    assert isinstance(await raised(trio, remote.add_on_loop), TypeError)


async def test_unawaited_failed_future_is_logged_with_its_origin(trio: Trio) -> None:
    a, _, _ = trio
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
    async with ProcessCluster(["b"], transport="tcp", method="forkserver") as a:
        with pytest.raises(TwoArgumentsError) as caught:
            await a.peer("b").call(failures.two_arguments)
        assert caught.value.reason == "seven"
        with pytest.raises(RemoteError, match="SystemExit") as ended:
            await a.peer("b").call(failures.exit_async)
        assert ended.value.pid != os.getpid()
        assert await a.peer("b").call(remote.add, 1) == 2
