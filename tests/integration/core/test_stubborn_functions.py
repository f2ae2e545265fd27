"""Functions that will not end, end their worker, or change what they gave meanwhile."""

from __future__ import annotations

import asyncio
import gc
import logging
from contextlib import aclosing
from typing import Any

import pytest
import torch

import asyncrpc
from asyncrpc import DeadlineExceededError, Options, Outcome, Worker, WorkerLostError
from asyncrpc.errors import DecodeError, EncodeError
from asyncrpc.testing import Cluster
from tests.integration.core import shutting, stubborn
from tests.integration.core.company import LIMIT_S, PATIENT, company, work
from tests.integration.core.groups import processes

OPTIONS = Options(drain_timeout_s=0.5, liveness=PATIENT)


@pytest.mark.parametrize(
    "function", [stubborn.block_in_coroutine, stubborn.block_on_loop]
)
async def test_blocked_loop_loses_no_worker(function: Any) -> None:
    async with processes("b", options=OPTIONS) as a, company(a), work(a):
        others = [asyncio.ensure_future(a.peer("b").call(abs, -n)) for n in range(9)]
        assert await a.peer("b").call(function, 1.0) == "slept"
        assert await asyncio.gather(*others) == list(range(9))


@pytest.fixture
def gate() -> Any:
    stubborn.open_gate.clear()
    yield stubborn.open_gate
    stubborn.open_gate.set()


@pytest.mark.usefixtures("gate")
async def test_caller_ends_though_the_cancellation_is_swallowed() -> None:
    """The caller hears at its deadline, or at once; the function ends in its time."""
    async with Cluster(2, options=OPTIONS) as (a, _), company(a):
        peer = a.peer("b")
        with pytest.raises(DeadlineExceededError) as caught:
            await peer.using(timeout_s=0.05).call(stubborn.swallow_cancellations)
        assert caught.value.outcome is Outcome.UNKNOWN
        given_up = asyncio.ensure_future(peer.call(stubborn.swallow_cancellations))
        assert await peer.call(len, "ab") == 2
        given_up.cancel()
        with pytest.raises(asyncio.CancelledError):
            await given_up
        assert await peer.call(len, "ab") == 2
        stubborn.open_gate.set()


async def test_function_that_waits_in_finally_ends_with_its_worker() -> None:
    async with Cluster(2, options=OPTIONS) as (a, _):
        peer = a.peer("b")
        with pytest.raises(DeadlineExceededError):
            await peer.using(timeout_s=0.05).call(stubborn.wait_in_finally)
        assert await peer.call(len, "ab") == 2


@pytest.mark.parametrize(
    "generator",
    [
        stubborn.yield_in_finally,
        stubborn.yield_in_finally_in_thread,
        stubborn.stream_that_waits_in_finally,
    ],
)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
async def test_unclosable_generator_ends_its_stream(generator: Any) -> None:
    async with Cluster(2, options=OPTIONS) as (a, _):
        peer = a.peer("b")
        for _ in range(2):
            async with aclosing(peer.stream(generator)) as items:
                assert await anext(items) == 1
        assert await peer.call(len, "ab") == 2
    gc.collect()  # which closes it in vain, as Python says then


async def test_generator_that_cancels_its_task_is_a_remote_error() -> None:
    async with Cluster(2, options=OPTIONS) as (a, _), company(a):
        items = a.peer("b").stream(stubborn.close_itself)
        assert await anext(items) == 1
        with pytest.raises(asyncrpc.RemoteError, match="CancelledError"):
            await anext(items)


@pytest.mark.usefixtures("gate")
async def test_threads_that_outlive_their_call_are_harmless() -> None:
    async with Cluster(2, options=OPTIONS) as (a, b), company(a):
        for _ in range(3):
            assert await a.peer("b").call(stubborn.leave_a_thread) == "it runs on"
        assert not b.is_closed
    stubborn.join_threads()


