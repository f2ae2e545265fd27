"""What does it cost that tensors are on a device, and does the event loop notice?

Two processes of this host, a tensor there and back: from host memory, from a device to
the same device of the peer, and, without any call, the four copies that this takes.
A *gap* is the longest time in which the caller's loop did nothing else.

    $ python -m tests.bench.bench_devices                          # host memory as one
    $ ASYNCRPC_TEST_DEVICE=cuda python -m tests.bench.bench_devices
    $ ASYNCRPC_TEST_DEVICE=xla PJRT_DEVICE=CPU python -m tests.bench.bench_devices
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import torch

import asyncrpc
from asyncrpc import DeviceOptions, Options
from asyncrpc.testing import ProcessCluster
from tests.bench.harness import WARM_UPS, Budget, measure_async
from tests.integration.devices.accelerators import TYPE, Hands, set_up

SIZES = (1 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20)
BUDGET = Budget(1.5)
TICK_S = 0.001
HOME = f"{TYPE}:0"
COLUMNS = ("KiB", "host ms", "device ms", "copies ms", "ratio", "gap ms")


def ready() -> None:
    set_up()


def same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def four_copies(tensor: torch.Tensor) -> torch.Tensor:
    """Do what a call does on both sides: to the host, and to the device, twice."""
    for _ in range(2):
        tensor = tensor.cpu().to(HOME)
    if TYPE == "cuda":
        torch.cuda.synchronize()
    return tensor


async def longest_gap_s(work: Callable[[], Awaitable[Any]]) -> float:
    """Return for how long the loop stood still at most while something was done."""
    longest_s = 0.0

    async def tick() -> None:
        nonlocal longest_s
        before_s = time.perf_counter()
        while True:
            await asyncio.sleep(TICK_S)
            now_s = time.perf_counter()
            longest_s = max(longest_s, now_s - before_s - TICK_S)
            before_s = now_s

    ticking = asyncio.create_task(tick())
    for _ in range(WARM_UPS):
        await work()
    ticking.cancel()
    return longest_s


async def main() -> None:
    set_up()
    options = (
        Options(devices=DeviceOptions(names=("xla",))) if TYPE == "xla" else Options()
    )
    print(f"{TYPE}, torch {torch.__version__}; medians")
    print("".join(f"{name:>12}" for name in COLUMNS))
    async with ProcessCluster(["b"], options=options) as worker:
        await worker.peer("b").call(ready)
        call, hands = worker.peer("b").call, Hands(worker)
        for size_bytes in SIZES:
            host = torch.zeros(size_bytes // 4)
            device = await hands.put(host)
            copies = partial(hands.do, partial(four_copies, device))
            works = partial(call, same, host), partial(call, same, device), copies
            times_s = [
                statistics.median(await measure_async(work, BUDGET)) for work in works
            ]
            gap_s = await longest_gap_s(works[1])
            host_ms, device_ms, copies_ms = (1e3 * time_s for time_s in times_s)
            ratio = device_ms / (host_ms + copies_ms)
            print(
                f"{size_bytes >> 10:>12}{host_ms:>12.3f}{device_ms:>12.3f}"
                f"{copies_ms:>12.3f}{ratio:>12.2f}{1e3 * gap_s:>12.2f}"
            )


if __name__ == "__main__":
    asyncrpc.run(main())
