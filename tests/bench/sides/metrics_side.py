"""One of two processes whose calls are counted, now and then.

Metrics are turned on and off many times in one life of the pair, at both ends, so that
the machine's mood meets both.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final

import asyncrpc
from asyncrpc import observability
from asyncrpc.testing import Cluster
from tests.bench.harness import WARM_UPS
from tests.bench.processes import report

AT_ONCE: Final = 256
BOTH: Final = ("off", "on")
_counting: Final[list[observability.Metrics]] = []


async def add(left: int, right: int) -> int:
    return left + right


def count(wanted: str) -> None:
    """Begin to count at this worker, or end it."""
    while _counting:
        _counting.pop().close()
    if wanted == "on":
        metrics = observability.Metrics(asyncrpc.current_worker())
        _counting.append(metrics.__enter__())


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


Work = Callable[[asyncrpc.Peer, float], Awaitable[int]]
WORK: Final[dict[str, Work]] = {"in turn": in_turn, f"{AT_ONCE} outstanding": at_once}


async def rates(work: Work, peer: asyncrpc.Peer, seconds: float) -> list[float]:
    """Return calls per second, and us of processor time of both ends for each."""
    cpu_s = time.process_time() + await peer.call(time.process_time)
    begun_s = time.perf_counter()
    calls = await work(peer, seconds)
    took_s = time.perf_counter() - begun_s
    cpu_s = time.process_time() + await peer.call(time.process_time) - cpu_s
    return [calls / took_s, cpu_s / calls * 1e6]


async def measure(worker: asyncrpc.Worker, rounds: int, seconds: float) -> None:
    peer = worker.peer(1)
    for _ in range(WARM_UPS):
        await peer.call(add, 1, 2)
    for name, work in WORK.items():
        await work(peer, seconds)
        found: dict[str, list[list[float]]] = {wanted: [] for wanted in BOTH}
        for number in range(2 * rounds):
            wanted = BOTH[(number + number // 2) % 2]  # off on, on off, off on
            count(wanted)
            await peer.call(count, wanted)
            found[wanted].append(await rates(work, peer, seconds))
        report(name, found)
    count("off")
    await peer.call(count, "off")


async def measure_alone(blocks: int) -> None:
    """Report the processor time of calls between two workers of this process.

    A busy machine adds to most blocks of calls, and takes from none: so the least of
    many is what the calls themselves take.
    """
    async with Cluster(2, network="uds") as (a, b):
        peer = a.peer(1)
        await at_once(peer, 0.5)
        found: dict[str, list[list[float]]] = {wanted: [] for wanted in BOTH}
        for number in range(2 * blocks):
            wanted = BOTH[(number + number // 2) % 2]
            with contextlib.ExitStack() as stack:
                if wanted == "on":
                    stack.enter_context(observability.Metrics(a))
                    stack.enter_context(observability.Metrics(b))
                begun_s = time.process_time()
                for _ in range(4):
                    await asyncio.gather(*(peer.call(add, 1, 2) for _ in range(256)))
                found[wanted].append([(time.process_time() - begun_s) / 1024 * 1e6])
        report("one process", {wanted: [min(one)] for wanted, one in found.items()})


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
            await measure_alone(20 * options.rounds)
        with contextlib.suppress(asyncrpc.AsyncRpcError):
            await worker.barrier()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=0.5)
    asyncrpc.run(main(parser.parse_args()))