@pytest.mark.usefixtures("gate")
async def test_thread_outliving_worker_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The worker ends in time, warns, and the caller hears."""
    with caplog.at_level(logging.WARNING, "asyncrpc"):
        async with Cluster(2, options=OPTIONS) as (a, b):
            held = asyncio.ensure_future(a.peer("b").call(hold_a_thread))
            await asyncio.sleep(0)
            assert await a.peer("b").call(len, "ab") == 2
            await b.shutdown()
            with pytest.raises(WorkerLostError) as caught:
                await held
            assert caught.value.outcome is Outcome.UNKNOWN
    assert "these threads still run" in caplog.text
    stubborn.open_gate.set()


def hold_a_thread() -> None:
    stubborn.open_gate.wait()


async def test_process_exit_loses_its_call_alone() -> None:
    async with (cluster := processes("b", "c", options=OPTIONS)) as a:
        cluster.expect_death("b")
        held = asyncio.ensure_future(a.peer("c").call(abs, -1))
        with pytest.raises(WorkerLostError) as caught:
            await a.peer("b").call(stubborn.exit_at_once)
        assert caught.value.outcome is Outcome.UNKNOWN
        assert await held == 1


async def use(worker: Worker, function: Any) -> list[Any]:
    """Call a function, or read its stream, and return what came."""
    if "generator" in function.__name__:
        return [item async for item in worker.peer("b").stream(function)]
    return [await worker.peer("b").call(function)]


WAITS = ["in_coroutine", "in_thread", "in_generator", "in_async_generator", "at_once"]
DOES_NOT_WAIT = ["on_loop", "in_thread_and_return"]


async def is_over(a: Worker, b: Worker) -> None:
    """The worker has ended, and the other goes on without it."""
    async with asyncio.timeout(LIMIT_S):
        while not b.is_closed:  # noqa: ASYNC110  (nothing tells of it)
            await asyncio.sleep(0.001)
        await shutting.all_ended()
        with pytest.raises((WorkerLostError, asyncrpc.RejectedError)) as caught:
            await a.peer("b").call(len, "ab")
        assert caught.value.outcome is Outcome.NOT_EXECUTED
        assert await a.peer("a").call(len, "ab") == 2


@pytest.mark.parametrize("drain_timeout_s", [0.0, 0.3])
@pytest.mark.parametrize("name", WAITS)
async def test_function_that_awaits_its_own_shutdown_is_cancelled(
    name: str, drain_timeout_s: float
) -> None:
    """The function has the drain timeout, and is cancelled then."""
    options = Options(drain_timeout_s=drain_timeout_s, liveness=PATIENT)
    async with Cluster(2, network="uds", options=options) as (a, b):
        with pytest.raises(WorkerLostError) as caught:
            await asyncio.wait_for(use(a, getattr(shutting, name)), LIMIT_S)
        assert caught.value.outcome is Outcome.UNKNOWN
        await is_over(a, b)


@pytest.mark.parametrize("drain_timeout_s", [0.0, 0.3])
@pytest.mark.parametrize("name", DOES_NOT_WAIT)
async def test_function_may_begin_shutdown(name: str, drain_timeout_s: float) -> None:
    """Without a drain timeout the answer may be lost, which the caller learns."""
    options = Options(drain_timeout_s=drain_timeout_s, liveness=PATIENT)
    async with Cluster(2, network="uds", options=options) as (a, b):
        async with asyncio.timeout(LIMIT_S):
            heard: Any = await asyncio.gather(
                use(a, getattr(shutting, name)), return_exceptions=True
            )
        if drain_timeout_s or not isinstance(heard[0], WorkerLostError):
            assert heard == [["it will be over"]]
        else:
            assert heard[0].outcome is Outcome.UNKNOWN
        await is_over(a, b)


async def test_dictionary_that_grows_while_encoded_is_refused() -> None:
    async with Cluster(2, options=OPTIONS) as (a, _), company(a):
        for _ in range(2):
            with pytest.raises(EncodeError, match="changed size") as caught:
                await a.peer("b").call(stubborn.grows_while_it_is_encoded)
            assert caught.value.outcome is Outcome.EXECUTED


@pytest.mark.parametrize("function", [stubborn.changing_dict, stubborn.changing_list])
async def test_container_changed_by_a_thread_is_torn_or_refused(function: Any) -> None:
    async with processes("b", options=OPTIONS) as a, company(a):
        peer = a.peer("b")
        for _ in range(20):
            try:
                value = await peer.call(function)
            except (EncodeError, DecodeError) as error:
                assert error.outcome is Outcome.EXECUTED  # noqa: PT017
                value = None
            assert value is None or len(value) >= 299
            await peer.call(stubborn.stop_changing)


async def test_tensor_written_by_a_thread_keeps_its_shape() -> None:
    """Each element is a value that was written."""
    async with processes("b", options=OPTIONS) as a, company(a):
        peer = a.peer("b")
        for elements in (3, 5_000, 1 << 20):
            tensor = torch.full((elements,), -1.0)
            value = await peer.call(stubborn.changing_tensor, tensor)
            await peer.call(stubborn.stop_changing)
            assert value.shape == tensor.shape
            assert bool(((value >= -1) & (value == value.round())).all())
