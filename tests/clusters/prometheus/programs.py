"""One worker of three that train, call and stream until they are told to end.

    $ python -m tests.clusters.prometheus.programs RANK FOLDER

It writes the port of its metrics into the folder, and ends when its input does.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import torch
from torch import nn

import asyncrpc
from asyncrpc import observability, serving
from asyncrpc.ddp import DistributedDataParallel
from asyncrpc.testing import acting_as
from tests.countdown import Countdown

WORLD = 3


async def double(value: torch.Tensor) -> torch.Tensor:
    return 2 * value


async def fail() -> None:
    raise KeyError("it is what this function does")


async def count_to(end: int) -> AsyncIterator[int]:
    for number in range(end):
        yield number


async def use_peers(worker: asyncrpc.Worker) -> None:
    """Call, fail, stream, and refer."""
    peer = worker.peer(1)
    await peer.call(double, torch.ones(1 << 20))
    with contextlib.suppress(KeyError):
        await peer.call(fail)
    assert [item async for item in peer.stream(count_to, 3)] == [0, 1, 2]
    value = peer.remote(double, torch.ones(1))
    await value.to_here()
    value.release()


class SplitModel:
    """A linear layer on another worker, and its optimizer."""

    def __init__(self) -> None:
        self.layer = asyncrpc.nn.RemoteModule("w1", nn.Linear, (4, 1))
        self.optimizer: asyncrpc.optim.DistributedOptimizer | None = None

    async def step(self) -> None:
        if self.optimizer is None:
            self.optimizer = asyncrpc.optim.DistributedOptimizer(
                torch.optim.SGD, await self.layer.remote_parameters(), lr=0.01
            )
        async with asyncrpc.autograd.context() as context:
            loss = (await self.layer.forward_async(torch.ones(2, 4))).sum()
            await asyncrpc.autograd.backward(context, [loss])
            await self.optimizer.step(context)


async def add_one(numbers: list[int]) -> list[int]:
    return [number + 1 for number in numbers]


@asynccontextmanager
async def queues(
    worker: asyncrpc.Worker,
) -> AsyncIterator[Callable[[], Awaitable[None]]]:
    """Yield what asks a queue of each kind once."""
    with acting_as(worker):
        async with (
            serving.Batcher(add_one, 8, 0.0) as batched,
            serving.ContinuousBatcher(Countdown(), 8) as countdown,
        ):

            async def ask() -> None:
                assert await batched(1) == 2
                assert [item async for item in countdown.generate(2)] == [1, 0]

            yield ask


async def until_told(worker: asyncrpc.Worker) -> None:
    """Work; all ranks end with the same round, when the first is told to."""
    loop = asyncio.get_running_loop()
    ended = loop.run_in_executor(None, sys.stdin.read)
    names = [f"w{rank}" for rank in range(WORLD)]
    split = SplitModel() if worker.rank == 0 else None
    async with (
        asyncrpc.Group(worker, names, name="all") as group,
        queues(worker) as ask_queues,
    ):
        model = await DistributedDataParallel(nn.Linear(4, 1), group)
        is_over = torch.zeros(1)
        while not is_over:
            await ask_queues()
            if split is not None:
                await use_peers(worker)
                await split.step()
            await model.backward(model(torch.ones(2, 4)).sum())
            is_over.fill_(float(ended.done() and worker.rank == 0))
            await group.all_reduce(is_over, "max")
            await asyncio.sleep(0.01)  # it is not a benchmark
    await ended


async def main(rank: int, folder: Path) -> None:
    worker = asyncrpc.Worker(
        f"w{rank}", rank=rank, world_size=WORLD, rendezvous=f"file://{folder}/meeting"
    )
    metrics = observability.serve_metrics(worker, port=0, with_process=True)
    async with metrics as port, worker:
        written = folder / f"writing{rank}"
        written.write_text(str(port))
        written.rename(folder / f"port{rank}")
        await until_told(worker)


if __name__ == "__main__":
    asyncrpc.run(main(int(sys.argv[1]), Path(sys.argv[2])))
