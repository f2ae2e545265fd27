"""Processes of which one may die: `launch` would stop the others with it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist

import asyncrpc.torch_backend  # noqa: F401  registers the backend

JOIN_S = 60.0


@dataclass(frozen=True)
class Outcome:
    """How a rank ended.

    Attributes:
        value: what its function returned.
        problem: the traceback, if it raised.
        exit_code: of the process; negative is a signal.
    """

    value: Any
    problem: str
    exit_code: int | None


def run_ranks(
    function: Callable[..., Any],
    path: Path,
    *args: Any,
    size: int = 3,
    method: Literal["forkserver", "spawn"] = "forkserver",
) -> list[Outcome]:
    """Run `function(rank, size, url, *args)` in processes; return how each ended.

    The url is that of a file in which they meet.
    """
    context: Any = multiprocessing.get_context(method)
    ranks = []
    for rank in range(size):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(
            target=_run, args=(theirs, function, rank, size, f"file://{path}", *args)
        )
        process.start()
        theirs.close()
        ranks.append((process, ours))
    outcomes = []
    for process, ours in ranks:
        value, problem = None, ""
        try:
            if ours.poll(JOIN_S):
                value, problem = ours.recv()
        except EOFError:
            problem = "it has died"
        ours.close()
        process.join(JOIN_S)
        if process.is_alive():
            process.kill()
            process.join()
            problem = f"it hung; {problem}"
        outcomes.append(Outcome(value, problem, process.exitcode))
        process.close()
    return outcomes


def _run(out: Connection, function: Callable[..., Any], *args: Any) -> None:
    try:
        out.send((function(*args), ""))
    except BaseException:  # noqa: BLE001  the test reads it
        out.send((None, traceback.format_exc()))


def start(rank: int, size: int, url: str, **options: Any) -> None:
    """Make the default process group."""
    dist.init_process_group(
        "asyncrpc", init_method=url, rank=rank, world_size=size, **options
    )


def die() -> None:
    """End this process as a crash would."""
    os.kill(os.getpid(), signal.SIGKILL)
