"""One of many processes that join, call each other and end; of asyncrpc or of torch.

What `bench_members` starts.
"""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import torch
from torch.distributed import rpc

import asyncrpc

LIMIT_S: Final = 1200.0


@dataclass
class Life:
    wall_s: dict[str, float] = field(default_factory=dict)  # of each stage
    # Processor time of each stage.
    cpu_s: dict[str, float] = field(default_factory=dict)
    # Kinds of memory, in bytes, when all calls were made.
    memory: dict[str, int] = field(default_factory=dict)
    descriptors: int = 0  # that were open then
    threads: int = 0  # that ran then
    failed: str = ""  # why it ended early, in words

    def begin(self) -> None:
        self._begun = time.perf_counter(), time.process_time()

    def end(self, stage: str) -> None:
        """End a stage, and begin the next one."""
        self.wall_s[stage] = time.perf_counter() - self._begun[0]
        self.cpu_s[stage] = time.process_time() - self._begun[1]
        self.begin()

    def look(self) -> None:
        """Look at what the process has."""
        for line in Path("/proc/self/smaps_rollup").read_text("utf-8").splitlines()[1:]:
            name, number = line.split()[:2]
            self.memory[name.rstrip(":")] = int(number) << 10
        self.descriptors = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
        self.threads = len(os.listdir("/proc/self/task"))  # noqa: PTH208


def nothing() -> None:
    """Do nothing, in a thread here as in torch."""


async def nothing_on_loop() -> None:
    """Do nothing, on the loop."""


# --- asyncrpc ------------------------------------------------------------------------


async def live(rank: int, size: int) -> Life:
    """Be one of `size` workers."""
    life = Life()
    # A hundred processes of two cores wait long for each other.
    options = asyncrpc.Options(
        rendezvous_timeout_s=LIMIT_S,
        drain_timeout_s=LIMIT_S,
        liveness=asyncrpc.LivenessOptions(heartbeat_s=60.0, lost_after_s=LIMIT_S),
    )
    life.begin()
    worker = asyncrpc.Worker(f"w{rank}", options=options)
    async with worker:
        life.end("join")
        others = [f"w{other}" for other in range(size) if other != rank]
        for stage in ("calls", "calls again"):
            await worker.barrier()
            life.begin()
            await asyncio.gather(
                *(worker.peer(other).call(nothing_on_loop) for other in others)
            )
            life.end(stage)
        await worker.barrier()
        life.begin()
        await worker.barrier()
        life.end("barrier")
        life.look()
        await worker.barrier()
        life.begin()
    life.end("end")
    return life


# --- torch ---------------------------------------------------------------------------


def _wait_for_all() -> None:
    rpc.api._all_gather(None)  # noqa: SLF001  (torch has no public barrier of workers)


def live_in_torch(rank: int, size: int) -> Life:
    """Do the same with torch.distributed.rpc."""
    life = Life()
    options = rpc.TensorPipeRpcBackendOptions(rpc_timeout=LIMIT_S, init_method="env://")
    life.begin()
    rpc.init_rpc(  # type: ignore[no-untyped-call]  # torch's
        f"w{rank}", rank=rank, world_size=size, rpc_backend_options=options
    )
    life.end("join")
    others = [f"w{other}" for other in range(size) if other != rank]
    for stage in ("calls", "calls again"):
        _wait_for_all()
        life.begin()
        torch.futures.wait_all([rpc.rpc_async(other, nothing) for other in others])
        life.end(stage)
    _wait_for_all()
    life.begin()
    _wait_for_all()
    life.end("barrier")
    life.look()
    _wait_for_all()
    life.begin()
    rpc.shutdown()
    life.end("end")
    return life
