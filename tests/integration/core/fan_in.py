"""Many callers of one worker: what runs in their processes, and in its own.

A *crowd* is several workers in one process, so that a worker can be given many peers
by a few processes.
"""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch

import asyncrpc
from asyncrpc import Worker

MIB: Final = 1 << 20

crowd: list[Worker] = []


@dataclass(frozen=True)
class Memory:
    """Memory of a process, in bytes.

    Attributes:
        rss: resident, shared pages included.
        pss: resident, shared pages divided by how many processes share them.
        peak: the most that was ever resident.
    """

    rss: int
    pss: int
    peak: int


def memory_of(pid: int | str = "self") -> Memory:
    """Return what the kernel says of a process."""
    sizes_bytes: dict[str, int] = {}
    for name in ("smaps_rollup", "status"):
        for line in Path(f"/proc/{pid}/{name}").read_text("utf-8").splitlines():
            words = line.split()
            if words[-1] == "kB":
                sizes_bytes[words[0]] = int(words[1]) << 10
    return Memory(sizes_bytes["Rss:"], sizes_bytes["Pss:"], sizes_bytes["VmHWM:"])


async def settled_memory() -> Memory:
    """Collect garbage, then say how much memory this process has."""
    gc.collect()
    return memory_of()


async def peers() -> list[str]:
    """Return the names of the workers that are connected to this one."""
    return [link.peer.name for link in asyncrpc.current_worker().parts.directory.links]


async def calls_in_hand() -> int:
    """Return how many calls this worker serves, this one not counted."""
    return asyncrpc.current_worker().parts.active - 1


async def threads_of_functions() -> int:
    """Return how many threads this worker has for plain functions."""
    prefix = f"asyncrpc-{asyncrpc.current_worker().name}-"
    return sum(thread.name.startswith(prefix) for thread in threading.enumerate())


async def nothing() -> None:
    """Do nothing, on the loop."""


def nothing_in_thread() -> None:
    """Do nothing, in a thread."""


async def take(value: Any) -> None:
    """Take a value that is worth sending."""


async def gather_crowd(
    size: int, callee: str, addresses: Sequence[str], nbytes: int
) -> None:
    """Start workers here; let each make small calls, and send tensors of `nbytes`."""
    host = asyncrpc.current_worker()
    options = replace(host.options, network=replace(host.options.network, listen=None))
    for number in range(size):
        name = f"{host.name}-{number}"
        worker = Worker(name, rendezvous={name: (), callee: addresses}, options=options)
        crowd.append(await worker.__aenter__())
    for worker in crowd:
        await call_some(worker.peer(callee), nbytes)


async def call_some(peer: asyncrpc.Peer, nbytes: int = MIB) -> None:
    for _ in range(3):
        await asyncio.gather(*(peer.call(nothing) for _ in range(50)))
        await peer.call(take, torch.ones(nbytes // 4))


async def dismiss_crowd() -> None:
    """End the workers of the crowd."""
    await asyncio.gather(*(worker.shutdown() for worker in crowd))
    crowd.clear()


async def call_for(
    to: str, function: Callable[[], Any], outstanding: int, seconds: float
) -> float:
    """Keep so many calls outstanding for so long; return the calls per second."""
    worker = asyncrpc.current_worker()

    def start() -> asyncrpc.CallFuture[Any]:
        return worker.parts.start_call(to, function)

    calls = deque(start() for _ in range(outstanding))
    done = 0
    begun_s = time.perf_counter()
    while time.perf_counter() < begun_s + seconds:
        await calls.popleft()
        calls.append(start())
        done += 1
    rate = done / (time.perf_counter() - begun_s)
    await asyncio.gather(*calls)
    return rate


_gate: list[asyncio.Event] = []


async def close_gate() -> None:
    _gate[:] = [asyncio.Event()]


async def open_gate() -> None:
    _gate[0].set()


def open_gate_here() -> None:
    """As `open_gate`, for a worker of this process, whatever it refuses."""
    _gate[0].set()


async def pass_gate(number: int) -> int:
    """Wait for the gate; return the number."""
    await _gate[0].wait()
    return number


def give_back(number: int) -> int:
    """Return the number, from a thread."""
    return number
