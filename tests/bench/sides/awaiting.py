"""What a side does whose calls are awaited: measure, report, and end in order.

A library takes part with a `call`: it starts a function of `tests.bench.workloads` on
the callee by its name, at once, and returns what is awaited for the result.
"""

from __future__ import annotations

import asyncio
import sys
import traceback
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, Final

import torch

from tests.bench import workloads as w
from tests.bench.harness import (
    Budget,
    gb_per_second,
    measure_async,
    p50_p99_us,
    per_second,
)
from tests.bench.processes import report
from tests.bench.sides.side import Arguments, reason_of, warm_ups_for

Call = Callable[..., Awaitable[Any]]
Measured = Callable[[Budget], Awaitable[list[float]]]

LIMIT_S: Final = 40.0  # of one workload


def measured(call: Call) -> dict[str, Measured]:
    """Return the workloads that need no more than a call."""
    nothing, shape_of, echo = (
        partial(call, name) for name in ("nothing_async", "shape_of", "echo")
    )
    workloads: dict[str, Measured] = {
        "call_async": partial(latency, nothing),
        "many_async": partial(outstanding, nothing),
        "at_once_16": partial(at_once, shape_of),
    }
    workloads |= bandwidths(shape_of, echo)
    for size in w.TCP_SIZES_MIB:
        workloads[f"tcp_{size}"] = workloads[f"send_{size}"]
    return workloads


def bandwidths(shape_of: Call, echo: Call) -> dict[str, Measured]:
    """Return the workloads with tensors, one after the other."""
    workloads: dict[str, Measured] = {
        "send_64k": partial(bandwidth, shape_of, 64 << 10)
    }
    for size in w.SIZES_MIB:
        workloads[f"send_{size}"] = partial(bandwidth, shape_of, size << 20)
        workloads[f"echo_{size}"] = partial(bandwidth, echo, size << 20)
    return workloads


async def latency(start: Call, budget: Budget) -> list[float]:
    return p50_p99_us(await measure_async(start, budget))


async def outstanding(start: Call, budget: Budget) -> list[float]:
    return [per_second(await window(start, budget, w.OUTSTANDING))]


async def bandwidth(send: Call, nbytes: int, budget: Budget) -> list[float]:
    tensor = torch.ones(nbytes // 4)
    check(tensor, await send(tensor))
    times_s = await measure_async(
        partial(send, tensor), budget, warm_ups=warm_ups_for(nbytes)
    )
    return [gb_per_second(times_s, nbytes)]


async def at_once(send: Call, budget: Budget) -> list[float]:
    tensor = torch.ones((w.AT_ONCE_MIB << 20) // 4)
    check(tensor, await send(tensor))
    times_s = await window(partial(send, tensor), budget, w.AT_ONCE)
    return [per_second(times_s) * tensor.nbytes / 1e9]


def check(tensor: torch.Tensor, result: Any) -> None:
    """Raise unless a tensor came to the callee whole, and its answer came back."""
    is_echo = isinstance(result, torch.Tensor)
    if not (torch.equal(tensor, result) if is_echo else result == list(tensor.shape)):
        raise ValueError(f"{tensor.nbytes} bytes have a wrong result: {result!r:.80}")


async def window(
    start: Callable[[], Awaitable[Any]], budget: Budget, count: int
) -> list[float]:
    """Keep `count` calls outstanding; return the seconds from answer to answer."""
    calls = deque(start() for _ in range(count))

    async def one_more() -> None:
        await calls.popleft()
        calls.append(start())

    times_s = await measure_async(one_more, budget, warm_ups=count)
    for call in calls:
        await call
    return times_s


async def lead(workloads: Mapping[str, Measured], arguments: Arguments) -> None:
    """Measure one workload after the other; one that fails leaves the rest."""
    for name in arguments.workloads:
        try:
            async with asyncio.timeout(LIMIT_S):
                values = await workloads[name](arguments.budget_for(name))
        except Exception as error:  # noqa: BLE001  (it is reported)
            traceback.print_exc(file=sys.stderr)
            report(name, [], reason_of(error))
        else:
            report(name, values, "")
