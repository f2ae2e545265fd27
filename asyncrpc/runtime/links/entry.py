"""What a worker knows of another, and the one link to it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from asyncrpc.runtime.machine.pool import PeerConnection

if TYPE_CHECKING:
    from asyncrpc.runtime.links.connection import Connection
    from asyncrpc.runtime.links.link import Link
    from asyncrpc.runtime.membership.rendezvous import Member


class Entry:
    """One worker, by name.

    Attributes:
        member: what is known of it.
        link: to it; None if there is none, its connection is broken just now, or the
            peer has dialed it and not yet shown that it is open there too.
        broken: the link whose connection is broken: calls wait for what becomes of it.
        machine: says which of several connections is the one.
        dial: makes a connection.
        settled: set when a link has come up, or a connection has ended.
    """

    def __init__(self, member: Member, own_incarnation: int) -> None:
        self.member = member
        self.link: Link | None = None
        self.broken: Link | None = None
        self.machine: PeerConnection[Connection] = PeerConnection(own_incarnation)
        self.dial: asyncio.Task[Link] | None = None
        self.settled = asyncio.Event()

    def set_link(self, link: Link) -> None:
        """Let calls have this link."""
        self.link, self.broken = link, None
        self.settled.set()

    def on_first(self, link: Link) -> None:
        """Something has come over a connection that the peer has dialed."""
        link.is_proven = True
        if self.machine.on_proven(link.connection):
            self.set_link(link)

    def on_lost(self, connection: Connection) -> None:
        """A connection has ended for good."""
        if self.machine.on_lost(connection):
            self.link = self.broken = None
            self.settled.set()

    def on_dialed(self, task: asyncio.Task[Link]) -> None:
        """The dial has ended."""
        self.dial = None
        if not task.cancelled():
            task.exception()  # whoever waited has it; perhaps nobody waits any more
