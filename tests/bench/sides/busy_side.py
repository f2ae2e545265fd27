"""One process of `bench_busy`: calls while one of the two processes has other work."""

from __future__ import annotations

import argparse
import asyncio
from functools import partial
from typing import Final

import asyncrpc
from tests.bench import workloads as w
from tests.bench.harness import Budget, measure_async, p50_p99_us
from tests.bench.processes import report
from tests.bench.sides import pair
from tests.bench.sides.load import LOADS, set_load
from tests.bench.sides.side import parser_of_process

SETTINGS: Final = [
    ("nothing", "", ""),
    *(
        (f"{load} on the {where}", load, where)
        for where in (w.CALLEE, w.CALLER)
        for load in LOADS
    ),
]
FUNCTIONS: Final = (w.nothing_async, w.nothing)


async def calls(peer: asyncrpc.Peer, seconds: float) -> list[float]:
    """Return p50 and p99 of calls to an `async def` and to a `def`."""
    times_us: list[float] = []
    for function in FUNCTIONS:
        call = partial(peer.call, function)
        times_us += p50_p99_us(
            await measure_async(call, Budget(seconds, 20), warm_ups=5)
        )
    return times_us


async def lead(peer: asyncrpc.Peer, options: argparse.Namespace) -> None:
    for interval_ms in options.switch_ms:
        for title, load, where in SETTINGS:
            interval_s = interval_ms / 1000

            async def set_both(
                name: str, where: str = where, interval_s: float = interval_s
            ) -> float:
                on_caller, on_callee = (
                    name if where == side else "" for side in (w.CALLER, w.CALLEE)
                )
                ours = set_load(on_caller, interval_s)
                return ours + await peer.call(set_load, on_callee, interval_s)

            await set_both(load)
            await asyncio.sleep(options.seconds / 2)
            alone = await set_both("")
            await set_both(load)
            times_us = await calls(peer, options.seconds)
            beside = await set_both("")
            report(
                f"{interval_ms:g}", title, times_us, beside / alone if alone else 0.0
            )


if __name__ == "__main__":
    parser = parser_of_process()
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--switch-ms", type=float, nargs="+", required=True)
    pair.run(parser.parse_args(), lead)
