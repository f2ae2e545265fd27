"""How workers find each other: a torch store, a list, one member, or a dictionary.

Each worker publishes one record: its name, rank, incarnation and addresses.  The last
one to arrive says so, the others wait for that message and read the records once;
connections are made later, on demand.  After that the meeting place is not needed any
more; the host of a store waits until all have read it.  If some do not come in time,
the first worker to notice tells which; all fail alike.

A worker that comes later, or again under its name, is admitted by any member: it is
given the address of one (`JoinRendezvous`), or finds them all at the store.

What `env://` finds, under each launcher, is decided in `asyncrpc.core.environment`.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import urlsplit

from asyncrpc.core import environment
from asyncrpc.core.arguments import check_count, check_texts, wrong
from asyncrpc.core.devices import pjrt
from asyncrpc.core.environment import GivenPlace, LaunchPlacement
from asyncrpc.core.environment.values import Field
from asyncrpc.core.host.this_host import LAUNCHER_PID
from asyncrpc.core.loop.waits import waits
from asyncrpc.core.members import (
    UNKNOWN_INCARNATION,
    Member,
    Rendezvous,
    RunningGroup,
    missing_error,
    wait_at_start,
)
from asyncrpc.core.membership.launched_store import given_in
from asyncrpc.core.membership.store_places import GivenStore, Hosting, TcpPlace
from asyncrpc.core.membership.stores import StoreRendezvous
from asyncrpc.core.transport.address import Address
from asyncrpc.core.transport.meeting import MeetingAddress
from asyncrpc.errors import UsageError

__all__ = [
    "UNKNOWN_INCARNATION",
    "JoinRendezvous",
    "LocalRendezvous",
    "Member",
    "Rendezvous",
    "RunningGroup",
    "StaticRendezvous",
    "open_rendezvous",
]

JOIN: Final = "join://"
_SCHEMES: Final = frozenset({"env", "tcp", "file"})  # of rendezvous with ranks


@dataclass(slots=True)
class StaticRendezvous:
    """A list that every worker is given: names, and the addresses where they listen."""

    addresses: Mapping[str, str | Sequence[str]]

    async def join(self, member: Member, timeout_s: float) -> Sequence[Member]:
        """Return the list; only a call shows whether a worker is there."""
        if member.name not in self.addresses:
            raise UsageError(
                f"worker {member.name!r} is not in the static list; it has: "
                + ", ".join(repr(name) for name in self.addresses)
            )
        members = []
        for rank, (name, where) in enumerate(self.addresses.items()):
            places = (where,) if isinstance(where, str) else tuple(where)
            for place in places:
                Address.parse(place, f"an address of {name!r}")
            members.append(Member(name, rank, UNKNOWN_INCARNATION, places))
        return members

    async def leave(self, timeout_s: float) -> None:
        """Do nothing: nothing is held."""


@dataclass(frozen=True, slots=True)
class JoinRendezvous:
    """Workers of a running group: any of them admits the new one.

    The new worker proves the secret, as in any connection, and gets the list of
    members; the others are told of it.  Nothing else is needed: no store, no rank 0.

    Attributes:
        addresses: of some members, tried in turn, such as `tcp://10.0.0.2:7000`.

    Example:
        >>> where = asyncrpc.JoinRendezvous(["tcp://10.0.0.2:7000"])
        >>> async with asyncrpc.Worker("late", rendezvous=where) as worker:
        ...     print(worker.known_members)
    """

    addresses: Sequence[str]

    def __post_init__(self) -> None:
        """Refuse values that are not addresses.

        Raises:
            UsageError: `addresses` is empty, or an item is not an address.
        """
        check_texts("addresses", self.addresses, at_least=1)
        for address in self.addresses:
            Address.parse(address, "each of addresses")

    async def join(self, member: Member, timeout_s: float) -> Sequence[Member]:
        """Internal: return the members to ask, known by their addresses only.

        Raises:
            Nothing.

        Cancellation:
            It never waits.
        """
        return RunningGroup(
            Member("", -1, UNKNOWN_INCARNATION, (address,))
            for address in self.addresses
        )

    async def leave(self, timeout_s: float) -> None:
        """Internal: do nothing: nothing is held.

        Raises:
            Nothing.

        Cancellation:
            It never waits.
        """


def gateway_from(rendezvous: Rendezvous) -> tuple[Address, ...]:
    """Return the addresses of the member through which a guest joins."""
    if not isinstance(rendezvous, JoinRendezvous):
        raise UsageError(
            "a token is for joining from outside: give the address of the member that "
            'issued it, rendezvous="join://host:port"'
        )
    return tuple(map(Address.parse, rendezvous.addresses))


def _join_addresses(text: str) -> list[str]:
    """Read what follows `join://`: hosts and ports, paths, or whole addresses."""
    addresses = [address.strip() for address in text[len(JOIN) :].split(",")]
    if not any(addresses):
        raise wrong("rendezvous", "join://host:port of a running worker", text)
    return [
        address
        if "://" in address
        else f"uds://{address}"
        if address[:1] == "/"
        else f"tcp://{address}"
        for address in addresses
        if address
    ]


@dataclass(slots=True)
class LocalRendezvous:
    """A meeting place inside one process; all workers get the same object.

    Once all have come, later workers join the running group.
    """

    world_size: int
    _members: dict[str, Member] = field(default_factory=dict, init=False)
    _changed: asyncio.Event = field(default_factory=asyncio.Event, init=False)

    def __post_init__(self) -> None:
        """Refuse a world size that is not valid.

        Raises:
            UsageError: `world_size` is not an integer of at least 1.
        """
        check_count("world_size", self.world_size, at_least=1)

    @waits(lambda at: wait_at_start(at["self"].missing, at["self"].world_size))
    async def join(self, member: Member, timeout_s: float) -> Sequence[Member]:
        """Internal: publish the record in a dictionary, and wait for the others.

        If they were all there before, return a `RunningGroup`.

        Raises:
            RendezvousTimeoutError: some workers are missing; the error names their
                ranks.
            UsageError: the name or the rank is taken, or the rank is too large.

        Cancellation:
            The record stays published.
        """
        if len(self._members) >= self.world_size:
            return RunningGroup(self._members.values())
        if member.rank >= self.world_size:
            within = f"between 0 and {self.world_size - 1}"
            raise wrong("rank", f"{within} at this LocalRendezvous", member.rank)
        _refuse_taken(member, self._members.values())
        self._members[member.name] = member
        self._changed.set()
        try:
            async with asyncio.timeout(timeout_s):
                while len(self._members) < self.world_size:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            missing = list(self.missing)
            arrived = sorted(self._members.values(), key=lambda member: member.rank)
            error = missing_error(missing, self.world_size, timeout_s, arrived)
            raise error from None
        return list(self._members.values())

    @property
    def missing(self) -> tuple[int, ...]:
        """Internal: the ranks that have not come."""
        present = {member.rank for member in tuple(self._members.values())}
        return tuple(sorted(set(range(self.world_size)) - present))

    async def publish(self, member: Member) -> None:
        """Internal: replace the record of the name's former life.

        Raises:
            Nothing.

        Cancellation:
            It never waits.
        """
        self._members[member.name] = member

    async def leave(self, timeout_s: float) -> None:
        """Internal: do nothing: nothing is held.

        Raises:
            Nothing.

        Cancellation:
            There is nothing to undo.
        """


def _refuse_taken(member: Member, members: Any) -> None:
    for other in members:
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
        rank: of this worker; None takes it from the environment or the URL.
        world_size: number of workers; None takes it from there as well.
    """
    _check_place(rank, world_size)
    if isinstance(where, Mapping):
        return StaticRendezvous(where), -1 if rank is None else rank, len(where)
    if not isinstance(where, str):
        return (
            _checked(where),
            -1 if rank is None else rank,
            world_size or _size_of(where),
        )
    if where[: len(JOIN)].lower() == JOIN:
        joining = JoinRendezvous(_join_addresses(where))
        return joining, -1 if rank is None else rank, world_size or 0
    is_xla = where.startswith(pjrt.SCHEME)
    if is_xla:
        position = pjrt.place(environ)
        rank = position.rank if rank is None else rank
        world_size = position.world_size if world_size is None else world_size
        is_env = bool(environ.get("RANK"))
        where = "env://" if is_env else f"tcp://{position.host}:{position.port}"
    url = urlsplit(where)
    if url.scheme not in _SCHEMES:
        raise _no_place(where)
    stated_place = given_in(where, rank, world_size)
    placement = _of_xla(environ) if is_xla else LaunchPlacement()
    if url.scheme == "env":
        placement = environment.resolve(
            environ, stated_place, launcher_pid=LAUNCHER_PID
        )
        stated_place = GivenPlace(placement.rank, placement.world_size)
    rank = _rank_at(where, placement, stated_place.rank)
    world_size = _known(
        placement, stated_place.world_size, Field.WORLD_SIZE, "WORLD_SIZE"
    )
    if not 0 <= rank < world_size:
        raise UsageError(f"rank must be between 0 and {world_size - 1}, not {rank}")
    if url.scheme == "file":
        if not url.path:
            raise UsageError(f"{where!r} names no file; use file:///path")
        in_file = GivenStore.in_file(url.path, is_host=rank == 0)
        return StoreRendezvous(in_file, rank, world_size), rank, world_size
    host, port = _store_address(where, placement)
    # A launcher may start all workers anew if one fails, and its store lives on.
    place = TcpPlace(
        MeetingAddress(host, port),
        _hosting_of(rank, placement),
        attempt=str(placement.restart),
    )
    met = StoreRendezvous(place, rank, world_size, run=placement.run_id)
    return met, rank, world_size


