"""Where torch's own rendezvous goes: what `env://` finds, as a URL that torch knows."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Final, NamedTuple

from asyncrpc.environment import GivenPlace, resolve
from asyncrpc.environment.values import Field
from asyncrpc.runtime.host import LAUNCHER_PID

_OF_TORCH: Final = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class LaunchedStore(NamedTuple):
    """Where a torch store is, and who asks for it.

    Attributes:
        url: `tcp://host:port`.
        rank: of this process.
        world_size: number of processes.
        restart: how often the launcher has started them before.
    """

    url: str
    rank: int
    world_size: int
    restart: int


def find_store(
    rank: int | None = None,
    world_size: int | None = None,
    *,
    environ: Mapping[str, str] = os.environ,
) -> LaunchedStore:
    """Find the store of the processes that a launcher has started.

    Args:
        rank: as the program gives it; None leaves it to the launcher.
        world_size: likewise.
        environ: the variables.

    Raises:
        UsageError: something is missing, or two launchers disagree.
    """
    given = GivenPlace(rank, world_size)
    found = resolve(environ, given, launcher_pid=LAUNCHER_PID)
    rank = found.require_number(Field.RANK, "RANK")
    world_size = found.require_number(Field.WORLD_SIZE, "WORLD_SIZE")
    host, port = found.require_address()
    shown = f"[{host}]" if ":" in host else host
    return LaunchedStore(f"tcp://{shown}:{port}", rank, world_size, found.restart)


def has_all_of_torch(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether torch itself finds all that it needs for `env://`."""
    return all(environ.get(name) for name in _OF_TORCH)
