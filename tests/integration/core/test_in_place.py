"""No user-space copy of a large payload, on either side, and no memory but its own.

In two processes, through sockets; shared memory, which copies once, is off.
"""

from __future__ import annotations

import gc
import re
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import asyncrpc
from asyncrpc import CallStats, LimitOptions, Options, Worker
from asyncrpc.core.options import CallOptions
from tests.integration.core.groups import processes

MIB = 1 << 20
GIB = 1 << 30


@asyncrpc.on_loop
def bytes_copied() -> int:
    """Return what this worker's connections have copied since they were made."""
    worker = asyncrpc.current_worker()
    return sum(link.connection.bytes_copied for link in worker.parts.directory.links)


async def echo(value: Any) -> Any:
    return value


async def shape_of(value: Any) -> list[int]:
    return list(value.shape)


async def holes(elements: int) -> torch.Tensor:
    """Return every eighth of a tensor's elements: such a view is gathered."""
    return torch.arange(8.0 * elements)[::8]


def status(key: str) -> int:
    """Return a figure of this process's memory, in bytes."""
    match = re.search(rf"^{key}:\s+(\d+) kB", _status.read_text(), re.MULTILINE)
    assert match is not None
    return int(match[1]) * 1024


def forget_peak() -> int:
    """Have the peak of resident memory begin anew, now; return it."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    return status("VmHWM")


def peak() -> int:
    return status("VmHWM")


_status = Path("/proc/self/status")


@pytest.fixture(params=["uds", "tcp"])
async def a(request: pytest.FixtureRequest) -> AsyncIterator[Worker]:
    """A worker whose peer `b` is another process, connected by sockets only."""
    options = Options(limits=LimitOptions(shared_memory_bytes=0))
    cluster = processes("b", transport=request.param, options=options)
    async with cluster as worker:
        yield worker


async def moved(
    a: Worker, function: Callable[..., Any], *args: Any, out: Any = None
) -> tuple[Any, CallStats, int]:
    """Call a function of `b`; return the result, and what each side copied for it."""
    before = await a.peer("b").call(bytes_copied)
    call = a.parts.start_call("b", function, args, options=CallOptions(out=out))
    return await call, call.stats, (await a.peer("b").call(bytes_copied)) - before


SOURCES: dict[str, Callable[[], Any]] = {
    "contiguous": lambda: torch.rand(2 * MIB),
    "just beyond what is inline": lambda: torch.rand((64 << 10) // 4 + 1),
    "bfloat16": lambda: torch.rand(2 * MIB).bfloat16(),
    "rows of a matrix": lambda: torch.rand(2048, 1024)[100:1900],
    "from the middle of a storage": lambda: torch.rand(2 * MIB)[12_345:],
    "transposed": lambda: torch.rand(1024, 1024).t(),
    "permuted": lambda: torch.rand(64, 128, 96).permute(2, 0, 1),
    "every second column": lambda: torch.rand(1024, 2048)[:, ::2],
    "conjugate": lambda: torch.rand(MIB, dtype=torch.complex64).conj(),
    "expanded from a large one": lambda: torch.rand(1, MIB).expand(4, MIB),
    "two of one storage": lambda: list(torch.rand(2, MIB)),
    "three of their own": lambda: [torch.rand(MIB), torch.rand(9), torch.rand(MIB)],
    "sparse": lambda: torch.rand(512, 512).to_sparse(),
    "a numpy array": lambda: np.random.default_rng(1).random(MIB),
}


@pytest.mark.parametrize("name", SOURCES)
async def test_large_payload_is_copied_on_neither_side(a: Worker, name: str) -> None:
    value = SOURCES[name]()
    result, stats, there = await moved(a, echo, value)
    assert same(result, value)
    assert stats.bytes_sent == stats.bytes_received > 64 << 10
    assert stats.bytes_copied == 0
    assert there == 0


async def test_first_call_copies_nothing(a: Worker) -> None:
    """There is no connection yet, or none for large payloads."""
    value = torch.rand(2 * MIB)
    call = a.parts.start_call("b", echo, (value,))
    assert torch.equal(await call, value)
    assert call.stats.bytes_copied == 0
    assert await a.peer("b").call(bytes_copied) == 0


async def test_simultaneous_calls_copy_nothing(a: Worker) -> None:
    calls = [a.parts.start_call("b", echo, (torch.rand(MIB + 1),)) for _ in range(8)]
    for call in calls:
        await call
    assert sum(call.stats.bytes_copied for call in calls) == 0
    assert await a.peer("b").call(bytes_copied) == 0


async def test_tensor_with_large_gaps_is_gathered_once_by_its_sender(a: Worker) -> None:
    _, stats, there = await moved(a, shape_of, torch.rand(8 * MIB)[::8])
    assert stats.bytes_sent == stats.bytes_copied == 4 * MIB
    assert there == 0
    result, stats, there = await moved(a, holes, MIB)
    assert torch.equal(result, torch.arange(8.0 * MIB)[::8])
    assert stats.bytes_copied == 0
    assert stats.bytes_received == there == 4 * MIB


async def test_a_small_payload_is_copied_once_where_it_is_received(a: Worker) -> None:
    value = torch.rand(1000)
    result, stats, there = await moved(a, echo, value)
    assert torch.equal(result, value)
    assert stats.bytes_copied == stats.bytes_received == there == 4000


@pytest.mark.parametrize("elements", [(64 << 10) // 4 + 1, 4 * MIB])
async def test_result_lands_in_out_without_a_copy(a: Worker, elements: int) -> None:
    value, out = torch.rand(elements), torch.empty(elements)
    result, stats, there = await moved(a, echo, value, out=out)
    assert result is out
    assert torch.equal(out, value)
    assert stats.bytes_copied == there == 0


async def test_result_is_copied_once_into_a_strided_out(a: Worker) -> None:
    table = torch.zeros(MIB, 2)
    value = torch.rand(MIB)
    _, stats, there = await moved(a, echo, value, out=table[:, 1])
    assert torch.equal(table[:, 1], value)
    assert stats.bytes_copied == 4 * MIB
    assert there == 0


async def test_a_received_tensor_may_be_written_to_and_kept(a: Worker) -> None:
    """Its memory is used again only when nothing refers to it any more."""
    first = await a.peer("b").call(torch.zeros, MIB)
    first += 1
    row = first[:1]
    del first
    for value in (2.0, 3.0, 4.0):
        later = await a.peer("b").call(torch.full, (MIB,), value)
        assert bool((later == value).all())
        del later
    assert row.item() == 1
    await a.peer("b").call(bytes_copied)  # the last call's future is gone by then
    assert a.parts.receive_pool.idle_bytes == 4 * MIB  # one served all three


@pytest.mark.slow
async def test_a_gigabyte_takes_its_own_memory_and_little_more(a: Worker) -> None:
    """On both sides, at the worst moment, over what each had before."""
    await assert_a_gigabyte_takes_little_more(a)


@pytest.mark.slow
async def test_gigabyte_by_shared_memory_takes_little_more() -> None:
    async with processes("b") as a:
        await assert_a_gigabyte_takes_little_more(a)


async def assert_a_gigabyte_takes_little_more(a: Worker) -> None:
    await a.peer("b").call(echo, torch.rand(MIB))  # what the first call needs
    value = torch.empty(GIB, dtype=torch.uint8).fill_(7)
    here = forget_peak()  # the tensor itself included
    there = await a.peer("b").call(forget_peak)
    assert await a.peer("b").call(shape_of, value) == [GIB]
    assert peak() - here < 64 * MIB
    assert await a.peer("b").call(peak) - there < GIB + 64 * MIB


@pytest.mark.slow
async def test_large_result_in_out_takes_no_extra_memory(a: Worker) -> None:
    out = torch.empty(GIB // 8).fill_(7)
    await a.peer("b").call(echo, torch.rand(MIB))
    here = forget_peak()
    assert await a.peer("b").using(out=out).call(torch.zeros, GIB // 8) is out
    assert peak() - here < 64 * MIB
    assert not out.any()


def same(result: Any, value: Any) -> bool:
    if isinstance(value, list):
        return all(map(same, result, value))
    if isinstance(value, np.ndarray):
        return bool((result == value).all())
    if value.is_sparse:
        return torch.equal(result.to_dense(), value.to_dense())
    return torch.equal(result, value)
