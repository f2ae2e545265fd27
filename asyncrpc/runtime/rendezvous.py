"""How workers find each other: a torch store, a list, or a dictionary in one process.

Each worker publishes one record: its name, rank, incarnation and addresses.  The last
one to arrive says so, the others wait for that word and read the records once;
connections are made later, on demand.  After that the meeting place is not needed;
whoever hosts a store waits until everyone has read.  If some do not come in time, the
first to notice says who; all fail alike.

Source: `env://` is the contract of torchrun (torch.distributed.run).
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, urlsplit

from asyncrpc.errors import UsageError
from asyncrpc.runtime.members import (
    UNKNOWN_INCARNATION,
    Member,
    Rendezvous,
    missing_error,
)
from asyncrpc.runtime.stores import StoreRendezvous, file_opener, tcp_opener

__all__ = [
    "UNKNOWN_INCARNATION",
    "LocalRendezvous",
    "Member",
    "Rendezvous",
    "StaticRendezvous",
    "open_rendezvous",
]


@dataclass(slots=True)
class StaticRendezvous:
    """A list that every worker is given: names and where they listen."""

    addresses: Mapping[str, str | Sequence[str]]

    async def join(self, member: Member, timeout_s: float) -> Sequence[Member]:
        """Return the list; whether anybody is there shows when he is called."""
        if member.name not in self.addresses:
            raise UsageError(
                f"worker {member.name!r} is not in the static list; it has: "
                + ", ".join(repr(name) for name in self.addresses)
            )
        return [
            Member(
                name,
                rank,
                UNKNOWN_INCARNATION,
                (where,) if isinstance(where, str) else tuple(where),
            )
            for rank, (name, where) in enumerate(self.addresses.items())
        ]

    async def leave(self, timeout_s: float) -> None:
        """Nothing is held."""


@dataclass(slots=True)
class LocalRendezvous:
    """A meeting place inside one process; all workers are given the same object."""

    world_size: int
    _members: dict[str, Member] = field(default_factory=dict)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def join(self, member: Member, timeout_s: float) -> Sequence[Member]:
        """Publish the record in a dictionary, and wait for the others.

        Raises:
            RendezvousTimeoutError: some are missing; it names their ranks.
            UsageError: the name or the rank is taken.

        Cancellation:
            The record stays published.
        """
        _refuse_taken(member, self._members.values())
        self._members[member.name] = member
        self._changed.set()
        try:
            async with asyncio.timeout(timeout_s):
                while len(self._members) < self.world_size:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            present = {one.rank for one in self._members.values()}
            missing = sorted(set(range(self.world_size)) - present)
            raise missing_error(missing, self.world_size, timeout_s) from None
        return list(self._members.values())

    async def leave(self, timeout_s: float) -> None:
        """Do nothing: nothing is held.

        Raises:
            Nothing.

        Cancellation:
            There is nothing to undo.
        """


def _refuse_taken(member: Member, others: Any) -> None:
    for other in others:
        if other.name == member.name:
            raise UsageError(
                f"the name {member.name!r} is not unique: another worker of this group "
                "has it"
            )
        if other.rank == member.rank >= 0:
            raise UsageError(f"two workers of this group have rank {member.rank}")


def open_rendezvous(
    where: str | Mapping[str, str | Sequence[str]] | Rendezvous,
    *,
    rank: int | None,
    world_size: int | None,
    environ: Mapping[str, str] = os.environ,
) -> tuple[Rendezvous, int, int]:
    """Make the rendezvous that `where` describes.

    Args:
        where: `env://`, `tcp://host:port`, `file:///path`, a mapping from worker names
            to addresses, or a rendezvous.
        rank: of this worker; None takes it from the environment or the URL.
        world_size: likewise.
        environ: read by `env://`.

    Returns:
        The rendezvous, the rank and the world size.

    Raises:
        UsageError: something is missing; the message says what and where to give it.
    """
    if isinstance(where, Mapping):
        return StaticRendezvous(where), -1 if rank is None else rank, len(where)
    if not isinstance(where, str):
        size: int = world_size or getattr(where, "world_size", 0) or 0
        return where, -1 if rank is None else rank, size
    url = urlsplit(where)
    query = {key: values[0] for key, values in parse_qs(url.query).items()}
    is_env = url.scheme == "env"
    rank = _number("rank", rank, query, environ if is_env else {}, "RANK")
    world_size = _number(
        "world_size", world_size, query, environ if is_env else {}, "WORLD_SIZE"
    )
    if not 0 <= rank < world_size:
        raise UsageError(f"rank {rank} is not in a world of {world_size} workers")
    if url.scheme == "file":
        if not url.path:
            raise UsageError(f"{where!r} names no file; use file:///path")
        opener = file_opener(url.path)
        return StoreRendezvous(opener, rank, world_size), rank, world_size
    host, port, is_master = _store_address(where, rank, environ)
    found = StoreRendezvous(
        tcp_opener(host, port, is_master=is_master),
        rank,
        world_size,
        address=None if is_master else (host, port),
    )
    return found, rank, world_size


def _number(
    what: str,
    given: int | None,
    query: Mapping[str, str],
    environ: Mapping[str, str],
    variable: str,
) -> int:
    if given is not None:
        return given
    text = query.get(what, environ.get(variable))
    if text is None:
        raise UsageError(
            f"{what} is missing: pass {what}=..., or set {variable} and use env:// "
            "(torchrun and `asyncrpc run` do)"
        )
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"{what} is no number: {text!r}") from None


def _store_address(
    where: str, rank: int, environ: Mapping[str, str]
) -> tuple[str, int, bool]:
    """Return host and port of a store, and whether this worker is to host it."""
    url = urlsplit(where)
    if url.scheme == "env":
        host, port = environ.get("MASTER_ADDR"), environ.get("MASTER_PORT")
        if not host or not port:
            raise UsageError(
                "env:// needs MASTER_ADDR and MASTER_PORT; torchrun and `asyncrpc run` "
                "set them"
            )
        hosted = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        return host, int(port), rank == 0 and not hosted
    if url.scheme == "tcp" and url.hostname and url.port:
        return url.hostname, url.port, rank == 0
    raise UsageError(
        f"{where!r} is no rendezvous; use env://, tcp://host:port, file:///path, or a "
        "mapping from names to addresses"
    )
