"""Backward passes and optimizer steps end with the worker that waits for them."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import Any, Final

import pytest
import torch

from asyncrpc import DeviceOptions, Options, RRef
from asyncrpc.autograd import backward, context
from asyncrpc.core.members import UNKNOWN_INCARNATION
from asyncrpc.core.optim.gathered import run_with_callbacks
from asyncrpc.errors import (
    AutogradError,
    ClosedError,
    ConnectionLostError,
    OptimizerError,
)
from asyncrpc.optim import DistributedOptimizer
from asyncrpc.testing import Cluster, acting_as
from tests.inner_state import turns_of
from tests.integration.core.groups import until
from tests.integration.core.proxied import proxied
from tests.integration.core.remote import double
from tests.integration.misuse.traffic import make_parameter

LIMIT_S: Final = 60.0
AT_ONCE = Options(drain_timeout_s=0.0)


async def test_pass_without_a_thread_for_its_segment_ends() -> None:
    # In turns: else other threads would be started.
    options = Options(
        threads=1, devices=DeviceOptions(exclusive=True), drain_timeout_s=0.0
    )
    go = threading.Event()
    try:
        async with Cluster(1, options=options) as (a,):
            with acting_as(a):
                async with context() as ctx:
                    loss = torch.ones(2, requires_grad=True).sum()
                    a.parts.run_in_thread(lambda: go.wait(LIMIT_S))
                    running = asyncio.create_task(backward(ctx, [loss]))
                    await until(lambda: a.parts.pool.unfinished == 2)
                    await a.shutdown()
                    with pytest.raises((AutogradError, ClosedError)):
                        await asyncio.wait_for(running, LIMIT_S)
    finally:
        go.set()


async def test_pass_with_a_cancelled_dial_ends() -> None:
    async with proxied("a", "b", options=AT_ONCE) as (workers, proxies):
        a = workers["a"]
        with acting_as(a):
            async with context() as ctx:
                leaf = torch.ones(2, requires_grad=True)
                loss = (await a.peer("b").call(double, leaf)).sum()
                entry = a.parts.directory.find("b")
                assert entry.link is not None
                proxies["b"].partition()
                entry.link.connection.end(ConnectionLostError("cut by the test"))
                running = asyncio.create_task(backward(ctx, [loss]))
                await until(lambda: entry.dial is not None, step_s=0.0)
                await a.shutdown()
                with pytest.raises(AutogradError):
                    await asyncio.wait_for(running, LIMIT_S)
        proxies["b"].heal()


async def test_step_waiting_for_its_turn_ends_with_the_worker() -> None:
    async with Cluster(1, options=AT_ONCE) as (a,):
        with acting_as(a):
            parameter = torch.nn.Parameter(torch.ones(2))
            rref = RRef(parameter)
            first, second = (
                DistributedOptimizer(torch.optim.SGD, [rref], lr=0.1) for _ in range(2)
            )
            async with context() as ctx:
                await backward(ctx, [(2 * parameter).sum()])
                inside = asyncio.Event()

                async def closure(_: Any) -> torch.Tensor:
                    inside.set()
                    await asyncio.Event().wait()
                    return torch.zeros(())

                central = DistributedOptimizer(torch.optim.LBFGS, [rref])
                stepping = asyncio.create_task(central.step(closure=closure))
                await inside.wait()
                steps = [
                    asyncio.create_task(optimizer.step(ctx))
                    for optimizer in (first, second)
                ]
                service: Any = a.parts.service("optim")
                await until(lambda: turns_of(service) == 3)
                await a.shutdown()
                async with asyncio.timeout(LIMIT_S):
                    for step in steps:
                        with pytest.raises(OptimizerError, match="shut down"):
                            await step
                stepping.cancel()
                await asyncio.wait([stepping])


async def test_optimizer_closure_called_after_the_end_fails_again() -> None:
    """The algorithm catches the first error, as a line search may."""
    asked = asyncio.Event()

    def algorithm(ask: Callable[[], Any]) -> Any:
        with contextlib.suppress(Exception):
            ask()
        return ask()

    async def evaluate() -> None:
        asked.set()
        await asyncio.Event().wait()

    async with Cluster(1, options=AT_ONCE) as (a,):
        driving = asyncio.create_task(run_with_callbacks(a.parts, algorithm, evaluate))
        await asked.wait()
        driving.cancel()
        done, _ = await asyncio.wait([driving], timeout=LIMIT_S)
        assert done
        assert driving.cancelled()


@pytest.mark.parametrize("optimizer_class", ["SGD", "LBFGS"])
async def test_optimizer_waits_for_owners_of_parameters(optimizer_class: str) -> None:
    """While a connection is broken it is not known which life will make a value."""
    async with Cluster(2, options=AT_ONCE) as (a, _):
        peer = a.peer("b")
        await peer.call(double, torch.ones(2))
        entry = a.parts.directory.find("b")
        assert entry.link is not None
        with acting_as(a):
            entry.link.connection.resumption.break_off("cut by the test")
            assert entry.link is None
            first = peer.remote(make_parameter)
            assert first.owner_id.incarnation == UNKNOWN_INCARNATION
            optimizer = await DistributedOptimizer(optimizer_class, [first])
            if optimizer_class == "SGD":  # the other takes one group only
                link = a.parts.directory.find("b").link
                assert link is not None
                link.connection.resumption.break_off("cut by the test")
                second = peer.remote(make_parameter)
                await optimizer.add_param_group({"params": [second]})
                assert second.owner_id == first.owner_id
            assert optimizer.options.param_groups
