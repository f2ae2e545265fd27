"""The ways through the package are short: few files, seldom changed.

Both ends are in this process.
"""

from __future__ import annotations

from itertools import pairwise

import torch

import asyncrpc
from asyncrpc import RRef
from asyncrpc.testing import Cluster, acting_as
from tests.visits import Visits, shortest

CHANGES_PART_MAX = 0.6
RUNS = 10
PAYLOAD = torch.ones(1 << 20)


async def echo(value: int) -> int:
    return value


def first(tensor: torch.Tensor) -> float:
    return tensor[0].item()


def references(module: RRef[torch.nn.Module]) -> list[RRef[torch.nn.Parameter]]:
    return [RRef(parameter) for parameter in module.local_value().parameters()]


async def test_small_call_visits_few_files_and_rarely_switches() -> None:
    async with Cluster(2, network="uds") as (a, b):
        peer = a.peer(b.name)
        walks = []
        for number in range(2 * RUNS):
            with Visits() as visits:
                assert await peer.call(echo, number) == number
            walks.append(visits)
    files = shortest(walks)
    assert len(set(files)) <= 18, sorted(set(files))
    files = min((walk.files for walk in walks), key=len)
    changes = sum(file != after for file, after in pairwise(files))
    assert changes < CHANGES_PART_MAX * len(files), files


async def test_a_large_payload_visits_few_files() -> None:
    async with Cluster(2, network="uds") as (a, b):
        peer = a.peer(b.name)
        walks = list[Visits]()
        files = set[str]()
        # The first ones go by socket, until the peer has mapped the slab.
        while len(walks) < 20 * RUNS and not 0 < len(files) <= 34:
            with Visits() as visits:
                assert await peer.call(first, PAYLOAD) == 1.0
            walks.append(visits)
            files = set(shortest(walks))
    assert len(files) <= 34, sorted(files)


async def test_a_gradient_and_a_step_visit_few_files() -> None:
    async with Cluster(2, network="uds") as (a, b):
        with acting_as(a):
            module = a.peer(b.name).remote(torch.nn.Linear, 3, 1)
            parameters = await a.peer(b.name).call(references, module)
            optimizer = asyncrpc.optim.DistributedOptimizer(
                torch.optim.SGD, parameters, lr=0.1
            )
            gradients, steps = [], []
            for _ in range(RUNS):
                async with asyncrpc.autograd.context() as context:
                    loss = (await module.rpc_async().forward(torch.ones(2, 3))).sum()
                    with Visits() as visits:
                        await asyncrpc.autograd.backward(context, [loss])
                    gradients.append(visits)
                    with Visits() as visits:
                        await optimizer.step(context)
                    steps.append(visits)
    for walks, files_max in ((gradients, 41), (steps, 37)):
        files = set(shortest(walks))
        assert len(files) <= files_max, sorted(files)
