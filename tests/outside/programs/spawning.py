"""Ranks of a program, one process each, that meet at a free port of this host."""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
from collections.abc import Callable

import torch


def free_port() -> int:
    """Return a port of this host that nothing listens at."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def show(*values: object) -> None:
    """Print a result, in one write: other ranks print, too."""
    sys.stdout.write(f"result: {' '.join(map(str, values))}\n")
    sys.stdout.flush()


def run_ranks(rank_main: Callable[[int], None], world_size: int) -> None:
    """Run `rank_main(rank)` in processes with torchrun's variables.

    They are set before the process starts: some libraries read them when imported.
    """
    context = multiprocessing.get_context("spawn")
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    processes = []
    for rank in range(world_size):
        sizes = {"WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
        ranks = {"RANK": rank, "LOCAL_RANK": rank}
        os.environ |= {name: str(value) for name, value in (sizes | ranks).items()}
        process = context.Process(target=_rank, args=(rank, rank_main))
        process.start()
        processes.append(process)
    for process in processes:
        process.join()
    if any(process.exitcode for process in processes):
        raise SystemExit(
            f"ranks ended with {[process.exitcode for process in processes]}"
        )


def _rank(rank: int, rank_main: Callable[[int], None]) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    rank_main(rank)
