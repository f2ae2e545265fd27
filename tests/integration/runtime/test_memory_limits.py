"""A flooded worker stays within its memory, callers wait, and nothing is lost.

What is counted is the peak of the callee's resident memory (VmHWM, reset before) over
what it had when the flood began.  Shared memory that it has touched is in it, too.
"""

from __future__ import annotations

import asyncio
import contextvars
import gc
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch

import asyncrpc
from asyncrpc import Options, Worker
from asyncrpc.runtime.credit import CreditStatistics
from asyncrpc.testing import ProcessCluster

MIB = 1 << 20
LIMIT_BYTES = 256 * MIB
REQUEST_BYTES = 16 * MIB
KINDS = 4  # different tensors, so that a mistaken one is found


# --- what runs on the other side -----------------------------------------------------


class Gate:
    """Holds calls until it is opened."""

    def __init__(self) -> None:
        self.opened = asyncio.Event()
        self.came = asyncio.Condition()
        self.calls = 0

    async def pass_through(self) -> None:
        async with self.came:
            self.calls += 1
            self.came.notify_all()
        await self.opened.wait()


GATES: dict[str, Gate] = {}


def memory_bytes(field: str) -> int:
    """Return what the kernel says of this process, such as VmRSS or VmHWM."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) << 10
    raise LookupError(field)


def begin_to_measure() -> int:
    """Forget the peak so far; return the resident memory of now."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return memory_bytes("VmRSS")


def peak_bytes() -> int:
    return memory_bytes("VmHWM")


def close_gate() -> None:
    GATES["gate"] = Gate()


def open_gate() -> None:
    GATES["gate"].opened.set()


async def when_came(calls: int) -> None:
    """Wait until so many calls stand at the gate."""
    gate = GATES["gate"]
    async with gate.came:
        await gate.came.wait_for(lambda: gate.calls >= calls)


@asyncrpc.on_loop
def credit() -> CreditStatistics:
    return asyncrpc.current_worker().inbound_credit.statistics()


async def checksum(value: torch.Tensor, index: int) -> tuple[int, float]:
    await GATES["gate"].pass_through()
    return index, float(value[:: 1 << 10].double().sum())


def checksum_in_thread(value: torch.Tensor, index: int) -> tuple[int, float]:
    return index, float(value[:: 1 << 10].double().sum())


def tensors(nbytes: int) -> list[torch.Tensor]:
    return [torch.full((nbytes // 4,), float(kind + 1)) for kind in range(KINDS)]


async def flood(worker: Worker, to: str, calls: int, function: Any) -> int:
    """Make so many calls at once; return how many of the answers were right."""
    given = tensors(REQUEST_BYTES)
    sums = [float(one[:: 1 << 10].double().sum()) for one in given]
    answers = await asyncio.gather(
        *(
            worker.peer(to).call(function, given[index % KINDS], index)
            for index in range(calls)
        )
    )
    return sum(
        answer == (index, sums[index % KINDS]) for index, answer in enumerate(answers)
    )


async def flood_from_here(to: str, calls: int) -> int:
    """Do as `flood`, as a program of this worker would, not as part of a call."""
    worker = asyncrpc.current_worker()
    loop = asyncio.get_running_loop()
    outside = contextvars.Context()
    task = loop.create_task(flood(worker, to, calls, checksum), context=outside)
    return await task


# --- tests ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("transport", "shared_memory_bytes", "callers"),
    [
        ("uds", 1 << 30, 1),
        ("uds", 1 << 30, 3),
        ("uds", 0, 3),
        ("tcp", 0, 1),
    ],
)
@pytest.mark.timeout(300)
async def test_a_flooded_callee_stays_within_its_limit(
    transport: Any, shared_memory_bytes: int, callers: int
) -> None:
    options = Options(
        inbound_bytes_max=LIMIT_BYTES, shared_memory_bytes=shared_memory_bytes
    )
    others = ["c", "d"][: callers - 1]
    cluster = ProcessCluster(
        ["b", *others], transport=transport, options=options, method="forkserver"
    )
    async with cluster as worker:
        b = worker.peer("b")
        await b.call(close_gate)
        calls = 1000 // callers
        before = await b.call(begin_to_measure)
        floods = [
            asyncio.ensure_future(flood(worker, "b", calls, checksum)),
            *(
                asyncio.ensure_future(worker.peer(one).call(flood_from_here, "b", calls))
                for one in others
            ),
        ]
        fit = (LIMIT_BYTES - LIMIT_BYTES // 8) // REQUEST_BYTES
        await b.call(when_came, fit)
        full = await b.call(credit)
        link = await worker.link_to("b")
        assert len(link.credit.waiting) >= calls - LIMIT_BYTES // REQUEST_BYTES
        assert full.waiting
        assert full.held_bytes + full.promised_bytes <= LIMIT_BYTES
        await b.call(open_gate)
        right = await asyncio.gather(*floods)
        grown = await b.call(peak_bytes) - before
        print(f"{transport=} {shared_memory_bytes=} {callers=} grown {grown / MIB:.0f}")
        assert right == [calls] * callers
        assert grown <= 1.2 * LIMIT_BYTES
        after = await b.call(credit)
        assert after.held_bytes == 0
        assert not link.credit.waiting
