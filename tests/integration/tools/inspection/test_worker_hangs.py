"""Workers that hang at their start or end, at a device or without room are named."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest

from asyncrpc import DeviceOptions, LimitOptions, Options, Worker
from asyncrpc.testing import ProcessCluster
from tests.integration.tools.inspection import hanging_workers as hanging
from tests.integration.tools.inspection.looks import (
    GENEROUS_S,
    OPTIONS,
    look,
    until_said,
)
from tests.integration.tools.inspection.test_stalls import listening

Program = Callable[[Worker], Awaitable[None]]

EXCLUSIVE: Final = replace(OPTIONS, devices=DeviceOptions(exclusive=True))
SMALL: Final = replace(OPTIONS, limits=LimitOptions(inbound_bytes_max=1 << 20))
# Of those who wait for the same one is told.
FIRST: Final = r"^(trainer task `train`|\S+ task `ending`) waits [\d.]+ s for "
HELD: Final = r"which runs `let_go.wait\(\)` \(hanging_workers.py:\d+ in hold_"

HANGS: Final[dict[Program, tuple[Options, str]]] = {
    hanging.an_end_to_which_one_does_not_come: (
        OPTIONS,
        r"wave \d+ of the end, to which cache has not come: cache task `\S+`, which ",
    ),
    hanging.an_end_with_a_call_in_flight: (
        OPTIONS,
        r".*calls in flight.*, which waits for Event `never`",
    ),
    hanging.a_turn_on_a_device: (
        EXCLUSIVE,
        (
            rf"ps `use_device`, which waits for the device lock held by ps thread "
            rf"`holder`, {HELD}device"
        ),
    ),
    hanging.a_thread_that_another_call_has: (
        EXCLUSIVE,
        (
            rf"ps `use_device`, which waits for a thread of its pool: thread "
            rf"`asyncrpc-ps-\d+`, {HELD}pool"
        ),
    ),
    hanging.a_large_request_that_waits_for_room: (
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