def _of_xla(environ: Mapping[str, str]) -> LaunchPlacement:
    """Return what a launcher says of the place besides rank, size and address.

    Those count replicas and are known; the number of restarts is not.
    """
    placement = environment.resolve(environ, launcher_pid=LAUNCHER_PID)
    restart = placement.values.get(Field.RESTART)
    return LaunchPlacement({} if restart is None else {Field.RESTART: restart})


def _check_place(rank: int | None, world_size: int | None) -> None:
    if rank is not None:
        check_count("rank", rank)
    if world_size is not None:
        check_count("world_size", world_size, at_least=1)


def _checked(where: Rendezvous) -> Rendezvous:
    # By its class: to ask the object could run any code.
    if not hasattr(type(where), "join") or not hasattr(type(where), "leave"):
        wanted = "a URL, a mapping from names to addresses, or a rendezvous"
        raise wrong("rendezvous", wanted, where)
    return where


def _size_of(where: Rendezvous) -> int:
    size: int = getattr(where, "world_size", 0) or 0
    return size


def _hosting_of(rank: int, placement: LaunchPlacement) -> Hosting:
    """Return whether the worker of a rank may host the store of its group."""
    if placement.is_served:
        return Hosting.NEVER
    if rank == 0:
        return Hosting.AT_ONCE
    # The first of the ranks of this host is rank 0: it hosts, if any here does.
    is_beside_0 = placement.local_rank == rank
    return Hosting.NEVER if is_beside_0 else Hosting.LATE


def _known(
    placement: LaunchPlacement, stated: int | None, wanted: Field, variable: str
) -> int:
    return placement.require_number(wanted, variable) if stated is None else stated


def _rank_at(where: str, placement: LaunchPlacement, rank: int | None) -> int:
    if rank is None and where.startswith("tcp:"):
        raise UsageError(
            f"at {where} all workers start together and need ranks: pass rank=... and "
            "world_size=...; to join a running group without a rank, use "
            f"{JOIN}host:port of a member"
        )
    return _known(placement, rank, Field.RANK, "RANK")


def _store_address(where: str, placement: LaunchPlacement) -> tuple[str, int]:
    """Return host and port of the store that a URL names."""
    url = urlsplit(where)
    if url.scheme == "env":
        return placement.require_address()
    if url.scheme == "tcp" and url.hostname and url.port:
        return url.hostname, url.port
    raise _no_place(where)


def _no_place(where: str) -> UsageError:
    return wrong(
        "rendezvous",
        "env://, tcp://host:port, file:///path, join://host:port, xla://, or a mapping"
        " from names to addresses",
        where,
    )
