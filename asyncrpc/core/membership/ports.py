"""What the parts of the membership need of links and of known workers.

`Link` and `Directory` implement these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from asyncrpc.core.ids import Incarnation, WorkerId
from asyncrpc.core.links.ports import Handshakes
from asyncrpc.core.links.routes import Routes
from asyncrpc.core.members import Member
from asyncrpc.core.services.ports import Identity, PeerLink
from asyncrpc.core.wire.messages import Hello
from asyncrpc.errors import AsyncRpcError

OnPeerLost = Callable[[WorkerId, str], None]


@dataclass(frozen=True, slots=True)
class MembershipTimes:
    """How often a worker compares, and how long it waits for others.

    Attributes:
        heartbeat_s: seconds; a worker compares once in a few heartbeats.
        lost_after_s: seconds without an answer after which a member is lost.
        connect_timeout_s: seconds that a member may take to answer.
    """

    heartbeat_s: float
    lost_after_s: float
    connect_timeout_s: float


class MemberIdentity(Identity, Protocol):
    """A worker, as the group knows it.

    Attributes:
        world_size: number of workers in the group; 0 if it is not fixed.
    """

    world_size: int

    @property
    def member(self) -> Member:
        """Return its record for others."""


class MemberConnection(Protocol):
    """The connection of a link to a member."""

    @property
    def peer(self) -> Hello | None:
        """The peer's HELLO, once it is in."""

    @property
    def is_broken(self) -> bool:
        """Return whether it waits for another transport."""

    def end(self, error: AsyncRpcError) -> None:
        """End it at once."""

    def close(self, why: str = "") -> None:
        """Write what is queued, then end in order."""


class MemberLink(PeerLink, Protocol):
    """A link to a member."""

    @property
    def connection(self) -> MemberConnection:
        """Return its connection."""


class KnownPeer(Protocol):
    """One worker that is known."""

    @property
    def link(self) -> MemberLink | None:
        """The link to it, if one is open."""


class Peers(Protocol):
    """The workers that this one knows, and the links to them."""

    @property
    def links(self) -> Sequence[MemberLink]:
        """All open links; also the one to this worker itself, if it calls itself."""

    def member(self, to: str | int) -> Member:
        """Return a worker by name or rank; raises UnknownWorkerError."""

    def find(self, to: str | int) -> KnownPeer:
        """Return the entry of a worker; raises UnknownWorkerError."""

    def link_of(self, incarnation: Incarnation) -> MemberLink | None:
        """Return the open link to a worker's incarnation."""

    async def open_link(self, to: str | int) -> MemberLink:
        """Return the link to a worker, connecting if need be."""

    def known_incarnation(self, name: str) -> Incarnation | None:
        """Return the incarnation that calls to a worker go to; None if not known."""

    def add(self, members: Iterable[Member]) -> None:
        """Add workers."""

    def give_rank(self, rank: int, name: str) -> None:
        """Let a worker be found by a rank."""

    def forget(self, name: str) -> None:
        """Let go of a worker that ended long ago, unless there is a link to it."""


class JoiningPeers(Peers, Protocol):
    """The workers that this one knows, and what it takes to meet others."""

    @property
    def routes(self) -> Routes:
        """The ways to members that are not known yet."""

    @property
    def connections(self) -> Handshakes:
        """Makes connections to them."""

    @property
    def early_joiners(self) -> list[str]:
        """The workers that ask for admission while this worker itself is starting."""
