"""What the tests of queues run in other processes."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch

import asyncrpc
from asyncrpc.multiprocessing import Queue

Items = Queue[Any]


def double(rank: int, inbox: Items, outbox: Items) -> None:
    """Double every tensor in place, and send it back, until None comes."""
    while (tensor := inbox.get()) is not None:
        tensor.mul_(2)
        outbox.put(tensor)


async def double_async(rank: int, inbox: Items, outbox: Items) -> None:
    while (tensor := await inbox.get_async()) is not None:
        await outbox.put_async(tensor.mul_(2))


def double_in_process(inbox: Items, outbox: Items) -> None:
    """As `double`, for a process of multiprocessing."""
    double(0, inbox, outbox)


def produce(rank: int, queue: Items, count: int) -> None:
    for serial in range(count):
        queue.put((rank, serial, torch.full((rank * 300 + 1,), serial)))


def consume(rank: int, queue: Items, counts: Items) -> None:
    """Count what comes, and check its order and values, until None comes."""
    last: dict[int, int] = {}
    count = 0
    while (item := queue.get()) is not None:
        producer, serial, tensor = item
        assert tensor.eq(serial).all()
        assert last.get(producer, -1) < serial
        last[producer] = serial
        count += 1
    counts.put(count)


def put_and_die(queue: Items) -> None:
    """Leave everything in the queue, and end without any cleaning up."""
    queue.put(torch.full((300_000,), 7.0))
    queue.put({"text": "x" * 100_000})
    queue.put(asyncrpc.share(torch.full((10,), 8.0)))
    os._exit(0)


def put_without_end(queue: Items) -> None:
    """Put small and large items until killed."""
    serial = 0
    while True:
        queue.put((serial, torch.full((serial * 997 % 50_000 + 1,), float(serial))))
        serial += 1


def get_without_end(queue: Items) -> None:
    """Take items and keep the last ones until killed."""
    kept: list[Any] = []
    while True:
        kept = [*kept[-3:], queue.get()]


def hold_one(queue: Items, reports: Items) -> None:
    """Keep a tensor until killed."""
    tensor = queue.get()
    reports.put(tensor.numel())
    signal.pause()


def hold_one_of_rank(rank: int, queue: Items, reports: Items) -> None:
    """As `hold_one`, for `launch`."""
    hold_one(queue, reports)


def write_gradients(rank: int, parameter: torch.nn.Parameter, alone: Any) -> Any:
    """Add to a gradient that is shared, and to one that is not there yet."""
    assert isinstance(parameter, torch.nn.Parameter)
    assert parameter.grad is not None
    parameter.grad += rank + 1.0
    assert alone.grad is None
    alone.sum().backward()
    gradient: Any = alone.grad
    return gradient.clone()


def ask_for_a_graph(rank: int, tensor: torch.Tensor) -> None:
    raise AssertionError("it was passed")


def drain_async(rank: int, queue: Items) -> int:
    """Take items by tasks of which most are cancelled; return how many came."""

    async def main() -> int:
        got = 0
        while True:
            tasks = [asyncio.create_task(queue.get_async()) for _ in range(4)]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            items = [
                result for result in results if not isinstance(result, BaseException)
            ]
            got += sum(item is not None for item in items)
            if None in items:
                return got

    return asyncio.run(main())


def count_up(rank: int, shared: torch.Tensor) -> object:
    shared[rank] += rank + 1
    return lambda: None  # cannot be pickled, and need not be


async def count_up_async(rank: int, shared: torch.Tensor) -> object:
    await asyncio.sleep(0)
    return count_up(rank, shared)


def wait_for_one(rank: int, shared: torch.Tensor) -> None:
    while shared[0] != 1.0:
        time.sleep(0.01)


def fail(rank: int) -> None:
    raise ValueError(f"no luck at {rank}")


def add_to_all(rank: int, tensors: list[torch.Tensor]) -> int:
    """Add one to each tensor in place; return how many descriptors are open here."""
    for tensor in tensors:
        tensor.detach().add_(1)
    return len(list(Path("/proc/self/fd").iterdir()))


def put_twice(rank: int, queue: Items, tensors: list[torch.Tensor]) -> None:
    """Add one to each tensor in place, and put all, and one of them again."""
    add_to_all(rank, tensors)
    queue.put(tensors)
    queue.put(tensors[-1])
