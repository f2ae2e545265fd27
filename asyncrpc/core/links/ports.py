"""What the parts of the directory ask of the group.

The group is a package above this one, so it is named by what it does here.
"""

from __future__ import annotations

from typing import Final, Protocol

from asyncrpc.core.ids import WorkerId
from asyncrpc.core.links.connection import Connection
from asyncrpc.core.wire.frames import Hello

# Begins a verdict about joining that no member will change.
JOIN_REFUSED: Final = "refused: "


class GroupRecords(Protocol):
    """The group's records: the `MembershipService`, and those of a test."""

    def refusal(self, hello: Hello) -> str:
        """Return why a peer that introduces itself is refused; empty if it is not."""

    @property
    def gateway(self) -> str:
        """The member that this worker joined by as a guest; empty if it is none."""

    def is_claimed(self, hello: Hello) -> bool:
        """Return whether another worker may have the name or rank of a peer."""

    async def claim(self, hello: Hello) -> str:
        """Return why a peer may not have its name and rank; empty if it may."""

    async def settle(self, name: str) -> None:
        """Wait until it is known which life of a worker there is."""

    def introduce_guest(self, hello: Hello) -> Hello:
        """Return the HELLO of a guest with its rank in the group."""

    def take_in(self, connection: Connection, hello: Hello) -> None:
        """A worker asks to join."""

    async def refresh(self, name: str) -> bool:
        """Ask others whether a worker is elsewhere now."""

    def on_unused_lost(self, peer: WorkerId) -> None:
        """A connection that the peer had dialed has ended before it was used."""
