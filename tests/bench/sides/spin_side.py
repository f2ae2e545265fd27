"""One process of `bench_spin`: calls with one setting of `NetworkOptions.spin`.

What polling gives and what it takes: latency and rate, processor time of both processes
while calls go on and while nothing does, and how much slower others compute meanwhile.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final

import asyncrpc
from tests.bench import workloads as w
from tests.bench.harness import Budget, measure_async, p50_p99_us, per_second
from tests.bench.processes import report
from tests.bench.sides import pair
from tests.bench.sides.asyncrpc_side import outstanding, with_spin
from tests.bench.sides.load import Load, used_by
from tests.bench.sides.side import parser_of_process

COUNTER: Final = "tests.bench.sides.load"
GAP_S: Final = 0.002  # between calls that come now and then

Calls = Callable[[float], Awaitable[list[float]]]


async def cores(peer: asyncrpc.Peer, work: Awaitable[object]) -> list[float]:
    """Return how many cores each process kept busy during `work`: caller, callee."""
    start_s = time.perf_counter()
    used_s = await used_by(peer, work)
    took_s = time.perf_counter() - start_s
    return [cpu_s / took_s for cpu_s in used_s]


async def beside_a_process(work: Calls, seconds: float) -> float:
    """Return the rounds per second of a process that computes while calls go on."""
    with subprocess.Popen(  # noqa: ASYNC220  (nothing else runs yet)
        [sys.executable, "-m", COUNTER, str(seconds)], stdout=subprocess.PIPE, text=True
    ) as counter:
        assert counter.stdout is not None
        counter.stdout.readline()
        await work(seconds)
        return float(await asyncio.to_thread(counter.stdout.readline))


async def beside_a_thread(load: str, work: Calls, seconds: float) -> float:
    """Return the rounds per second of a thread of the caller while calls go on."""
    thread = Load(load)
    await work(seconds)
    return thread.stop()


async def lead(peer: asyncrpc.Peer, options: argparse.Namespace) -> None:
    seconds = options.seconds
    call = partial(peer.call, w.nothing_async)

    async def calls(seconds: float) -> list[float]:
        return await measure_async(call, Budget(seconds))

    async def now_and_then(seconds: float) -> list[float]:
        times_s: list[float] = []
        for _ in range(int(seconds / GAP_S)):
            await asyncio.sleep(GAP_S)
            start_s = time.perf_counter()
            await call()
            times_s.append(time.perf_counter() - start_s)
        return times_s

    times_s = await calls(seconds)
    report("call, us", *p50_p99_us(times_s))
    report("calls in turn, 1/s", per_second(times_s))
    report(
        f"call every {GAP_S * 1e3:g} ms, us", *p50_p99_us(await now_and_then(seconds))
    )
    many = outstanding(w.nothing_async)
    report(f"{w.OUTSTANDING} outstanding, 1/s", *await many(Budget(seconds)))
    report("cores used by calls in turn", *await cores(peer, calls(seconds)))
    report(
        f"cores used by a call every {GAP_S * 1e3:g} ms",
        *await cores(peer, now_and_then(seconds)),
    )
    report("cores used by nothing", *await cores(peer, asyncio.sleep(seconds)))
    idle = asyncio.sleep
    for title, work in (("idle", idle), ("calls in turn", calls)):
        rounds = await beside_a_process(work, seconds)  # type: ignore[arg-type]
        report(f"process beside, {title}, rounds/us", rounds / 1e6)
        for load in ("python", "matmul"):
            rounds = await beside_a_thread(load, work, seconds)  # type: ignore[arg-type]
            report(f"{load} thread beside, {title}, rounds/s", rounds)


def setting(text: str) -> str | float:
    """Read `NetworkOptions.spin`: seconds, or a word."""
    try:
        return float(text)
    except ValueError:
        return text


if __name__ == "__main__":
    parser = parser_of_process()
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--spin", type=setting, required=True)
    options = parser.parse_args()
    pair.run(options, lead, of_worker=with_spin(options.spin))
