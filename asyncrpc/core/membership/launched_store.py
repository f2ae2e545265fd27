"""The store of the processes that a launcher has started, for torch's own rendezvous.

It is what `env://` finds, as a URL that torch knows.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Final, NamedTuple
from urllib.parse import parse_qs, urlsplit

from asyncrpc.core import environment
from asyncrpc.core.arguments import wrong
from asyncrpc.core.environment import GivenPlace
from asyncrpc.core.environment.values import Field
from asyncrpc.core.host.this_host import LAUNCHER_PID

_OF_TORCH: Final = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class LaunchedStore(NamedTuple):
    """Where a torch store is, and the place of the process that asks for it.

    Attributes:
        url: `tcp://host:port`.
        rank: of this process.
        world_size: number of processes.
        restart: how often the launcher has started the processes before.
    """

    url: str
    rank: int
    world_size: int
    restart: int


def given_in(
    url: str, rank: int | None = None, world_size: int | None = None
) -> GivenPlace:
    """Return the place that a program gives: in code, else in the query of a URL."""
    query = parse_qs(urlsplit(url).query)
    return GivenPlace(
        _number_in(query, "rank") if rank is None else rank,
        _number_in(query, "world_size") if world_size is None else world_size,
    )


def _number_in(query: Mapping[str, list[str]], name: str) -> int | None:
    if name not in query:
        return None
    try:
        return int(query[name][0])
    except ValueError:
        raise wrong(name, "a number", query[name][0]) from None


def find_store(
    rank: int | None = None,
    world_size: int | None = None,
    *,
    environ: Mapping[str, str] = os.environ,
) -> LaunchedStore:
    """Find the store of the processes that a launcher has started.

    Args:
        rank: as the program gives it; None leaves it to the launcher.
        world_size: number of processes; None leaves it to the launcher.
    """
    stated_place = GivenPlace(rank, world_size)
    placement = environment.resolve(environ, stated_place, launcher_pid=LAUNCHER_PID)
    rank = placement.require_number(Field.RANK, "RANK")
    world_size = placement.require_number(Field.WORLD_SIZE, "WORLD_SIZE")
    host, port = placement.require_address()
    shown = f"[{host}]" if ":" in host else host
    return LaunchedStore(f"tcp://{shown}:{port}", rank, world_size, placement.restart)


def has_all_of_torch(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether torch itself finds all that it needs for `env://`."""
    return all(environ.get(name) for name in _OF_TORCH)
