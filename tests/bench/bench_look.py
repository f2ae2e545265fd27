"""How long does it take to look at a large group, and what does that cost the group?

    $ make bench ONLY=look
    $ python -m tests.bench.bench_look --processes 16 --workers 4 --rounds 10

So many processes have so many workers each, which are connected by Unix sockets.  Every
worker serves a call of its neighbour that waits for an event, so that there is a way to
find for each.  An observer connects to one of them and looks at all, as `asyncrpc why`
does: *thorough*, or as `asyncrpc status` does.  Processor time is that of the observer
alone, and of the workers together.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import multiprocessing
import os
import resource
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, Final

import asyncrpc
from asyncrpc import NetworkOptions, Options, Worker
from asyncrpc.core.loop.clock import now_s
from asyncrpc.tools.inspection.group import GroupView, view_of
from asyncrpc.tools.inspection.machine.graph import find_hangs
from asyncrpc.tools.inspection.observer import Observer

AFTER_S: Final = 1.0
READY_S: Final = 300.0
SECRET: Final = "a secret of this benchmark"


def options_at(folder: str, rank: int) -> Options:
    """Return the options of a worker, which listens at a socket of its own."""
    network = NetworkOptions(listen=(f"uds://{folder}/w{rank}",))
    return Options(secret=SECRET, network=network, rendezvous_timeout_s=READY_S)


async def wait() -> None:
    """Wait as long as the worker lives."""
    never = asyncio.Event()
    await never.wait()


async def live(folder: str, ranks: Sequence[int], world_size: int, up: Any) -> None:
    """Be some of the workers until this process is killed."""
    async with contextlib.AsyncExitStack() as stack:
        workers = [
            Worker(
                f"w{rank}",
                rank=rank,
                world_size=world_size,
                rendezvous=f"file://{folder}/store",
                options=options_at(folder, rank),
            )
            for rank in ranks
        ]
        await asyncio.gather(*map(stack.enter_async_context, workers))
        calls = [
            asyncio.ensure_future(
                worker.peer((worker.rank + 1) % world_size).call(wait)
            )
            for worker in workers
        ]
        up.release()
        await asyncio.gather(*calls)


def run_process(folder: str, ranks: Sequence[int], world_size: int, up: Any) -> None:
    asyncrpc.run(live(folder, ranks, world_size, up))


async def look_at(folder: str, *, is_thorough: bool) -> tuple[GroupView, float, int]:
    """Look once; return what was seen, how long it took, and how many findings."""
    begun_s = now_s()
    async with Observer(options_at(folder, 0)) as observer:
        view = await view_of(observer, f"uds://{folder}/w0", is_thorough=is_thorough)
    hangs = find_hangs(view.graph, after_s=AFTER_S)
    return view, now_s() - begun_s, len(hangs)


def used_s(pid: int) -> float:
    """Return the processor time that a process has used, in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def measure(folder: str, pids: Sequence[int], size: int, rounds: int) -> None:
    """Look again and again; print what it took."""
    print(
        f"{'':>10} {'median, s':>10} {'least - most':>14} {'observer, s':>12} "
        f"{'workers, s':>11} {'seen':>5} {'findings':>9}"
    )
    for is_thorough in (True, False):
        took, seen, hang_count = list[float](), 0, 0
        begun = resource.getrusage(resource.RUSAGE_SELF)
        there = sum(map(used_s, pids))
        for _ in range(rounds):
            view, one_s, hang_count = await look_at(folder, is_thorough=is_thorough)
            took.append(one_s)
            seen = len(view.snapshots)
        ended = resource.getrusage(resource.RUSAGE_SELF)
        own_s = ended.ru_utime + ended.ru_stime - begun.ru_utime - begun.ru_stime
        there = sum(map(used_s, pids)) - there
        print(
            f"{'thorough' if is_thorough else 'status':>10} {median(took):>10.2f} "
            f"{f'{min(took):.2f} - {max(took):.2f}':>14} {own_s / rounds:>12.2f} "
            f"{there / rounds:>11.2f} {seen:>2}/{size} {hang_count:>9}"
        )


def main() -> None:
    """Start the workers, and look."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, default=16)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()
    size = options.processes * options.workers
    forking = multiprocessing.get_context("forkserver")
    # Not this module: each process runs it anew, as its main module, and Python warns
    # of one that is there already.
    forking.set_forkserver_preload(["asyncrpc.tools.inspection.observer"])
    up = forking.Semaphore(0)
    with tempfile.TemporaryDirectory(prefix="asyncrpc-") as folder:
        processes = [
            forking.Process(
                target=run_process,
                args=(folder, range(first, size, options.processes), size, up),
                daemon=True,
            )
            for first in range(options.processes)
        ]
        for process in processes:
            process.start()
        for _ in processes:
            assert up.acquire(timeout=READY_S)
        pids = [process.pid or 0 for process in processes]
        print(f"{size} workers in {options.processes} processes")
        asyncrpc.run(measure(folder, pids, size, options.rounds))
        for process in processes:
            process.kill()
        for process in processes:
            process.join()


if __name__ == "__main__":
    main()
