"""Work of every kind between three workers, which goes on however it ends.

Each kind has one round after the other, to each peer; what a round raised is kept, and
so is how many have ended well.  The functions of this module run at any worker.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Final, cast

import torch
from torch import nn

import asyncrpc
from asyncrpc import AsyncRpcError, Peer, Worker
from asyncrpc.autograd import backward, context
from asyncrpc.nn import RemoteModule
from asyncrpc.optim import DistributedOptimizer
from asyncrpc.testing import acting_as
from tests.integration.core import remote

ITEMS: Final = 20
TIMEOUT_S: Final = 0.5
Key = tuple[str, str]  # a kind of work, and the name of the peer


async def call(peer: Peer) -> None:
    assert await peer.call(len, "ab") == 2


async def limited(peer: Peer) -> None:
    assert await peer.using(timeout_s=TIMEOUT_S).call(len, "ab") == 2


async def large(peer: Peer) -> None:
    assert len(await peer.call(remote.echo, torch.ones(1 << 18))) == 1 << 18


async def stream(peer: Peer) -> None:
    async with contextlib.aclosing(peer.stream(produce)) as items:
        numbers = [number async for number in items]
    assert numbers == list(range(ITEMS))


async def produce() -> AsyncIterator[int]:
    for number in range(ITEMS):
        yield number


async def reference(peer: Peer) -> None:
    assert await peer.remote(list).to_here() == []


async def train(peer: Peer) -> None:
    module = RemoteModule(peer.name, nn.Linear, (3, 2))
    parameters = await module.remote_parameters()
    optimizer = DistributedOptimizer(torch.optim.SGD, parameters, lr=0.1)
    for _ in range(3):
        async with context() as ctx:
            out = await module.forward_async(torch.ones(4, 3))
            await backward(ctx, [out.square().sum()])
            await optimizer.step(ctx)


KINDS: Final[dict[str, Callable[[Peer], Awaitable[None]]]] = {
    function.__name__: function
    for function in (call, limited, large, stream, reference, train)
}


class Work:
    """The work of one worker.

    Attributes:
        ended: rounds that ended well.
        raised: what the others raised, of each kind and peer.
    """

    def __init__(self, worker: Worker) -> None:
        self.ended: Counter[Key] = Counter()
        self.raised: dict[Key, list[str]] = {}
        self._worker = worker
        self._tasks = [
            asyncio.ensure_future(self._go_on(kind, name))
            for name in "abc"
            if name != worker.name
            for kind in KINDS
        ]

    async def _go_on(self, kind: str, name: str) -> None:
        with acting_as(self._worker):
            while True:
                try:
                    await KINDS[kind](self._worker.peer(name))
                except AsyncRpcError as error:
                    text = f"{type(error).__name__}: {error}"
                    self.raised.setdefault((kind, name), []).append(text)
                    await asyncio.sleep(0.01)
                else:
                    self.ended[kind, name] += 1

    async def end(self) -> None:
        """End it; what is not of asyncrpc raises here."""
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)
        failures = [
            error
            for task in self._tasks
            if not task.cancelled() and (error := task.exception())
        ]
        if failures:
            raise failures[0]


_work: dict[int, Work] = {}


async def begin() -> None:
    worker = cast("Worker", asyncrpc.current_worker())
    _work[worker.incarnation] = Work(worker)


async def progress() -> tuple[Counter[Key], dict[Key, list[str]], int]:
    """Return what ended well, what was raised, and how many workers were lost."""
    worker = asyncrpc.current_worker()
    work = _work[worker.incarnation]
    raised = {key: texts[-5:] for key, texts in work.raised.items()}
    return work.ended, raised, worker.counters.workers_lost


async def forget() -> None:
    """Begin to count anew."""
    work = _work[asyncrpc.current_worker().incarnation]
    work.ended.clear()
    work.raised.clear()


async def end() -> None:
    await _work.pop(asyncrpc.current_worker().incarnation).end()
