"""Results that belong to their worker, or to yet another: a value, or a clear error.

Of a reference the caller gets its own; what cannot leave its worker is named as the
result that it is.  A future that never comes ends with its worker, at the latest.
"""

from __future__ import annotations

import asyncio
import functools
import gc
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Final

import pytest

import asyncrpc
from asyncrpc import CallError, Options, Outcome, RemoteError, RRef, Worker
from asyncrpc.errors import EncodeError
from asyncrpc.testing import Cluster
from tests.integration.core import kept_results as results
from tests.integration.core.company import (
    LIMIT_S,
    PATIENT,
    company,
    hears,
    tables,
    told_by,
)
from tests.integration.core.groups import processes, until

OPTIONS: Final = Options(drain_timeout_s=2.0, liveness=PATIENT)


@asynccontextmanager
async def third(a: Worker) -> AsyncIterator[None]:
    """Nothing is left at `c`, either."""
    before = await a.peer("c").call(tables)
    yield
    now: Any = None
    try:
        async with asyncio.timeout(LIMIT_S):
            while now != before:
                gc.collect()  # an error that was caught here may hold a reference
                now = await a.peer("c").call(tables)
    except TimeoutError:
        raise AssertionError(f"before: {before}; now: {now}") from None


@pytest.fixture(params=["one process", "processes"])
async def a(request: pytest.FixtureRequest) -> AsyncIterator[Worker]:
    if request.param == "processes":
        async with processes("b", "c", options=OPTIONS) as a:
            yield a
    else:
        async with Cluster(3, options=OPTIONS) as (a, _, _):
            yield a


async def called(a: Worker, function: Callable[..., Any], *args: Any) -> Any:
    return await a.peer("b").call(function, *args)


async def called_remotely(a: Worker, function: Callable[..., Any], *args: Any) -> Any:
    return await a.peer("b").remote(function, *args).to_here()


WAYS: Final = [called, called_remotely]


async def use(a: Worker, way: Any) -> None:
    """Have references of every owner returned, and use them."""
    for owner in ("a", "b", "c"):
        rref: RRef[Any] = await way(a, results.reference_of, owner)
        assert await rref.to_here() == 3
        assert rref.owner_name() == owner
        outer: RRef[Any] = await way(a, results.reference_of_references, owner)
        inner: RRef[Any] = await outer.to_here()
        assert await inner.to_here() == 3
        failed: RRef[Any] = await way(a, results.reference_that_failed, owner)
        for _ in range(2):
            with pytest.raises(ValueError, match="at once") as caught:
                await failed.to_here()
            assert not isinstance(caught.value, RemoteError) or (
                caught.value.worker == owner
            )
    for (reference,) in (await way(a, results.references_of_all)).values():
        assert await reference.to_here() == 3


@pytest.mark.parametrize("way", WAYS)
async def test_references_of_any_owner_become_the_callers(a: Worker, way: Any) -> None:
    async with company(a), third(a):
        await use(a, way)


async def test_references_of_a_cancelled_call_are_released() -> None:
    """The answer comes to nobody: what it lends is given back."""
    async with Cluster(3, options=OPTIONS) as (a, _, _), company(a), third(a):
        for _ in range(5):
            call = a.parts.start_call("b", results.references_of_all)
            await asyncio.sleep(0)  # its request goes first
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call


async def streamed(a: Worker, kind: str) -> list[Any]:
    return [item async for item in a.peer("b").stream(results.in_generator, kind)]


@pytest.mark.parametrize("kind", results.BELONGING)
async def test_result_bound_to_its_worker_is_named(a: Worker, kind: str) -> None:
    async with company(a), third(a):
        attempts = [
            functools.partial(way, a, function, kind)
            for way in WAYS
            for function in (results.in_thread, results.in_coroutine, results.in_list)
        ]
        for attempt in [*attempts, functools.partial(streamed, a, kind)]:
            error = await hears(attempt)
            assert isinstance(error, EncodeError), error
            assert "cannot be sent: " in str(error)
            assert error.to == "b"
            if error.outcome is not Outcome.EXECUTED:
                assert "value of the RRef" in told_by(error), error
            assert await a.peer("b").call(len, "ab") == 2


CANCELLED: Final = ["cancelled", "cancelled concurrent", "cancelled soon"]
NEVER: Final = ["concurrent", "torch's", "this loop's", "call"]


async def test_futures_of_other_loops_are_refused_until_done(a: Worker) -> None:
    async with company(a), third(a):
        for kind in ("another loop's", "a closed loop's"):
            error = await hears(lambda: called(a, results.by_future, kind))  # noqa: B023
            assert isinstance(error, RemoteError), error
            assert "different loop" in str(error) or "another loop" in str(error)
        assert await called(a, results.by_future, "another loop's that is done") == 5
        await a.peer("b").call(results.let_go)


@pytest.mark.parametrize("kind", [*CANCELLED, "cancelled call"])
async def test_cancelled_futures_are_remote_errors(a: Worker, kind: str) -> None:
    async with company(a), third(a):
        for way in WAYS:
            error = await hears(functools.partial(way, a, results.by_future, kind))
            assert isinstance(error, RemoteError), error
            assert "CancelledError" in str(error)
            assert error.outcome is Outcome.EXECUTED
        await a.peer("b").call(results.let_go)


@pytest.mark.parametrize("kind", NEVER)
async def test_endless_future_ends_with_its_call(a: Worker, kind: str) -> None:
    async with company(a), third(a):
        peer = a.peer("b")
        with pytest.raises(asyncrpc.DeadlineExceededError) as caught:
            await peer.using(timeout_s=0.05).call(results.by_future, kind)
        assert caught.value.outcome is Outcome.UNKNOWN
        call = asyncio.ensure_future(peer.call(results.by_future, kind))
        assert await peer.call(len, "ab") == 2
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await peer.call(results.let_go)


async def test_future_of_a_cancelled_call_is_cancelled(a: Worker) -> None:
    async with company(a), third(a):
        peer = a.peer("b")
        call = asyncio.ensure_future(peer.call(results.call_behind_gate))
        while not (await a.peer("c").call(tables))["active"]:  # noqa: ASYNC110
            await asyncio.sleep(0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await peer.call(results.open_gate)


@pytest.mark.parametrize("kind", NEVER)
@pytest.mark.parametrize("drain_timeout_s", [0.0, 0.2])
async def test_endless_future_ends_at_shutdown(
    kind: str, drain_timeout_s: float
) -> None:
    options = Options(drain_timeout_s=drain_timeout_s, liveness=PATIENT)
    async with Cluster(3, network="uds", options=options) as (a, b, _):
        calls = [
            asyncio.ensure_future(a.peer("b").call(results.by_future, kind)),
            asyncio.ensure_future(
                a.peer("b").remote(results.by_future, kind).to_here()
            ),
        ]
        await until(lambda: b.parts.active >= 2 and not b.parts.pool.unfinished)
        async with asyncio.timeout(LIMIT_S):
            await b.shutdown()
            for call in calls:
                with pytest.raises(CallError) as caught:
                    await call
                assert isinstance(caught.value, asyncrpc.WorkerLostError), caught.value
                assert caught.value.outcome is Outcome.UNKNOWN
        assert await a.peer("c").call(len, "ab") == 2
        results.let_go()
