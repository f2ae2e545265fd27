"""Pipelines on a network that delays, breaks links and crashes, in virtual time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import combinations
from typing import Any

import pytest
import torch

import asyncrpc
from asyncrpc import NetworkOptions, Options, RRef, Worker
from asyncrpc.autograd import context
from asyncrpc.nn import Pipeline
from asyncrpc.parallel.pipeline.schedules import TRAINING
from asyncrpc.testing import Cluster, acting_as
from asyncrpc.testing.loop import SimLoop
from asyncrpc.testing.network import Network
from tests.numerics.remote import gathered
from tests.numerics.stages import (
    batch,
    held,
    in_one_process,
    model,
    squared,
    stages_on,
)

STAGES = "bcd"


@asynccontextmanager
async def pipeline_on(
    network: Network, schedule: str
) -> AsyncIterator[tuple[list[Worker], Pipeline, list[RRef[Any]]]]:
    patient = Options(
        network=NetworkOptions(connect_timeout_s=120, handshake_timeout_s=120)
    )
    async with Cluster(4, network=network, options=patient) as workers:
        with acting_as(workers[0]):
            modules = stages_on(STAGES)
            pipe = await Pipeline(modules, schedule=schedule, chunks=5)
            await pipe.forward(batch()[0])  # only what is connected can be resumed
            yield workers, pipe, modules
            del pipe
            modules.clear()


async def gradients_of(modules: list[RRef[Any]]) -> list[Any]:
    by_stage = [
        await asyncrpc.rpc_async(module.owner_name(), gathered, (module,))
        for module in modules
    ]
    return [gradient for stage in by_stage for gradient in stage]


async def then_infer(step: asyncio.Task[Any], pipe: Pipeline) -> None:
    await step
    await pipe.forward(batch()[0])


class TestDelays:
    """Three stages and their driver, each a host of its own."""

    loops = {"sim": SimLoop}  # noqa: RUF012  (read once, by the conftest)

    @pytest.mark.parametrize("seed", range(10))
    @pytest.mark.parametrize("schedule", TRAINING)
    async def test_slow_and_broken_links_change_no_gradient(
        self, schedule: str, seed: int
    ) -> None:
        network, rng = Network(seed), random.Random(seed)
        async with pipeline_on(network, schedule) as (_, pipe, modules), context():
            for first, second in combinations("abcd", 2):
                network.between(first, second).delay(rng.choice([0.0, 0.01, 0.3]))
            step = asyncio.create_task(pipe.forward_backward(*batch(), loss_fn=squared))
            for _ in range(4):
                await asyncio.sleep(rng.uniform(0.0, 0.5))
                network.between(*rng.sample("abcd", 2)).drop_connections()
            result = await step
            outcome = result.loss, await gradients_of(modules)
        torch.testing.assert_close(
            outcome, in_one_process(model(), *batch(), squared), rtol=1e-12, atol=1e-12
        )

    @pytest.mark.parametrize("seed", range(20))
    @pytest.mark.parametrize("schedule", TRAINING)
    async def test_step_that_loses_a_worker_fails_and_leaves_nothing(
        self, schedule: str, seed: int
    ) -> None:
        """At any moment, unless all had computed: then all commit."""
        network, rng = Network(seed), random.Random(seed)
        lost = rng.choice(STAGES)
        async with pipeline_on(network, schedule) as (_, pipe, modules), context():
            for first, second in combinations("abcd", 2):
                network.between(first, second).delay(0.1)
            step = asyncio.create_task(pipe.forward_backward(*batch(), loss_fn=squared))
            await asyncio.sleep(rng.uniform(0.0, 3.0))
            network.crash(lost, silent=rng.random() < 0.5)
            with pytest.raises((asyncrpc.WorkerLostError, asyncrpc.OwnerLostError)):
                await then_infer(step, pipe)  # it may have ended before
            await asyncio.sleep(30.0)  # virtual: whatever is under way arrives
            left = [first for first in modules if first.owner_name() != lost]
            if not step.exception():
                assert None not in await gradients_of(left)
            for stage in pipe._stages:  # noqa: SLF001
                if (to := stage.owner_name()) != lost:
                    assert await asyncrpc.rpc_async(to, held, (stage,)) == 0

    @pytest.mark.parametrize("seed", range(20))
    @pytest.mark.parametrize("schedule", TRAINING)
    async def test_a_step_that_is_cancelled_counts_everywhere_or_nowhere(
        self, schedule: str, seed: int
    ) -> None:
        network, rng = Network(seed), random.Random(seed)
        async with pipeline_on(network, schedule) as (_, pipe, modules), context():
            for first, second in combinations("abcd", 2):
                network.between(first, second).delay(0.1)
            step = asyncio.create_task(pipe.forward_backward(*batch(), loss_fn=squared))
            await asyncio.sleep(rng.uniform(0.0, 3.0))
            step.cancel()
            await asyncio.wait([step])
            await asyncio.sleep(30.0)  # virtual: whatever is under way arrives
            are_missing = [gradient is None for gradient in await gradients_of(modules)]
            assert all(are_missing) or not any(are_missing)
            for stage in pipe._stages:  # noqa: SLF001
                to = stage.owner_name()
                assert await asyncrpc.rpc_async(to, held, (stage,)) == 0
            again = await pipe.forward_backward(*batch(), loss_fn=squared)
            torch.testing.assert_close(
                again.loss, in_one_process(model(), *batch(), squared)[0]
            )
