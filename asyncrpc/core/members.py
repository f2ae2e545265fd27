"""Records of workers at a rendezvous, and what every rendezvous must do."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, runtime_checkable

import msgpack

from asyncrpc.core.ids import Incarnation
from asyncrpc.core.loop.waits import WaitDescription, WaitKind
from asyncrpc.core.wire.frames import Hello
from asyncrpc.errors import MalformedError, ProtocolError, RendezvousTimeoutError

_RANKS_SHOWN: Final = 8

UNKNOWN_INCARNATION: Final = Incarnation(0)
RELAY: Final = "relay://"  # begins the address of a guest; its gateway's name follows
SHOWN_MAX: Final = 20  # workers in the text of an error


@dataclass(frozen=True, slots=True)
class Member:
    """What is known of a worker before a connection to it is open.

    Attributes:
        rank: of the worker; -1 if it has no rank.
        incarnation: 0 until it is known.
        addresses: where it can be reached, best first.
        host_id: host and network namespace; Unix sockets reach only the same one.
    """

    name: str
    rank: int
    incarnation: Incarnation
    addresses: tuple[str, ...]
    host_id: str = ""

    @property
    def gateway(self) -> str:
        """The member that a guest joined by; empty for others."""
        first = self.addresses[0] if self.addresses else ""
        return first.removeprefix(RELAY) if first.startswith(RELAY) else ""

    def encode(self) -> bytes:
        """Return the record that is published."""
        record = [self.name, self.rank, self.incarnation, self.addresses, self.host_id]
        packed: bytes = msgpack.packb(record)
        return packed

    @classmethod
    def decode(cls, packed: bytes) -> Member:
        """Read what `encode` wrote."""
        try:
            name, rank, incarnation, addresses, host_id = msgpack.unpackb(packed)
            known = Hello(
                *(name, incarnation, rank, 0),
                addresses=tuple(addresses),
                host_id=host_id,
            )
            return member_of(Hello.decode(known.encode()))  # which checks each field
        except (TypeError, ValueError, ProtocolError) as error:
            raise MalformedError(
                f"the record of a worker at the meeting point cannot be read: {error}; "
                "meet at a store that only this group can write to"
            ) from error


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

    A worker that comes late asks one of them to admit it.
    """

    __slots__ = ()


class OfferedGroup(RunningGroup):
    """Members that run according to a store, whose record may be out of date.

    Whether one still runs shows when it is asked.
    """

    __slots__ = ()


class Rendezvous(Protocol):
    """The place where the workers of a group find each other."""

    async def join(self, member: Member, timeout_s: float) -> Sequence[Member]:
        """Publish `member`; return all members, once all are there.

        If the group runs already, return a `RunningGroup`.
        """

    async def leave(self, timeout_s: float) -> None:
        """Leave the rendezvous; its host waits for members that still read."""


@runtime_checkable
class Republishing(Protocol):
    """A `Rendezvous` at which a late worker publishes its record once admitted."""

    async def publish(self, member: Member) -> None:
        """Replace the record of the former worker of this name."""


def missing_error(
    missing: Sequence[int],
    world_size: int,
    timeout_s: float,
    present: Iterable[Member],
) -> RendezvousTimeoutError:
    """Return the error that names the missing ranks and the present workers."""
    ranks = _shown([str(rank) for rank in missing])
    names = _shown([f"{member.name!r} (rank {member.rank})" for member in present])
    return RendezvousTimeoutError(
        f"{world_size - len(missing)} of {world_size} workers appeared within "
        f"{timeout_s:g} s; missing: rank {ranks}; there: {names}",
        missing=missing,
    )


def _shown(texts: Sequence[str]) -> str:
    more = f" and {len(texts) - SHOWN_MAX} more" if len(texts) > SHOWN_MAX else ""
    return ", ".join(texts[:SHOWN_MAX]) + more


def wait_at_start(missing: Sequence[int] | None, world_size: int) -> WaitDescription:
    """Describe the wait for the others at the start.

    Args:
        missing: ranks that have not come; None: only rank 0 knows.
    """
    if missing is None:
        absent = f"rank 0 of {world_size} knows who is missing"
    else:
        shown = ", ".join(map(str, missing[:_RANKS_SHOWN]))
        more = len(missing) - _RANKS_SHOWN
        shown += f" and {more} more" if more > 0 else ""
        noun, verb = ("rank", "has") if len(missing) == 1 else ("ranks", "have")
        absent = f"{noun} {shown} of {world_size} {verb} not come"
    return WaitDescription(WaitKind.ROUND, f"the others at the start: {absent}")
