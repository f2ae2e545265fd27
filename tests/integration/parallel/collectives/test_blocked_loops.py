"""Who has all it waits for goes on, though the others compute on their event loops.

A training step often runs on the loop.  So what another rank sleeps for must have left
when a collective returns: the loop may not turn again before the step has ended.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Final

import pytest
import torch

from asyncrpc import Group, Worker
from asyncrpc.multiprocessing import launch
from asyncrpc.parallel.collectives import shared

LIMIT_S: Final = 60.0  # that only a failure reaches
TURNS: Final = 3


def wait_blocking(path: Path) -> None:
    """Wait for a file, as a step does that computes: the loop stands still."""
    end_s = time.monotonic() + LIMIT_S
    while not path.exists():
        if time.monotonic() > end_s:
            raise TimeoutError(f"{path.name}: the other rank still waits")
        time.sleep(0.001)


async def meet(group: Group) -> None:
    await group.barrier()


async def reduce(group: Group) -> None:
    assert (await group.all_reduce(torch.ones(4))).tolist() == [2.0] * 4


async def reduce_more(group: Group) -> None:
    await group.all_reduce(torch.ones(1 << 20))


async def meet_all(group: Group) -> None:
    await group.worker.barrier()


async def take_turns(
    rank: int, step: Callable[[Group], Coroutine[Any, Any, None]], where: Path
) -> None:
    """Be first or last in turn; who is last holds its loop until the first is out."""
    shared._POLL_S = 2 * LIMIT_S  # type: ignore[misc]  # noqa: SLF001  no way out by looking again
    async with (
        Worker(f"w{rank}", rendezvous="env://") as worker,
        Group(worker) as group,
    ):
        await step(group)
        for turn in range(TURNS):
            out = where / f"{turn} is out"
            if turn % 2 == rank:
                await step(group)
                out.touch()
            else:
                await asyncio.sleep(0.3)  # the other one falls asleep meanwhile
                await step(group)
                wait_blocking(out)


@pytest.mark.parametrize("step", [meet, reduce, reduce_more, meet_all])
def test_collective_does_not_wait_for_a_busy_loop(
    step: Callable[[Group], Coroutine[Any, Any, None]], tmp_path: Path
) -> None:
    launch(take_turns, (step, tmp_path), nprocs=2, method="forkserver")
