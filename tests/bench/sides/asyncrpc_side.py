"""asyncrpc, as its documentation uses it: awaited, on the fastest event loop."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, Final

import torch

import asyncrpc
from asyncrpc.testing import acting_as
from tests.bench import workloads as w
from tests.bench.harness import (
    Budget,
    gb_per_second,
    measure_async,
    p50_p99_us,
    per_second,
)
from tests.bench.sides import awaiting, windows
from tests.bench.sides import training_asyncrpc as training
from tests.bench.sides.awaiting import Measured
from tests.bench.sides.side import Arguments, name_of, start, warm_ups_for

SECRET: Final = "of a benchmark on one host"
CALLERS: Final = 8
POLLING: Final = 0.001  # seconds: far longer than a small call takes
# How many workers each process of a start of the kind `several` holds.
WORKERS_EACH: Final = (3, 1, 3, 2)


def outstanding(function: Callable[..., Any]) -> Measured:
    start = partial(asyncrpc.rpc_async, w.CALLEE, function)
    return partial(awaiting.outstanding, start)


def start_sending(tensor: torch.Tensor) -> Awaitable[list[int]]:
    return asyncrpc.rpc_async(w.CALLEE, w.shape_of, args=(tensor,))


def placed(worker: asyncrpc.Worker, nbytes: int) -> Measured:
    """Measure a tensor that is in shared memory from the start."""

    async def run(budget: Budget) -> list[float]:
        empty: Any = worker.empty  # type: ignore[attr-defined,unused-ignore]
        tensor = empty(nbytes // 4).fill_(1.0)
        call = partial(worker.peer(w.CALLEE).call, w.shape_of, tensor)
        times_s = await measure_async(call, budget, warm_ups=warm_ups_for(nbytes))
        return [gb_per_second(times_s, nbytes)]

    return run


def echo_into(peer: asyncrpc.Peer, nbytes: int) -> Measured:
    """Measure an echo that lands in a tensor that is there already."""

    async def run(budget: Budget) -> list[float]:
        tensor, out = torch.ones(nbytes // 4), torch.zeros(nbytes // 4)
        call = partial(peer.using(out=out).call, w.echo, tensor)
        times_s = await measure_async(call, budget, warm_ups=warm_ups_for(nbytes))
        return [gb_per_second(times_s, nbytes)]

    return run


def shared(peer: asyncrpc.Peer) -> Measured:
    """Measure by how much a call with a shared tensor is slower than one without."""

    async def run(budget: Budget) -> list[float]:
        share: Any = asyncrpc.share  # type: ignore[attr-defined,unused-ignore]
        tensor = share(torch.ones((w.SHARED_MIB << 20) // 4))
        trivial = partial(peer.call, w.nothing_async)
        with_it = partial(peer.call, w.take_async, tensor)
        half = Budget(budget.seconds / 2)
        (bare_us, _), (with_us, _) = [
            p50_p99_us(await measure_async(call, half)) for call in (trivial, with_it)
        ]
        return [with_us - bare_us]

    return run


def fan_out(worker: asyncrpc.Worker, mib: int) -> Measured:
    async def run(budget: Budget) -> list[float]:
        tensor = torch.ones((mib << 20) // 4)
        peers = [name_of(rank) for rank in (1, 2, 3)]
        group: Any = worker.group(peers)  # type: ignore[attr-defined,unused-ignore]

        async def call_group() -> None:
            await group.call(w.shape_of, tensor)

        times_s = await measure_async(call_group, budget, warm_ups=warm_ups_for(0))
        return [gb_per_second(times_s, len(peers) * tensor.nbytes)]

    return run


def fan_in(worker: asyncrpc.Worker, callers: int) -> Measured:
    """Measure the rate of several workers that call the same one."""

    async def run(budget: Budget) -> list[float]:
        each = (1, 0, 1, 1) if callers == 3 else WORKERS_EACH
        rates = await asyncio.gather(
            *(
                worker.peer(name_of(rank)).call(
                    windows.asyncrpc_window, count, budget.seconds
                )
                for rank, count in enumerate(each)
                if rank > 1
            ),
            windows.asyncrpc_window(each[0], budget.seconds),
        )
        return [sum(rates)]

    return run


async def references(budget: Budget) -> list[float]:
    async def use_reference() -> None:
        rref = asyncrpc.remote(w.CALLEE, w.Counter)
        assert await rref.rpc_async().add(2) == 2
        await rref.to_here()

    return [per_second(await measure_async(use_reference, budget))]


async def kept_reference(budget: Budget) -> list[float]:
    rref = asyncrpc.remote(w.CALLEE, w.Counter)

    async def add() -> None:
        await rref.rpc_async().add(1)

    return [per_second(await measure_async(add, budget))]


def measured(worker: asyncrpc.Worker) -> Mapping[str, Measured]:
    peer = worker.peer(w.CALLEE)
    call, kib = peer.call, torch.ones(w.KIB_FLOATS)
    trivial = partial(awaiting.latency, partial(call, w.nothing_async))
    shape_of, echo = partial(call, w.shape_of), partial(call, w.echo)
    workloads: dict[str, Measured] = {
        "call_async": trivial,
        "call_polling": trivial,
        "call_def": partial(awaiting.latency, partial(call, w.nothing)),
        "tensor_add": partial(awaiting.latency, partial(call, w.add_one, kib)),
        "many_async": outstanding(w.nothing_async),
        "many_def": outstanding(w.nothing),
        "callers_3": fan_in(worker, 3),
        "callers_8": fan_in(worker, CALLERS),
        "at_once_16": partial(awaiting.at_once, start_sending),
        "placed_16": placed(worker, 16 << 20),
        "out_256": echo_into(peer, 256 << 20),
        "shared": shared(peer),
        "group": fan_out(worker, w.FAN_OUT_MIB),
        "tcp_group": fan_out(worker, w.TCP_FAN_OUT_MIB),
        "rref": references,
        "rref_method": kept_reference,
        **awaiting.bandwidths(shape_of, echo),
        **training.measured(),
    }
    for size in w.TCP_SIZES_MIB:
        workloads[f"tcp_{size}"] = partial(awaiting.bandwidth, shape_of, size << 20)
        workloads[f"tcp_echo_{size}"] = partial(awaiting.bandwidth, echo, size << 20)
    return workloads


def options_for(kind: str, spin: str = "") -> asyncrpc.Options:
    """Return what the workers of a start are told.

    Args:
        spin: `NetworkOptions.spin`; empty: the default.
    """
    network_options: Any = {"spin": spin} if spin else {}
    if kind in w.TCP_KINDS:
        return asyncrpc.Options(
            secret=SECRET,
            network=asyncrpc.NetworkOptions(
                listen=("tcp://127.0.0.1:0",), **network_options
            ),
        )
    if kind == "polling":
        return with_spin(POLLING)
    return with_spin(spin) if spin else asyncrpc.Options()


def with_spin(spin: object) -> asyncrpc.Options:
    """Return options that let the loop poll."""
    if not hasattr(asyncrpc, "NetworkOptions"):
        raise LookupError("there are no NetworkOptions")
    network_options: dict[str, Any] = {"spin": spin}
    return asyncrpc.Options(network=asyncrpc.NetworkOptions(**network_options))


def names_of(arguments: Arguments) -> list[str]:
    """Return the names of this process's workers; the first is the process's own."""
    names = [arguments.name]
    if arguments.kind == "several":
        names += [
            f"{arguments.name}.{at}" for at in range(1, WORKERS_EACH[arguments.rank])
        ]
    return names


def rank_of(arguments: Arguments, at: int) -> int:
    """Return the rank of this process's worker number `at`."""
    if at == 0:
        return arguments.rank
    before = sum(count - 1 for count in WORKERS_EACH[: arguments.rank])
    return arguments.processes + before + at - 1


async def main(arguments: Arguments) -> None:
    torch.set_num_threads(1)
    options = options_for(arguments.kind, arguments.spin)
    total = sum(WORKERS_EACH) if arguments.kind == "several" else arguments.processes
    windows.workers += [
        asyncrpc.Worker(
            name,
            rank=rank_of(arguments, at),
            world_size=total,
            rendezvous=f"tcp://127.0.0.1:{arguments.port}",
            options=options,
        )
        for at, name in enumerate(names_of(arguments))
    ]
    first, *others = windows.workers
    async with asyncio.TaskGroup() as starting:
        for worker in windows.workers:
            starting.create_task(worker.__aenter__())
    try:
        with acting_as(first):
            if arguments.rank == 0:
                await awaiting.lead(measured(first), arguments)
        await asyncio.gather(*(worker.barrier() for worker in windows.workers))
    finally:
        await asyncio.gather(*(worker.shutdown() for worker in (first, *others)))


if __name__ == "__main__":
    sys.exit(start(lambda arguments: asyncrpc.run(main(arguments))))
