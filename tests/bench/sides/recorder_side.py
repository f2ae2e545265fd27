"""One of two processes whose flight recorder keeps what happens, now and then.

A worker has no switch for it, so what notes an event is replaced by what does nothing,
and put back, many times in one life of the pair, at both ends.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final

import torch
from torch import nn

import asyncrpc
from asyncrpc.runtime.calls.ends import CallEnds, ServedEnds
from asyncrpc.trace import FlightRecorder
from asyncrpc.trace.ring import EventRing
from tests.bench.harness import WARM_UPS
from tests.bench.processes import report
from tests.bench.sides.metrics_side import BOTH, WORK, add, rates
from tests.bench.training import BATCH, FEATURES, HIDDEN, LEARNING_RATE

_NOTES: Final = {kind: kind.note for kind in (CallEnds, ServedEnds)}


def _nothing(*_: Any) -> None:
    """Note nothing."""


def record(wanted: str) -> None:
    """Note events at this worker from now on, or do not."""
    for kind, note in _NOTES.items():
        setattr(kind, "note", note if wanted == "on" else _nothing)  # noqa: B010
    recorder: FlightRecorder = asyncrpc.current_worker().parts.recorder
    for ring in vars(recorder).values():
        if isinstance(ring, EventRing):
            ring.record = ring._recent.append if wanted == "on" else _nothing  # noqa: SLF001


class Training:
    """A linear layer on another worker, and its optimizer."""

    def __init__(self, layer: Any, optimizer: Any) -> None:
        self._layer, self._optimizer = layer, optimizer
        self._rows = torch.rand(BATCH, FEATURES)

    async def steps(self, _: asyncrpc.Peer, seconds: float) -> int:
        """Make steps; return how many."""
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


async def measure(worker: asyncrpc.Worker, rounds: int, seconds: float) -> None:
    peer = worker.peer(1)
    for _ in range(WARM_UPS):
        await peer.call(add, 1, 2)
    trained = await training()
    works: dict[str, Callable[[asyncrpc.Peer, float], Awaitable[int]]] = {
        **WORK,
        "training steps": trained.steps,
    }
    for name, work in works.items():
        await work(peer, 4 * seconds)
        found: dict[str, list[list[float]]] = {wanted: [] for wanted in BOTH}
        for number in range(2 * rounds):
            wanted = BOTH[(number + number // 2) % 2]  # off on, on off, off on
            record(wanted)
            await peer.call(record, wanted)
            found[wanted].append(await rates(work, peer, seconds))
        report(name, found)
    record("on")
    await peer.call(record, "on")


async def main(options: argparse.Namespace) -> None:
    worker: Any = asyncrpc.Worker(
        f"w{options.rank}",
        rank=options.rank,
        world_size=2,
        rendezvous=f"tcp://127.0.0.1:{options.port}",
    )
    async with worker:
        if options.rank == 0:
            await measure(worker, options.rounds, options.seconds)
        with contextlib.suppress(asyncrpc.AsyncRpcError):
            await worker.barrier()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--seconds", type=float, default=0.25)
    asyncrpc.run(main(parser.parse_args()))
