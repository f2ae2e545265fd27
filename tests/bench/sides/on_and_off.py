"""One of two processes that work with something and without it, in turn.

It is turned on and off many times in one life of the pair, at both ends, so that the
machine's mood meets both.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final, TypeAlias

import torch
from torch import nn

import asyncrpc
from asyncrpc import observability
from asyncrpc.core.autograd.contexts import PassEnds
from asyncrpc.core.autograd.work import SegmentEvents
from asyncrpc.core.calls.inbound import ServedEnds
from asyncrpc.core.calls.outbound import CallEnds
from asyncrpc.core.rref.values import Values
from asyncrpc.core.trace.ring import EventRing
from asyncrpc.testing import Cluster
from asyncrpc.trace import FlightRecorder
from tests.bench import workloads as w
from tests.bench.harness import WARM_UPS
from tests.bench.processes import report
from tests.bench.sides import on_and_off, pair
from tests.bench.sides.side import parser_of_process
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
    layer = asyncrpc.nn.RemoteModule(w.CALLEE, nn.Linear, (FEATURES, HIDDEN))
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
        figures: dict[str, list[list[float]]] = {wanted: [] for wanted in BOTH}
        for number in range(2 * rounds):
            wanted = BOTH[(number + number // 2) % 2]  # off on, on off, off on
            switch(wanted)
            await peer.call(switch, wanted)
            figures[wanted].append(await rates(work, peer, seconds))
        report(name, figures)
    switch("off")
    await peer.call(switch, "off")


# --- what is turned on and off --------------------------------------------------------


def freeze(wanted: str) -> None:
    """Take all that is there from the collector's care, or give it back."""
    gc.unfreeze()
    gc.collect()
    if wanted == "on":
        gc.freeze()


# A worker has no switch for the flight recorder, so what notes an event is replaced by
# what does nothing, and put back.  What was there at the start is nothing to Python's
# collector of cycles: it is measured by `freeze`, and would blur this.
# What makes events of calls and training steps.
_NOTES: Final = {
    (kind, name): getattr(kind, name)
    for kind, name in (
        (CallEnds, "note"),
        (ServedEnds, "note"),
        (SegmentEvents, "note"),
        (PassEnds, "_note_end"),
        (Values, "_note"),
    )
}


def _nothing(*_: Any, **__: Any) -> None:
    """Note nothing."""


def record(wanted: str) -> None:
    """Note events at this worker from now on, or do not."""
    gc.freeze()
    for (kind, name), note in _NOTES.items():
        setattr(kind, name, note if wanted == "on" else _nothing)
    recorder: FlightRecorder = asyncrpc.current_worker().parts.recorder
    for ring in vars(recorder).values():
        if isinstance(ring, EventRing):
            ring.record = ring._recent.append if wanted == "on" else _nothing  # noqa: SLF001


_counting: Final[list[observability.Metrics]] = []


def count(wanted: str) -> None:
    """Begin to count at this worker, or end it."""
    while _counting:
        _counting.pop().close()
    if wanted == "on":
        metrics = observability.Metrics(asyncrpc.current_worker())
        _counting.append(metrics.__enter__())


async def measure_alone(blocks: int) -> None:
    """Report the processor time of calls between two workers of this process.

    A busy machine adds to most blocks of calls, and takes from none: so the least of
    many is what the calls themselves take.
    """
    async with Cluster(2, network="uds") as (a, b):
        peer = a.peer(1)
        await at_once(peer, 0.5)
        figures: dict[str, list[list[float]]] = {wanted: [] for wanted in BOTH}
        for number in range(2 * blocks):
            wanted = BOTH[(number + number // 2) % 2]
            with contextlib.ExitStack() as stack:
                if wanted == "on":
                    stack.enter_context(observability.Metrics(a))
                    stack.enter_context(observability.Metrics(b))
                begun_s = time.process_time()
                for _ in range(4):
                    calls = (peer.call(add, 1, 2) for _ in range(AT_ONCE))
                    await asyncio.gather(*calls)
                took_s = time.process_time() - begun_s
                figures[wanted].append([took_s / (4 * AT_ONCE) * 1e6])
        report("one process", {wanted: [min(rows)] for wanted, rows in figures.items()})


SWITCHES: Final[Mapping[str, Switch]] = {
    "collector": freeze,
    "metrics": count,
    "recorder": record,
}


async def lead(peer: asyncrpc.Peer, options: argparse.Namespace) -> None:
    for _ in range(WARM_UPS):
        await peer.call(add, 1, 2)
    works = dict(CALLS)
    if options.what != "metrics":
        works["training steps"] = (await training()).steps
    switch = SWITCHES[options.what]
    await measure(peer, works, switch, options.rounds, options.seconds)


def main() -> None:
    parser = parser_of_process()
    parser.add_argument("--what", choices=SWITCHES, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    options = parser.parse_args()
    pair.run(options, lead)
    if options.what == "metrics" and options.rank == 0:
        asyncrpc.run(measure_alone(20 * options.rounds))


if __name__ == "__main__":
    on_and_off.main()  # not as `__main__`: the other end calls by the module's name
