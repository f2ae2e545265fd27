"""Training on another loop than the worker's is refused at once, as after its end.

Whatever is used there would touch what the worker's loop owns, from another thread.
"""

from __future__ import annotations

import asyncio
from typing import Final

import pytest

from asyncrpc import NotStartedError, UsageError
from asyncrpc.testing import Cluster
from tests.integration.misuse import uses_ddp, uses_training
from tests.integration.misuse.test_matrix import USES
from tests.integration.misuse.using import Outcome, Use, outcome_of
from tests.integration.misuse.wrong import World

# What sends something, or waits for others.
COROUTINES: Final = (
    *(name for name in uses_training.COLLECTIVES if name not in uses_training.AT_ONCE),
    "autograd.backward",
    "optim.DistributedOptimizer.step",
    "optim.DistributedOptimizer.add_param_group",
    "optim.DistributedOptimizer.state_dict",
    "nn.RemoteModule.forward_async",
    "nn.RemoteModule.run_method",
    "nn.RemoteModule.state_dict",
    "nn.Pipeline.remote_parameters",
    "nn.Pipeline.forward",
    "nn.Pipeline.forward_backward",
    "ddp.DistributedDataParallel.backward",
    "ddp.PeriodicModelAverager.average_parameters",
    "ddp.PostLocalSGDOptimizer.step",
    "ddp.PowerSGDState.average_errors",
    "ddp.ZeroRedundancyOptimizer.step",
    "ddp.ZeroRedundancyOptimizer.synchronize",
    "ddp.ZeroRedundancyOptimizer.consolidate_state_dict",
    "ddp.allreduce_hook",
)


def elsewhere(use: Use, world: World) -> Outcome:
    """Use it as here, on an event loop of this thread."""
    plain = Use(use.make, right=use.right, finish=use.finish)
    return asyncio.run(outcome_of(plain, world))


@pytest.mark.parametrize("name", COROUTINES)
async def test_another_loop_is_refused(name: str) -> None:
    async with Cluster(2) as (a, b):
        world = World(a, b, b, b, asyncio.get_running_loop())
        use = USES[name]
        await uses_ddp.model(world)
        assert await outcome_of(use, world) == Outcome()
        found = await asyncio.to_thread(elsewhere, use, world)
        assert isinstance(found.error, UsageError), found.words
        assert "must be used on the event loop that worker 'a'" in str(found.error)
        assert await outcome_of(use, world) == Outcome()
    ended = await outcome_of(Use(use.make, right=use.right), world)
    assert isinstance(ended.error, NotStartedError), ended.words
