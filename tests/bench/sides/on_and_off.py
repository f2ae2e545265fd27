"""One of two processes that work with something and without it, in turn.

It is turned on and off many times in one life of the pair, at both ends, so that the
machine's mood meets both.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final, TypeAlias

import torch
from torch import nn

import asyncrpc
from tests.bench.harness import WARM_UPS
from tests.bench.processes import report
from tests.bench.training import BATCH, FEATURES, HIDDEN, LEARNING_RATE

AT_ONCE: Final = 256
BOTH: Final = ("off", "on")

# Works with a peer for so many seconds; returns how many times.
Work: TypeAlias = Callable[[asyncrpc.Peer, float], Awaitable[int]]
# Turns it "on" or "off" at this worker; importable, as the other end calls it, too.
Switch: TypeAlias = Callable[[str], None]


async def add(left: int, right: int) -> int:
    return left + right


async def in_turn(peer: asyncrpc.Peer, seconds: float) -> int:
    """Make calls one after the other; return how many."""
    calls, begun_s = 0, time.perf_counter()
    while time.perf_counter() - begun_s < seconds:
        for _ in range(100):
            await peer.call(add, 1, 2)
        calls += 100
    return calls


async def at_once(peer: asyncrpc.Peer, seconds: float) -> int:
    """Make calls, with many outstanding; return how many."""
    calls, begun_s = 0, time.perf_counter()
    while time.perf_counter() - begun_s < seconds:
        await asyncio.gather(*(peer.call(add, 1, 2) for _ in range(AT_ONCE)))
        calls += AT_ONCE
    return calls


CALLS: Final[Mapping[str, Work]] = {
    "in turn": in_turn,
    f"{AT_ONCE} outstanding": at_once,
}


class Training:
    """A linear layer on another worker, and its optimizer."""

    def __init__(self, layer: Any, optimizer: Any) -> None:
        self._layer, self._optimizer = layer, optimizer
        self._rows = torch.rand(BATCH, FEATURES)

    async def steps(self, _: asyncrpc.Peer, seconds: float) -> int:
        steps, begun_s = 0, time.perf_counter()
        while time.perf_counter() - begun_s < seconds:
            async with asyncrpc.autograd.context() as context:
                loss = (await self._layer.forward_async(self._rows)).sum()
                await asyncrpc.autograd.backward(context, [loss])
                await self._optimizer.step(context)
            steps += 1
        return steps


async def training() -> Training:
    layer = asyncrpc.nn.RemoteModule("w1", nn.Linear, (FEATURES, HIDDEN))
    optimizer = asyncrpc.optim.DistributedOptimizer(
        torch.optim.SGD, await layer.remote_parameters(), lr=LEARNING_RATE
    )
    return Training(layer, optimizer)


async def rates(work: Work, peer: asyncrpc.Peer, seconds: float) -> list[float]:
    """Return how often a second, and us of processor time of both ends for each."""
    cpu_s = time.process_time() + await peer.call(time.process_time)
    begun_s = time.perf_counter()
    times = await work(peer, seconds)
    took_s = time.perf_counter() - begun_s
    cpu_s = time.process_time() + await peer.call(time.process_time) - cpu_s
    return [times / took_s, cpu_s / times * 1e6]


async def measure(
    peer: asyncrpc.Peer,
    works: Mapping[str, Work],
    switch: Switch,
    rounds: int,
    seconds: float,
) -> None:
    """Report the rates of each work, of each round with it and without.

    Args:
        switch: turns it on and off at a worker; it ends turned off.
    """
    for name, work in works.items():
        await work(peer, 4 * seconds)
        found: dict[str, list[list[float]]] = {wanted: [] for wanted in BOTH}
        for number in range(2 * rounds):
            wanted = BOTH[(number + number // 2) % 2]  # off on, on off, off on
            switch(wanted)
            await peer.call(switch, wanted)
            found[wanted].append(await rates(work, peer, seconds))
        report(name, found)
    switch("off")
    await peer.call(switch, "off")


async def _side(
    switch: Switch, options: argparse.Namespace, *, with_training: bool
) -> None:
    worker: Any = asyncrpc.Worker(
        f"w{options.rank}",
        rank=options.rank,
        world_size=2,
        rendezvous=f"tcp://127.0.0.1:{options.port}",
    )
    async with worker:
        if options.rank == 0:
            peer = worker.peer(1)
            for _ in range(WARM_UPS):
                await peer.call(add, 1, 2)
            works = dict(CALLS)
            if with_training:
                works["training steps"] = (await training()).steps
            await measure(peer, works, switch, options.rounds, options.seconds)
        with contextlib.suppress(asyncrpc.AsyncRpcError):
            await worker.barrier()


def run_side(
    switch: Switch, description: str | None, *, with_training: bool = True
) -> argparse.Namespace:
    """Run this side as the command line says, and return what that is."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=0.5)
    options = parser.parse_args()
    asyncrpc.run(_side(switch, options, with_training=with_training))
    return options
