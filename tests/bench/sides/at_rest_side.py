"""What `bench_at_rest` runs in the worker that it measures, and where its peers are."""

from __future__ import annotations

import asyncio
import gc
import os
import resource
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Final

import asyncrpc
from asyncrpc import Worker
from tests.integration.core import fan_in

CALLEE: Final = "b"
SETTLED_S: Final = 3.0  # polling, acknowledging and giving memory back have ended
ENDING: Final = 16  # workers of one process that end at once

crowd: list[Worker] = []


@dataclass(frozen=True)
class Usage:
    """What a process has used so far."""

    wall_s: float  # the time
    cpu_s: float  # processor time
    wake_ups: int  # how often it had waited
    reads: int  # messages, or several together, that it read from its peers


@dataclass(frozen=True)
class Held:
    """What a process holds."""

    private_kib: int  # memory that no other process has
    descriptors: int  # open ones
    links: int  # connections to peers


async def usage() -> Usage:
    """Return what this process has used."""
    links = asyncrpc.current_worker().parts.directory.links
    used = resource.getrusage(resource.RUSAGE_SELF)
    return Usage(
        time.perf_counter(),
        used.ru_utime + used.ru_stime,
        used.ru_nvcsw,
        sum(link.connection.reads for link in links),
    )


async def rest(seconds: float) -> tuple[Usage, Usage]:
    """Do nothing for so long; return what was used until then, and until now."""
    gc.collect()
    before = await usage()
    await asyncio.sleep(seconds)  # measured, not awaited
    return before, await usage()


async def held() -> Held:
    """Return what this process holds, garbage collected."""
    gc.collect()
    links = asyncrpc.current_worker().parts.directory.links
    descriptors = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    return Held(_private_kib(), descriptors, len(tuple(links)))


def _private_kib() -> int:
    lines = Path("/proc/self/smaps_rollup").read_text("utf-8").splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_"))


# --- peers ---------------------------------------------------------------------------


async def call_here(nbytes: int) -> None:
    """Let the worker of this process call the measured one, and send it tensors."""
    peer = asyncrpc.current_worker().peer(CALLEE)
    await (fan_in.call_some(peer, nbytes) if nbytes else peer.call(fan_in.nothing))


async def gather_crowd(size: int, addresses: Sequence[str], nbytes: int) -> None:
    """Have so many workers here, each with a connection to the measured one."""
    host = asyncrpc.current_worker()
    options = replace(host.options, network=replace(host.options.network, listen=None))
    for number in range(len(crowd), size):
        name = f"{host.name}-{number}"
        meeting = {name: (), CALLEE: addresses}
        worker = Worker(name, rendezvous=meeting, options=options)
        crowd.append(await worker.__aenter__())
        peer = worker.peer(CALLEE)
        await (fan_in.call_some(peer, nbytes) if nbytes else peer.call(fan_in.nothing))


async def dismiss_crowd() -> None:
    """End the workers here, some at a time: each has its time."""
    left = iter(crowd)
    while some := list(islice(left, ENDING)):
        await asyncio.gather(*(worker.shutdown() for worker in some))
    crowd.clear()


@dataclass(frozen=True)
class Rate:
    """What calls took."""

    per_second: float  # calls
    callee_us: float  # processor time of the callee for each
    caller_us: float  # processor time of the callers' process for each


async def keep_calling(active: int, outstanding: int, seconds: float) -> Rate:
    """Let some workers of the crowd keep so many calls outstanding, all together."""
    done, is_over = 0, False

    async def call_on(worker: Worker) -> None:
        nonlocal done
        start = worker.parts.start_call
        while not is_over:
            await start(CALLEE, fan_in.nothing)
            done += 1

    tasks = [
        asyncio.create_task(call_on(crowd[number % active]))
        for number in range(outstanding)
    ]
    callee = asyncrpc.current_worker().peer(CALLEE)
    there, here, count = await callee.call(usage), await usage(), done
    await asyncio.sleep(seconds)
    count = done - count
    here_after, there_after = await usage(), await callee.call(usage)
    is_over = True
    await asyncio.gather(*tasks)
    return Rate(
        count / (here_after.wall_s - here.wall_s),
        1e6 * (there_after.cpu_s - there.cpu_s) / count,
        1e6 * (here_after.cpu_s - here.cpu_s) / count,
    )
