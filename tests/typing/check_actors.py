"""What type checkers make of actors: parameters are checked, results are typed.

Checked with the rest of tests by `make type`, and never run.
"""

from collections.abc import AsyncIterator, Iterator
from typing import Any, assert_type

import torch

import asyncrpc
from asyncrpc import Actor, ActorReply, Actors, Cluster


class Counter:
    def __init__(self, n: int) -> None:
        self.n = n

    async def add(self, n: int, *, times: int = 1) -> int:
        return self.n + n * times

    def name(self) -> str:
        return str(self.n)

    async def rows(self, count: int) -> AsyncIterator[float]:
        yield float(count)

    def lines(self) -> Iterator[str]:
        yield str(self.n)


@asyncrpc.exclusive
class Careful(Counter):
    @asyncrpc.exclusive
    async def check(self, x: torch.Tensor) -> bool:
        return bool(x.isfinite().all())


async def check(cluster: Cluster) -> None:
    counters = await cluster.spawn(Counter, 1, on=["w0"], per_worker=2, remake=True)
    assert_type(counters, Actors[Counter])
    assert_type(counters[0], Actor[Counter])
    assert_type(counters[1:], Actors[Counter])
    add = counters.method(Counter.add)
    assert_type(await add(2, times=3), list[int])
    assert_type(await add(asyncrpc.scatter([1, 2])), list[int])
    await add("2")  # type: ignore[arg-type]
    await add(2, often=3)  # type: ignore[call-arg]
    async for reply in add.as_completed(2):
        assert_type(reply, ActorReply[int])
        assert_type(reply.result(), int)
        assert_type(reply.actor, Actor[Any])
    assert_type(await counters.method(Counter.name)(), list[str])
    counters.method(Careful.check)  # type: ignore[arg-type]
    for counter in counters:
        assert_type(counter, Actor[Counter])
        break


async def check_one(counter: Actor[Counter], careful: Actor[Careful]) -> None:
    assert_type(await counter.method(Counter.add)(2, times=3), int)
    assert_type(await counter.method(Counter.name)(), str)
    await counter.method(Counter.add)("2")  # type: ignore[arg-type]
    async for row in counter.method(Counter.rows)(3):
        assert_type(row, float)
    async for line in counter.method(Counter.lines)():
        assert_type(line, str)
    assert_type(await careful.method(Counter.add)(2), int)
    assert_type(await careful.method(Careful.check)(torch.ones(2)), bool)


async def check_attributes(counters: Actors[Counter], x: torch.Tensor) -> None:
    assert_type(await counters.add(2), list[Any])
    assert_type(await counters.method("add")(2), list[Any])
    assert_type(asyncrpc.scatter(x), torch.Tensor)
    assert_type(asyncrpc.scatter([1.0]), float)
