"""Processes that are killed, and those that survive them: load, barriers and an end.

`live` runs in each process; `play` starts them, kills some, and says how it went.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import random
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path
from typing import Any, Final

import torch

import asyncrpc
from asyncrpc import AsyncRpcError, LivenessOptions, Options, Worker

WORLD_SIZE: Final = 4
LOAD_S: Final = 0.4  # before all begin to end
DRAIN_S: Final = 1.0
START_S: Final = 90.0  # for four processes on a busy machine
JOIN_S: Final = 60.0  # only a failure reaches it
ELEMENTS: Final = 1 << 20

Report = dict[str, Any]


@dataclass(frozen=True)
class Point:
    """Who is killed, and when: a function of the seed.

    Attributes:
        seed: of all the rest.
        phase: what all do when the first is killed.
        victims: ranks and after how many seconds of the phase each is killed.
    """

    seed: int
    phase: str
    victims: tuple[tuple[int, float], ...]

    @classmethod
    def of(cls, seed: int) -> Point:
        """Draw a point."""
        rng = random.Random(seed)
        phase = ("load", "barriers", "end")[seed % 3]
        ranks = rng.sample(range(WORLD_SIZE), rng.randint(1, WORLD_SIZE - 1))
        first_s = rng.uniform(0.0, 0.1 if phase == "end" else LOAD_S)
        # At once, or one soon after the other: also while the first loss is told.
        apart_s = rng.choice([0.0, 0.005, 0.1])
        times = (first_s + index * apart_s for index in range(len(ranks)))
        return cls(seed, phase, tuple(zip(ranks, times, strict=True)))

    def __str__(self) -> str:
        return f"seed {self.seed} ({self.phase})"


@dataclass(frozen=True)
class Survivor:
    """How a worker that was not killed ended.

    Attributes:
        exit_code: of its process.
        ended_s: how long its shutdown took.
        gone_s: how long until its process had ended, from the beginning of that.
        late: what its shutdown raised, or nothing.
    """

    rank: int
    exit_code: int | None
    ended_s: float
    gone_s: float
    late: str


def live(
    rank: int, point: Point, folder: str, reports: connection.Connection[Any, Any]
) -> None:
    """Be one worker, until all end."""
    os.environ["TMPDIR"] = folder
    torch.set_num_threads(1)
    asyncrpc.run(_live(rank, point, folder, reports))
    reports.close()


async def _live(
    rank: int, point: Point, folder: str, reports: connection.Connection[Any, Any]
) -> None:
    options = Options(
        drain_timeout_s=DRAIN_S,
        rendezvous_timeout_s=START_S,
        liveness=LivenessOptions(lost_after_s=3600.0),
    )
    where = f"file://{folder}/store"
    worker = Worker(
        f"w{rank}", rank=rank, world_size=WORLD_SIZE, rendezvous=where, options=options
    )
    await worker.__aenter__()
    await worker.barrier(START_S)
    reports.send("ready")
    doing = _barriers(worker) if point.phase == "barriers" else _load(worker, point)
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(doing, LOAD_S)
    start_chains(worker)
    began_s, late = time.monotonic(), ""
    reports.send(began_s)
    try:
        await worker.shutdown(graceful=True, timeout_s=DRAIN_S)
    except TimeoutError as error:
        late = str(error)
    reports.send((time.monotonic() - began_s, late))


async def _barriers(worker: Worker) -> None:
    while True:
        with contextlib.suppress(AsyncRpcError):
            await worker.barrier(0.2)
        await asyncio.sleep(0.001)


async def _load(worker: Worker, point: Point) -> None:
    rng = random.Random(point.seed * WORLD_SIZE + worker.rank)
    kinds = [_small, _large, _reference, _stream]
    async with asyncio.TaskGroup() as tasks:
        for kind in kinds:
            tasks.create_task(_again_and_again(worker, rng, kind))


async def _again_and_again(
    worker: Worker, rng: random.Random, act: Callable[[asyncrpc.Peer], Awaitable[None]]
) -> None:
    while True:
        to = rng.choice([rank for rank in range(WORLD_SIZE) if rank != worker.rank])
        # What is not there fails, and that at once: it is left for others.
        with contextlib.suppress(AsyncRpcError):
            await act(worker.peer(to))
        await asyncio.sleep(0.002)


async def _small(peer: asyncrpc.Peer) -> None:
    assert await peer.call(add, 1, 2) == 3


async def _large(peer: asyncrpc.Peer) -> None:
    assert len(await peer.call(echo, torch.ones(ELEMENTS))) == ELEMENTS


async def _reference(peer: asyncrpc.Peer) -> None:
    rref = peer.remote(torch.ones, 100)
    assert float(await rref.rpc_async().sum()) == 100.0
    assert len(await rref.to_here()) == 100


async def _stream(peer: asyncrpc.Peer) -> None:
    assert [number async for number in peer.stream(count, 20)] == list(range(20))


def start_chains(worker: Worker) -> None:
    """Leave calls in flight that nobody awaits; who is dead is not called."""
    for rank in range(WORLD_SIZE):
        with contextlib.suppress(AsyncRpcError):
            call = worker.parts.start_call(worker.peer(rank).name, hop, (6,))
            call.add_done_callback(_forget)


def _forget(call: asyncio.Future[Any]) -> None:
    if not call.cancelled():
        call.exception()


async def hop(left: int) -> None:
    await asyncio.sleep(0.01)
    if left:
        worker = asyncrpc.current_worker()
        to = (worker.rank + 1) % WORLD_SIZE
        with contextlib.suppress(AsyncRpcError):
            call = worker.parts.start_call(worker.peer(to).name, hop, (left - 1,))
            call.add_done_callback(_forget)


def add(x: int, y: int) -> int:
    return x + y


def echo(value: torch.Tensor) -> torch.Tensor:
    return value


async def count(end: int) -> AsyncIterator[int]:
    for number in range(end):
        yield number


def play(point: Point, folder: Path) -> list[Survivor]:
    """Start the processes, kill as the point says, and wait for those that are left.

    Raises:
        AssertionError: not all of them came up.
    """
    context = multiprocessing.get_context("forkserver")
    processes, heard = [], []
    try:
        for rank in range(WORLD_SIZE):
            reader, writer = context.Pipe(duplex=False)
            process = context.Process(
                target=live, args=(rank, point, str(folder), writer)
            )
            process.start()
            writer.close()
            processes.append(process)
            heard.append(reader)
        for reader in heard:
            assert reader.poll(START_S), "a worker did not come up"
            assert reader.recv() == "ready"
        _kill(point, processes)
        survivors = set(range(WORLD_SIZE)) - {rank for rank, _ in point.victims}
        return [
            _survivor(rank, processes[rank], heard[rank]) for rank in sorted(survivors)
        ]
    finally:
        for process, reader in zip(processes, heard, strict=True):
            process.kill()
            process.join()
            process.close()
            reader.close()


def _kill(point: Point, processes: list[Any]) -> None:
    start_s = time.monotonic() + (LOAD_S if point.phase == "end" else 0.0)
    for rank, after_s in point.victims:
        time.sleep(max(0.0, start_s + after_s - time.monotonic()))
        with contextlib.suppress(ProcessLookupError):  # it has ended just now
            os.kill(processes[rank].pid, signal.SIGKILL)


def _survivor(rank: int, process: Any, heard: Any) -> Survivor:
    process.join(JOIN_S)
    gone_s = time.monotonic()
    reports: list[Any] = []
    with contextlib.suppress(EOFError):
        while heard.poll():
            reports.append(heard.recv())
    began_s = reports[0] if reports else gone_s
    ended_s, late = reports[1] if len(reports) > 1 else (JOIN_S, "it did not end")
    return Survivor(rank, process.exitcode, ended_s, gone_s - began_s, late)
