"""One process of `bench_call_path`: calls one after the other, traced or not."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch

import asyncrpc
from tests.bench import tracing
from tests.bench import workloads as w
from tests.bench.processes import choose_core, report
from tests.bench.sides import pair
from tests.bench.sides.asyncrpc_side import with_spin
from tests.bench.sides.side import parser_of_process
from tests.bench.tracing import CALLEE_PROBES, CALLER_PROBES, Place

WARM_UPS = 300

Workload = tuple[Callable[..., Any], Callable[..., Any], tuple[Any, ...]]

# Name: what is called when nothing is traced, what when it is, and the arguments.
WORKLOADS: dict[str, Workload] = {
    "async def": (w.nothing_async, tracing.trace_nothing_async, ()),
    "def": (w.nothing, tracing.trace_nothing, ()),
    "1 KiB tensor, def": (
        w.add_one,
        tracing.trace_add_one,
        (torch.ones(w.KIB_FLOATS),),
    ),
}


async def plain(peer: asyncrpc.Peer, workload: Workload, calls: int) -> list[float]:
    """Return the microseconds of each call, from outside."""
    function, _, args = workload
    now, times_us = time.perf_counter_ns, []
    for _ in range(calls):
        start_ns = now()
        await peer.call(function, *args)
        times_us.append((now() - start_ns) / 1000)
    return times_us


async def traced(peer: asyncrpc.Peer, workload: Workload, calls: int) -> list[int]:
    """Return the marks of both processes."""
    _, function, args = workload
    await tracing.take_marks()
    await peer.call(tracing.take_marks)
    tracing.marks.clear()
    begin, end = int(Place.BEGIN), int(Place.END)
    now, append, bits = time.perf_counter_ns, tracing.marks.append, tracing.PLACE_BITS
    for _ in range(calls):
        append(now() << bits | begin)
        await peer.call(function, *args)
        append(now() << bits | end)
    ours = list(tracing.marks)
    return ours + await peer.call(tracing.take_marks)


async def lead(peer: asyncrpc.Peer, options: argparse.Namespace) -> None:
    report("mark", options.cost_ns, options.absent)
    for name, workload in WORKLOADS.items():
        await plain(peer, workload, WARM_UPS)
        if options.traced:
            _, function, args = workload
            await plain(peer, (function, function, args), WARM_UPS)
            report(name, await traced(peer, workload, options.calls))
        else:
            report(name, await plain(peer, workload, options.calls))


def main() -> None:
    parser = parser_of_process()
    parser.add_argument("--calls", type=int, default=3000)
    parser.add_argument("--cores", default="free")
    parser.add_argument("--spin", default="")
    parser.add_argument("--traced", action="store_true")
    options = parser.parse_args()
    choose_core(options.rank, options.cores)
    options.cost_ns, options.absent = 0.0, []
    if options.traced:
        options.cost_ns = tracing.mark_cost_ns()
        probes = CALLEE_PROBES if options.rank else CALLER_PROBES
        options.absent = [probe.method for probe in probes if not tracing.attach(probe)]
    pair.run(options, lead, of_worker=with_spin(options.spin) if options.spin else None)


if __name__ == "__main__":
    main()
