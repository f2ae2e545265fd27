"""Workers that hang at their start or end, at a device or without room are named."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest
import torch

import asyncrpc
from asyncrpc import DeviceOptions, LimitOptions, Options, Worker, devices
from asyncrpc.testing import ProcessCluster
from tests.integration.tools.inspection.looks import (
    GENEROUS_S,
    OPTIONS,
    look,
    until_said,
)
from tests.integration.tools.inspection.test_stalls import listening

LARGE_BYTES = 900_000  # of a request; two are more than the limit of these workers

_kept: set[asyncio.Task[None]] = set()
let_go, kept = threading.Event(), threading.Event()


async def wait_for_event() -> None:
    never = asyncio.Event()
    await never.wait()


# --- the end -------------------------------------------------------------------------


async def begin_end() -> None:
    """Ask for the end of the group, in a task that outlives this call."""
    worker = asyncrpc.current_worker()
    task = asyncio.create_task(
        worker.shutdown(graceful=True, drain_timeout_s=3600.0), name="ending"
    )
    _kept.add(task)


async def an_end_to_which_one_does_not_come(worker: Worker) -> None:
    await worker.peer("ps").call(begin_end)
    await worker.shutdown(graceful=True)


async def an_end_with_a_call_in_flight(worker: Worker) -> None:
    for name in ("ps", "cache"):
        await worker.peer(name).call(begin_end)
    call = asyncio.ensure_future(worker.peer("ps").call(wait_for_event))
    try:
        await worker.shutdown(graceful=True, drain_timeout_s=3600.0)
    finally:
        call.cancel()


# --- devices -------------------------------------------------------------------------


def hold_device(held: threading.Event) -> None:
    with devices.lock():
        held.set()
        let_go.wait()


async def begin_holding() -> None:
    held = threading.Event()
    holder = threading.Thread(target=hold_device, args=(held,), name="holder")
    holder.daemon = True
    holder.start()
    await asyncio.to_thread(held.wait)


def use_device() -> None:
    pass


def hold_pool() -> None:
    let_go.wait()


async def a_turn_on_a_device(worker: Worker) -> None:
    await worker.peer("ps").call(begin_holding)
    await worker.peer("ps").call(use_device)


async def a_thread_that_another_call_has(worker: Worker) -> None:
    first = asyncio.ensure_future(worker.peer("ps").call(hold_pool))
    try:
        await asyncio.sleep(0)
        await worker.peer("ps").call(use_device)
    finally:
        first.cancel()


# --- room ----------------------------------------------------------------------------


async def keep(_: torch.Tensor) -> None:
    kept.set()
    never = asyncio.Event()
    await never.wait()


def until_kept() -> None:
    kept.wait()


async def keep_more(_: torch.Tensor) -> None:
    pass


async def a_large_request_that_waits_for_room(worker: Worker) -> None:
    """Not from a function of a call: such a one may go beyond the limit."""
    tensor = torch.zeros(LARGE_BYTES, dtype=torch.uint8)
    reference = worker.peer("ps").remote(keep, tensor)  # for which nobody waits
    await worker.peer("ps").call(until_kept)
    await worker.peer("ps").call(keep_more, tensor)
    del reference


Program = Callable[[Worker], Awaitable[None]]

EXCLUSIVE: Final = replace(OPTIONS, devices=DeviceOptions(exclusive=True))
SMALL: Final = replace(OPTIONS, limits=LimitOptions(inbound_bytes_max=1 << 20))
# Of those who wait for the same one is told.
FIRST: Final = r"^(trainer task `train`|\S+ task `ending`) waits [\d.]+ s for "
HELD: Final = r"which runs `let_go.wait\(\)` \(test_worker_hangs\.py:\d+ in hold_"

HANGS: Final[dict[Program, tuple[Options, str]]] = {
    an_end_to_which_one_does_not_come: (
        OPTIONS,
        r"wave \d+ of the end, to which cache has not come: cache task `\S+`, which ",
    ),
    an_end_with_a_call_in_flight: (
        OPTIONS,
        r".*calls in flight.*, which waits for Event `never`",
    ),
    a_turn_on_a_device: (
        EXCLUSIVE,
        (
            rf"ps `use_device`, which waits for the device lock held by ps thread "
            rf"`holder`, {HELD}device"
        ),
    ),
    a_thread_that_another_call_has: (
        EXCLUSIVE,
        (
            rf"ps `use_device`, which waits for a thread of its pool: thread "
            rf"`asyncrpc-ps-\d+`, {HELD}pool"
        ),
    ),
    a_large_request_that_waits_for_room: (
        SMALL,
        (
            r"room for `keep_more` on 'ps' held "
            r"by ps task `keep`, which waits for "
            r"Event `never`"
        ),
    ),
}


@asynccontextmanager
async def group(options: Options) -> AsyncIterator[Worker]:
    """Yield a worker of three; the others are killed in the end."""
    names = ["ps", "cache"]
    cluster = ProcessCluster(
        names, name="trainer", method="forkserver", options=options
    )
    async with cluster as worker:
        try:
            yield worker
        finally:
            for name in names:
                cluster.kill(name)


@pytest.mark.parametrize("hang", HANGS, ids=lambda hang: hang.__name__)
async def test_worker_hang_is_named_exactly(hang: Program) -> None:
    options, wanted = HANGS[hang]

    async def train(worker: Worker) -> None:
        await hang(worker)

    async with group(options) as worker:
        task = asyncio.create_task(train(worker), name="train")
        try:
            await until_said(worker, FIRST + f"({wanted})")
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def test_start_with_a_missing_worker_is_named(tmp_path: Path) -> None:
    where = f"file://{tmp_path}/store"
    options = replace(OPTIONS, stall_after_s=0.5)
    worker = Worker("trainer", rank=0, world_size=3, rendezvous=where, options=options)
    other = Worker("ps", rank=1, world_size=3, rendezvous=where, options=OPTIONS)
    with listening() as log:
        tasks = [
            asyncio.create_task(starting.__aenter__(), name=f"{starting.name}'s start")
            for starting in (worker, other)
        ]
        try:
            async with asyncio.timeout(GENEROUS_S):
                while not all(  # noqa: ASYNC110  (nothing tells)
                    starting.parts.listeners for starting in (worker, other)
                ):
                    await asyncio.sleep(0.01)
            wanted = r"the others at the start: rank 2 of 3 has not come"
            first = r"the others at the start: ranks? (1, )?2 of 3 ha"
            await until_said(
                worker, rf"^trainer task `trainer's start` waits [\d.]+ s for {wanted}"
            )
            view = await look(other)
            assert list(view.members) == ["ps"]
            await log.hears(rf"worker 'trainer' is stuck:.* for {first}")
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
