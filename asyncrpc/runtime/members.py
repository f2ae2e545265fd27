"""Workers' records where they meet, and what every meeting place must do."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, runtime_checkable

import msgpack

from asyncrpc.errors import RendezvousTimeoutError
from asyncrpc.ids import Incarnation
from asyncrpc.wire.messages import Hello

UNKNOWN_INCARNATION: Final = Incarnation(0)
SHOWN_MAX: Final = 20  # workers in the text of an error


@dataclass(frozen=True, slots=True)
class Member:
    """What is known of a worker before a connection to it is open.

    Attributes:
        name: of the worker.
        rank: of the worker; -1 if it has none.
        incarnation: 0 until it is known.
        addresses: where it can be reached, best first.
        host_id: host and network namespace; Unix sockets reach only the same one.
    """

    name: str
    rank: int
    incarnation: Incarnation
    addresses: tuple[str, ...]
    host_id: str = ""

    def encode(self) -> bytes:
        """Return the record that is published."""
        record = [self.name, self.rank, self.incarnation, self.addresses, self.host_id]
        packed: bytes = msgpack.packb(record)
        return packed

    @classmethod
    def decode(cls, packed: bytes) -> Member:
        """Read what `encode` wrote."""
        name, rank, incarnation, addresses, host_id = msgpack.unpackb(packed)
        return cls(name, rank, Incarnation(incarnation), tuple(addresses), host_id)


def member_of(hello: Hello) -> Member:
    """Return what a HELLO says of its sender."""
    return Member(
        hello.name,
        hello.rank,
        Incarnation(hello.incarnation),
        hello.addresses,
        hello.host_id,
    )


class RunningGroup(tuple[Member, ...]):
    """What a rendezvous returns of a group that runs already: some of its members.

    A worker that comes so late asks one of them to admit it.
    """

    __slots__ = ()


class OfferedGroup(RunningGroup):
    """Members that a store says are running, as far as those knew that said so.

    Whether one still runs shows when it is asked.
    """

    __slots__ = ()


class Rendezvous(Protocol):
    """Where workers meet."""

    async def join(self, member: Member, timeout_s: float) -> Sequence[Member]:
        """Publish `member`; return all members, once they are all there.

        If they have been there before, return a `RunningGroup`.

        Raises:
            RendezvousTimeoutError: some are missing; it names them.
            UsageError: the name or the rank is taken.
        """

    async def leave(self, timeout_s: float) -> None:
        """Let go of the meeting place; a host waits for those still reading."""


@runtime_checkable
class Republishing(Protocol):
    """A `Rendezvous` that a late worker leaves its record at, once it is taken in."""

    async def publish(self, member: Member) -> None:
        """Put the record in place of that of the name's former life."""


@runtime_checkable
class Offering(Protocol):
    """A `Rendezvous` that may return an `OfferedGroup`."""

    async def claim(self, member: Member) -> bool:
        """End the meeting by the word that a group runs; return whether it did."""

    def refuse(self, offered: Sequence[Member]) -> None:
        """Take note that no member of an offer can be reached; wait for another."""


def missing_error(
    missing: Sequence[int],
    world_size: int,
    timeout_s: float,
    present: Iterable[Member],
) -> RendezvousTimeoutError:
    """Return the error that names the ranks that did not come, and who did."""
    ranks = _shown([str(rank) for rank in missing])
    came = _shown([f"{one.name!r} (rank {one.rank})" for one in present])
    return RendezvousTimeoutError(
        f"{world_size - len(missing)} of {world_size} workers appeared within "
        f"{timeout_s:g} s; missing: rank {ranks}; there: {came}",
        missing=missing,
    )


def _shown(texts: Sequence[str]) -> str:
    more = f" and {len(texts) - SHOWN_MAX} more" if len(texts) > SHOWN_MAX else ""
    return ", ".join(texts[:SHOWN_MAX]) + more
