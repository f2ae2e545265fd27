"""What else goes on between two workers while one misbehaves, and that nothing is left.

The functions of this module run at either end.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Final, cast

import pytest
import torch
from torch import nn

import asyncrpc
from asyncrpc import CallError, Group, LivenessOptions, Worker
from asyncrpc.autograd import backward, context
from asyncrpc.core.calls.streams import OutboundCall
from asyncrpc.core.links.link import Link
from asyncrpc.nn import RemoteModule
from asyncrpc.optim import DistributedOptimizer
from asyncrpc.testing import acting_as
from tests.inner_state import optimizers_here, turns_of

LIMIT_S: Final = 60.0  # only what hangs reaches it
# A peer that gets no processor time is suspected after some seconds, and its connection
# resumed over another transport; here a connection that is resumed counts as damage.
PATIENT: Final = LivenessOptions(heartbeat_s=60.0, lost_after_s=600.0)

_held: dict[str, asyncio.Event] = {}
_groups: dict[int, Group] = {}


async def hold(name: str) -> str:
    """Run until it is let go."""
    await _held.setdefault(name, asyncio.Event()).wait()
    return name


@asyncrpc.on_loop
def let_go(name: str) -> None:
    _held.pop(name).set()


async def count() -> AsyncIterator[int]:
    number = 0
    while True:
        yield number
        number += 1


@asyncrpc.on_loop
def tables() -> dict[str, int]:
    """Return how much the current worker has in hand, but for this very call."""
    return tables_of(cast("Worker", asyncrpc.current_worker()), served=-1)


def calls_over(link: Link) -> list[OutboundCall]:
    """Return the program's calls that wait for answers: members ask each other, too."""
    waiting = link.pending
    return [call for call in waiting if not call.function.startswith("membership.")]


def tables_of(worker: Worker, *, served: int = 0) -> dict[str, int]:
    gc.collect()  # an error that was raised may hold a reference
    links = worker.parts.directory.links
    autograd: Any = worker.parts.service("autograd")
    optim: Any = worker.parts.service("optim")
    collectives: Any = worker.parts.service("collectives")
    return {
        "active": worker.parts.active + served,
        "served": sum(len(list(link.served)) for link in links) + served,
        "pending": sum(len(list(link.pending)) for link in links),
        "references": len(worker.rrefs()),
        "tasks": len(worker.parts.tasks),
        "unfinished": worker.parts.pool.unfinished,
        "contexts": autograd.open_contexts,
        "passes": autograd.running_passes,
        "optimizers": optimizers_here(optim),
        "steps": turns_of(optim),
        "groups": len(collectives._groups),  # noqa: SLF001  (what is to be checked)
        "inbound bytes": worker.parts.inbound_credit.budget.held_bytes,
        "resumed": worker.counters.connections_resumed,
        "lost": worker.counters.workers_lost,
    }


async def _settled(worker: Worker, before: list[dict[str, int]]) -> None:
    """Wait until neither end has more in hand than before.

    It may have less: a task that was about to end was counted before.
    """
    peer, now = (
        worker.peer("b"),
        [tables_of(worker), await worker.peer("b").call(tables)],
    )
    try:
        async with asyncio.timeout(LIMIT_S):
            while any(
                count > then.get(name, 0)
                for then, at_present in zip(before, now, strict=True)
                for name, count in at_present.items()
            ):
                there = await peer.call(tables)
                now = [tables_of(worker), there]
    except TimeoutError:
        raise AssertionError(f"before: {before}; now: {now}") from None


@asynccontextmanager
async def company(worker: Worker) -> AsyncIterator[None]:
    """Have a call in flight and a stream under way to `b`, which must go on."""
    peer = worker.peer("b")
    assert await peer.call(len, "ab") == 2
    link = worker.parts.directory.find("b").link
    before = [tables_of(worker), await peer.call(tables)]
    held = asyncio.ensure_future(peer.call(hold, worker.name))
    async with contextlib.aclosing(peer.stream(count)) as numbers:
        assert await anext(numbers) == 0
        try:
            yield
        finally:
            await peer.call(let_go, worker.name)
        assert await held == worker.name
        assert await anext(numbers) == 1
    assert worker.parts.directory.find("b").link is link
    await _settled(worker, before)


async def reduce_here(value: float) -> float:
    """Take part in a collective of both."""
    group = _groups.get(asyncrpc.current_worker().incarnation)
    if group is None:
        worker = asyncrpc.current_worker()
        group = _groups[worker.incarnation] = Group(worker, timeout_s=LIMIT_S)
    return float((await group.all_reduce(torch.full((1000,), value)))[0])


@asyncrpc.on_loop
def close_group() -> None:
    """End what `reduce_here` has begun."""
    _groups.pop(asyncrpc.current_worker().incarnation).close()


async def _rounds(worker: Worker, enough: asyncio.Event, done: asyncio.Event) -> None:
    """Train a module that is on `b`, and reduce with it, round by round."""
    with acting_as(worker):
        module = RemoteModule("b", nn.Linear, (3, 2))
        parameters = await module.remote_parameters()
        optimizer = DistributedOptimizer(torch.optim.SGD, parameters, lr=0.1)
        while not enough.is_set():
            async with context() as ctx:
                out = await module.forward_async(torch.ones(4, 3))
                await backward(ctx, [out.square().sum()])
                await optimizer.step(ctx)
            there = worker.peer("b").call(reduce_here, 2.0)
            assert list(await asyncio.gather(reduce_here(1.0), there)) == [3.0, 3.0]
            done.set()
        await worker.peer("b").call(close_group)
        close_group()


@asynccontextmanager
async def work(worker: Worker) -> AsyncIterator[None]:
    """Train and reduce with `b` from before the first wrong call till the end."""
    enough, done = asyncio.Event(), asyncio.Event()
    rounds = asyncio.ensure_future(_rounds(worker, enough, done))

    async def another() -> None:
        done.clear()
        waiting = asyncio.ensure_future(done.wait())
        await asyncio.wait([rounds, waiting], return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()

    await another()
    try:
        yield
        await another()
        await another()  # that has begun after the last wrong call
    finally:
        enough.set()
        await rounds


_VARIES: Final = re.compile(r"0x[0-9a-f]+|(?<=recursion depth exceeded)[^;(]*")


def told_by(error: Any) -> str:
    """Return the text of an error without what may vary: addresses, and depths."""
    return _VARIES.sub("", str(error))


async def hears(attempt: Callable[[], Any]) -> CallError:
    """Return what the caller hears, which is the same each time."""
    heard: list[CallError] = []
    for _ in range(2):
        with pytest.raises(CallError) as caught:
            await asyncio.wait_for(attempt(), LIMIT_S)
        heard.append(caught.value.with_traceback(None))
        caught.value.__cause__ = None
    assert type(heard[0]) is type(heard[1]), heard
    return heard[1]
