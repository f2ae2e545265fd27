"""One worker's record of another, and the one link to it."""

from __future__ import annotations

import asyncio
from typing import Any

from asyncrpc.core.links.connection import Connection
from asyncrpc.core.links.link import Link
from asyncrpc.core.links.machine.pool import PeerConnection
from asyncrpc.core.members import Member


class PeerEntry:
    """One worker, by name.

    Attributes:
        link: to it; None without one, if its connection is broken, or if the peer has
            dialed it and not yet shown that it is open there as well.
        broken: the link whose connection is broken: calls wait for its end or its
            return.
        machine: decides which of several connections survives.
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

    def set_broken(self, link: Link) -> None:
        """Let calls wait for what becomes of the connection of this link."""
        self.link, self.broken = None, link

    def on_first(self, link: Link) -> None:
        """A message has arrived over a connection that the peer has dialed."""
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
            task.exception()  # marks it as read: perhaps no task waits for it


class FirstMessage:
    """The sink of a connection until its first message, which it reports."""

    def __init__(self, entry: PeerEntry, link: Link) -> None:
        self._entry = entry
        self._link = link

    def on_message(self, *message: Any) -> None:
        """Take the first message; all further ones go to the link."""
        self._tell().on_message(*message)

    def on_transfer_dropped(self, kind: int, call_id: int) -> None:
        """Take it as the first message."""
        self._tell().on_transfer_dropped(kind, call_id)

    def _tell(self) -> Link:
        self._link.connection.open_to(self._link)
        self._entry.on_first(self._link)
        return self._link
