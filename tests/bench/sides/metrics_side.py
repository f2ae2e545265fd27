"""One of two processes whose calls are counted, now and then."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Final

import asyncrpc
from asyncrpc import observability
from asyncrpc.testing import Cluster
from tests.bench.processes import report
from tests.bench.sides.on_and_off import AT_ONCE, BOTH, add, at_once, run_side

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
        found: dict[str, list[list[float]]] = {wanted: [] for wanted in BOTH}
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
                found[wanted].append([took_s / (4 * AT_ONCE) * 1e6])
        report("one process", {wanted: [min(one)] for wanted, one in found.items()})


if __name__ == "__main__":
    options = run_side(count, __doc__, with_training=False)
    if options.rank == 0:
        asyncrpc.run(measure_alone(20 * options.rounds))
