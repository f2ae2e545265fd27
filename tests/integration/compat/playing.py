"""Scenarios that worker0 plays while the others serve it, in processes of their own."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from asyncrpc.compat import rpc
from asyncrpc.multiprocessing import launch


def take_part(rank: int, scenario: Callable[..., None], *args: Any) -> None:
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=int(os.environ["WORLD_SIZE"]))
    try:
        if rank == 0:
            scenario(*args)
    finally:
        rpc.shutdown()


def play(scenario: Callable[..., None], *args: Any, nprocs: int = 2) -> None:
    """Run a scenario; what it raises is raised here."""
    launch(take_part, (scenario, *args), nprocs, method="forkserver")
