"""Steps on a network whose messages take their time, in simulation."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest
import torch

from asyncrpc.autograd import backward, context
from asyncrpc.optim import DistributedOptimizer
from asyncrpc.testing.loop import SimLoop
from asyncrpc.testing.network import Network
from tests.numerics.groups import STEPS, group_of
from tests.numerics.remote import total

ONES = torch.ones(3, dtype=torch.float64)


async def given_up(step: Coroutine[Any, Any, Any], after_s: float) -> bool:
    """Cancel a step after so long, in virtual time; return whether it was over."""
    stepping = asyncio.create_task(step)
    await asyncio.sleep(after_s)
    is_done = stepping.done()
    stepping.cancel()
    await asyncio.wait([stepping])
    await asyncio.sleep(30.0)  # virtual: whatever is under way arrives
    return is_done


class TestDelays:
    """Three workers, each a host of its own."""

    loops = {"sim": SimLoop}  # noqa: RUF012  (read once, by the conftest)

    @pytest.mark.parametrize("seed", range(5))
    async def test_a_step_waits_for_the_commit_of_a_pass_started_elsewhere(
        self, seed: int
    ) -> None:
        """It comes to `c` from `b`, over a slow link; the step, from `a`, is sooner."""
        network = Network(seed)
        async with group_of("c", network=network) as group:
            optimizer = await DistributedOptimizer("SGD", group.parameters, lr=0.1)
            network.between("b", "c").delay(1.0)
            for _ in range(STEPS):
                async with context() as ctx:
                    b = group.workers[0].peer("b")
                    out = b.remote(total, group.modules[0], ONES)
                    await out.backward(ctx)
                    assert (await optimizer.step(ctx)).gradients == 1
                    del out
            (weights,) = await group.weights()
            torch.testing.assert_close(weights, ONES * (1 - STEPS * 0.1))

    @pytest.mark.parametrize("seed", range(12))
    @pytest.mark.parametrize("give_up_s", [0.0, 1.5, 2.5, 3.5, 10.0])
    async def test_a_step_that_is_cancelled_is_applied_everywhere_or_nowhere(
        self, seed: int, give_up_s: float
    ) -> None:
        network = Network(seed)
        async with group_of("bc", network=network) as group:
            optimizer = await DistributedOptimizer("SGD", group.parameters, lr=0.1)
            async with context() as ctx:
                outs = [await module.rpc_async()(ONES) for module in group.modules]
                await backward(ctx, [torch.stack(outs).sum()])
                for name in "bc":
                    network.between("a", name).delay(1.0)
                await given_up(optimizer.step(ctx), give_up_s)
                first, second = await group.weights()
                assert torch.equal(first, second)

    @pytest.mark.parametrize("seed", range(12))
    @pytest.mark.parametrize("give_up_s", [0.0, 1.5, 2.5, 3.5, 4.5, 100.0])
    async def test_cancelled_step_of_a_pass_is_applied_everywhere_or_nowhere(
        self, seed: int, give_up_s: float
    ) -> None:
        network = Network(seed)
        async with group_of("bc", network=network) as group:
            optimizer = await DistributedOptimizer("SGD", group.parameters, lr=0.25)
            async with context() as ctx:  # then both are sure of the next one
                outs = [await module.rpc_async()(ONES) for module in group.modules]
                await optimizer.backward_and_step(ctx, torch.stack(outs).sum())
            async with context() as ctx:
                outs = [await module.rpc_async()(ONES) for module in group.modules]
                for name in "bc":
                    network.between("a", name).delay(1.0)
                loss = torch.stack(outs).sum()
                step = optimizer.backward_and_step(ctx, loss)
                is_done = await given_up(step, give_up_s)
                first, second = await group.weights()
                assert torch.equal(first, second)
                assert is_done or give_up_s < 100.0
                if is_done:
                    assert torch.equal(first, ONES * 0.5)
