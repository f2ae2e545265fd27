"""What goes on between two workers while one of them is used wrongly.

Three calls, a stream, a training step and a collective are always under way from a
worker, mostly `a`, to its peer `b`.  Each counts its rounds: whoever waits for another
round of each knows that all of them live.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Final

import torch

import asyncrpc
from asyncrpc import Group, Worker, autograd
from asyncrpc.optim import DistributedOptimizer
from asyncrpc.testing import acting_as
from tests.soak.readings import tables

GROUP: Final = "traffic"


async def bounce(value: Any) -> Any:
    """Give back what came, after another turn of the loop."""
    await asyncio.sleep(0)
    return value


def count_up(to: int) -> Any:
    yield from range(to)


def make_parameter() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.ones(4))


def scale(parameter: asyncrpc.RRef[torch.nn.Parameter], x: torch.Tensor) -> Any:
    return (parameter.local_value() * x).sum()


async def reduce_here(number: int, members: list[str]) -> float:
    """Take part in the collective of this number."""
    worker = asyncrpc.current_worker()
    groups: dict[str, Group] = _groups.setdefault(worker.id, {})  # of this life of it
    if GROUP not in groups:
        groups[GROUP] = Group(worker, members, name=GROUP)
    return float((await groups[GROUP].all_reduce(torch.full((3,), float(number))))[0])


async def leave_group() -> None:
    for group in _groups.pop(asyncrpc.current_worker().id, {}).values():
        group.close()


_groups: dict[Any, dict[str, Group]] = {}


class Traffic:
    """What goes on from a worker to its peer `b`.

    Attributes:
        rounds: how many rounds each kind of traffic has made.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._peer = worker.peer("b")
        self._news = asyncio.Event()
        self._stops = False
        self.rounds = dict.fromkeys(self._kinds(), 0)

    def _kinds(self) -> dict[str, Callable[[int], Awaitable[None]]]:
        return {
            "a coroutine": self._coroutine,
            "a function in a thread": self._thread,
            "a large tensor": self._tensor,
            "a stream": self._stream,
            "a training step": self._train,
            "a collective": self._reduce,
        }

    @asynccontextmanager
    async def flowing(self) -> AsyncIterator[Traffic]:
        """Keep all of it under way inside; it has gone on when this ends."""
        with acting_as(self._worker):
            self._parameter = self._peer.remote(make_parameter)
            self._optimizer = await DistributedOptimizer(
                "SGD", [self._parameter], lr=1e-3
            )
            async with asyncio.TaskGroup() as tasks:
                for kind, once in self._kinds().items():
                    tasks.create_task(self._repeat(kind, once), name=kind)
                await self.another_round()
                try:
                    yield self
                    await self.another_round()
                finally:
                    self._stops = True
            await self._peer.call(leave_group)
            await leave_group_of(self._worker)
            del self._optimizer
            self._parameter.release()

    async def another_round(self) -> None:
        """Wait until each kind of traffic has begun and ended a round from now on."""
        before = dict(self.rounds)
        # The round under way now may have begun before: so two.
        while any(now < before[kind] + 2 for kind, now in self.rounds.items()):
            self._news.clear()
            await self._news.wait()

    async def _repeat(self, kind: str, once: Callable[[int], Awaitable[None]]) -> None:
        while not self._stops:
            await once(self.rounds[kind])
            self.rounds[kind] += 1
            self._news.set()

    async def _coroutine(self, number: int) -> None:
        assert await self._peer.call(bounce, number) == number

    async def _thread(self, number: int) -> None:
        assert await self._peer.call(max, number, 0) == number

    async def _tensor(self, number: int) -> None:
        sent = torch.full((1 << 16,), float(number))
        assert torch.equal(await self._peer.call(torch.neg, sent), -sent)

    async def _stream(self, number: int) -> None:
        items = [item async for item in self._peer.stream(count_up, number % 8)]
        assert items == list(range(number % 8))

    async def _train(self, number: int) -> None:
        async with autograd.context() as context:
            x = torch.full((4,), 1.0 + number % 3)
            loss = await self._peer.call(scale, self._parameter, x)
            await autograd.backward(context, [loss])
            assert (await self._optimizer.step(context)).is_applied

    async def _reduce(self, number: int) -> None:
        members = [self._worker.name, self._peer.name]
        here, there = await asyncio.gather(
            reduce_at(self._worker, number, members),
            self._peer.call(reduce_here, number, members),
        )
        assert here == there == 2.0 * number


async def reduce_at(worker: Worker, number: int, members: list[str]) -> float:
    with acting_as(worker):
        return await reduce_here(number, members)


async def leave_group_of(worker: Worker) -> None:
    with acting_as(worker):
        await leave_group()


@asyncrpc.on_loop
def tables_there() -> dict[str, int]:
    """Return what this worker keeps; the call that asks is one of the served."""
    gc.collect()
    return tables()
