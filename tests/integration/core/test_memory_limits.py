"""A flooded worker stays within its memory, callers wait, and nothing is lost.

What is counted is the peak of the callee's own memory (RssAnon, looked at every few
milliseconds by a thread) over what it had when the flood began.  Slabs of shared memory
are not in it: they are their sender's, which made and filled them, and are limited by
its `LimitOptions.shared_memory_bytes`.  Where none are in play, the kernel's own record
of the peak (VmHWM, reset before) is held to the same limit.
"""

from __future__ import annotations

import asyncio
import contextvars
import gc
import threading
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import uvloop

import asyncrpc
from asyncrpc import LimitOptions, Options
from asyncrpc.core.worker import Worker
from tests.inner_state import CreditUse, credit_use
from tests.integration.core.groups import processes

MIB = 1 << 20
LIMIT_BYTES = 256 * MIB
REQUEST_BYTES = 16 * MIB
ITEM_BYTES = 4 * MIB
GROWTH_MAX = 1.2  # of the limit: allocators keep some, and blocks are rounded up
KINDS = 4  # different tensors, so that a mistaken one is found


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


class Peak:
    """The most memory that this process has had since a moment, and what it had then.

    Attributes:
        own_bytes: its own, by samples.
        all_bytes: shared memory and mapped files included, by the kernel's record.
    """

    def __init__(self) -> None:
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        self._own_first = self._own_most = memory_bytes("RssAnon")
        self._all_first = memory_bytes("VmRSS")
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._over.wait(0.003):
            self._own_most = max(self._own_most, memory_bytes("RssAnon"))

    def end(self) -> tuple[int, int]:
        """Return by how much the memory had grown at most: its own, and all."""
        self._over.set()
        self._thread.join()
        return self._own_most - self._own_first, memory_bytes("VmHWM") - self._all_first


PEAKS: list[Peak] = []


def begin_to_measure() -> None:
    PEAKS.append(Peak())


def grown_bytes() -> tuple[int, int]:
    return PEAKS.pop().end()


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
def credit() -> CreditUse:
    return credit_use(asyncrpc.current_worker().parts.inbound_credit)


async def checksum(value: torch.Tensor, index: int) -> tuple[int, float]:
    await GATES["gate"].pass_through()
    return index, float(value[:: 1 << 10].double().sum())


def tensors(nbytes: int) -> list[torch.Tensor]:
    return [torch.full((nbytes // 4,), float(kind + 1)) for kind in range(KINDS)]


class Produced:
    """How many items the producer has made."""

    items = 0


async def blocks(count: int) -> AsyncIterator[torch.Tensor]:
    for number in range(count):
        Produced.items = number + 1
        yield torch.full((ITEM_BYTES // 4,), float(number))


@asyncrpc.on_loop
def produced_items() -> int:
    return Produced.items


async def flood(worker: Worker, to: str, calls: int, function: Any) -> int:
    """Make so many calls at once; return how many of the answers were right."""
    values = tensors(REQUEST_BYTES)
    sums = [float(tensor[:: 1 << 10].double().sum()) for tensor in values]
    answers = await asyncio.gather(
        *(
            worker.peer(to).call(function, values[index % KINDS], index)
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
    return await loop.create_task(flood(worker, to, calls, checksum), context=outside)


class TestMemory:
    """On one kind of loop: many gigabytes are moved."""

    loops: ClassVar = {"uvloop": uvloop.new_event_loop}

    @pytest.mark.parametrize(
        ("transport", "shared_memory_bytes", "callers", "requests"),
        [
            ("uds", 1 << 30, 1, 1000),
            ("uds", 1 << 30, 3, 1000),
            ("uds", 0, 3, 300),
            ("tcp", 0, 1, 300),
        ],
    )
    async def test_a_flooded_callee_stays_within_its_limit(
        self, transport: Any, shared_memory_bytes: int, callers: int, requests: int
    ) -> None:
        options = Options(
            limits=LimitOptions(
                inbound_bytes_max=LIMIT_BYTES, shared_memory_bytes=shared_memory_bytes
            )
        )
        others = ["c", "d"][: callers - 1]
        cluster = processes("b", *others, transport=transport, options=options)
        async with cluster as worker:
            b = worker.peer("b")
            await b.call(close_gate)
            calls = requests // callers
            await b.call(begin_to_measure)
            floods = [
                asyncio.ensure_future(flood(worker, "b", calls, checksum)),
                *(
                    asyncio.ensure_future(
                        worker.peer(other).call(flood_from_here, "b", calls)
                    )
                    for other in others
                ),
            ]
            await b.call(when_came, (LIMIT_BYTES - LIMIT_BYTES // 8) // REQUEST_BYTES)
            full = await b.call(credit)
            link = await worker.parts.link_to("b")
            assert len(link.credit.waiting) >= calls - LIMIT_BYTES // REQUEST_BYTES
            assert full.waiting
            assert full.held_bytes + full.promised_bytes <= LIMIT_BYTES
            await b.call(open_gate)
            right = await asyncio.gather(*floods)
            own, all_ = await b.call(grown_bytes)
            assert right == [calls] * callers
            assert own <= GROWTH_MAX * LIMIT_BYTES
            if not shared_memory_bytes:
                assert all_ <= GROWTH_MAX * LIMIT_BYTES
            assert (await b.call(credit)).held_bytes == 0
            assert not link.credit.waiting

    @pytest.mark.parametrize("shared_memory_bytes", [0, 1 << 28])
    async def test_slow_consumer_stops_producer(self, shared_memory_bytes: int) -> None:
        items, stream_bytes_max = 250, 32 * MIB
        options = Options(
            limits=LimitOptions(
                stream_bytes_max=stream_bytes_max,
                shared_memory_bytes=shared_memory_bytes,
            )
        )
        # Those that were sent, one that waits to be, and one that was taken untold.
        ahead_max = stream_bytes_max // ITEM_BYTES + 2
        async with processes("b", options=options) as worker:
            b = worker.peer("b")
            await b.call(begin_to_measure)
            begin_to_measure()
            taken = 0
            async with aclosing(b.stream(blocks, items)) as stream:
                async for item in stream:
                    assert float(item[-1]) == taken
                    taken += 1
                    if taken <= 50 or not taken % 100:
                        # A producer that does not wait goes on while this is asked for.
                        assert await b.call(produced_items) <= taken + ahead_max
            assert taken == items
            for own, _ in (await b.call(grown_bytes), grown_bytes()):
                # And what allocators keep: some 32 MiB, on a busy machine a bit more.
                assert own <= 2 * stream_bytes_max + 48 * MIB
