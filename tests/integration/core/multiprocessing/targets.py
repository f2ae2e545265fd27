"""What the tests of this folder run in other processes."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import asyncrpc
from asyncrpc.multiprocessing import Queue, launch

FOREVER_S = 60.0  # longer than any test may take


def square(rank: int, power: int = 2) -> int:
    return int(rank**power)


async def square_async(rank: int) -> int:
    await asyncio.sleep(0)
    return rank * rank


def launches_squares(method: Any) -> list[int]:
    """Start two more processes, from a process of a pool."""
    return launch(square, (2,), nprocs=2, method=method)


def environment(rank: int) -> dict[str, str]:
    return dict(os.environ)


def frozen_count(rank: int) -> int:
    return gc.get_freeze_count()


def thread_count(rank: int) -> int:
    return torch.get_num_threads()


def add_to(rank: int, shared: torch.Tensor) -> torch.Tensor:
    shared[rank] += rank + 1
    return shared.clone()


def meet(rank: int) -> int:
    """Return the sum of all ranks, by torch's own process group."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=10))
    total = torch.tensor([float(rank)])
    dist.all_reduce(total)
    dist.destroy_process_group()
    return int(total.item())


def take(rank: int, queue: Queue[int]) -> int:
    return queue.get()


def wait_forever(rank: int) -> None:
    time.sleep(FOREVER_S)


def fail_at(rank: int, failing: int) -> None:
    if rank == failing:
        raise ValueError(f"no luck at {rank}")
    wait_forever(rank)


class UnpicklableError(RuntimeError):
    def __init__(self, *, keyword: str) -> None:
        super().__init__(keyword)


def raise_unpicklable(rank: int) -> None:
    raise UnpicklableError(keyword="kept as text")


def return_unpicklable(rank: int) -> object:
    return lambda: None


def die_of(rank: int, signum: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signum)
    wait_forever(rank)


def exit_with(rank: int, code: int) -> None:
    sys.exit(code)


def exit_hard(rank: int, code: int) -> None:
    os._exit(code)


def follow_the_dead(rank: int) -> None:
    """Rank 0 is killed; rank 1 notices first and complains."""
    store = dist.TCPStore(  # type: ignore[attr-defined]
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False
    )
    if rank == 0:
        store.set("pid", str(os.getpid()))
        wait_forever(rank)
    os.kill(int(store.get("pid")), signal.SIGKILL)
    raise ConnectionError("lost rank 0")


def clean_up(rank: int, folder: str) -> None:
    """Rank 1 fails once rank 0 waits; rank 0 leaves a file in its `finally`."""
    meeting = Path(folder, "meeting")  # a pipe, whose ends are opened together
    if rank == 1:
        meeting.read_bytes()
        raise ValueError("stop")
    try:
        meeting.write_bytes(b"")
        wait_forever(rank)
    finally:
        Path(folder, "cleaned").touch()


def ignore_sigterm(rank: int, folder: str) -> None:
    """Rank 1 fails once rank 0 cannot be asked to end any more."""
    meeting = Path(folder, "meeting")
    if rank == 1:
        meeting.read_bytes()
        raise ValueError("stop")
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    meeting.write_bytes(b"")
    wait_forever(rank)


def tell_pid_and_wait(rank: int) -> None:
    sys.stdout.write(f"{os.getpid()}\n")
    sys.stdout.flush()
    wait_forever(rank)


async def tell_pid_and_serve(rank: int) -> None:
    """As `tell_pid_and_wait`, on an event loop."""
    del rank
    sys.stdout.write(f"{os.getpid()}\n")
    sys.stdout.flush()
    await asyncio.Event().wait()


async def addresses(rank: int, secret: str | None) -> tuple[str, ...]:
    """Return where a worker with these options listens."""
    options = asyncrpc.Options(secret=secret)
    async with asyncrpc.Worker(
        f"w{rank}", rendezvous="env://", options=options
    ) as worker:
        await worker.barrier()
        return worker.addresses


def tell_pid_and_hold_the_gil(rank: int) -> None:
    """Sleep in C, where no thread and no signal handler of Python can act."""
    del rank
    sys.stdout.write(f"{os.getpid()}\n")
    sys.stdout.flush()
    ctypes.PyDLL(None).sleep(int(FOREVER_S))
