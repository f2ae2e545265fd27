"""Opening lanes: how the two ends of a link find each other again.

A lane is dialed as a connection is, with the whole handshake.  Its HELLO names the
connection that it belongs to, by a number that only its two ends have seen.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Final

from asyncrpc.errors import ConnectError
from asyncrpc.runtime.links.host import HOST_ID
from asyncrpc.runtime.options import LANES_MAX
from asyncrpc.runtime.payloads.lanes import Lanes
from asyncrpc.transport.dial import connect_any
from asyncrpc.wire.handshake import Role

if TYPE_CHECKING:
    from asyncrpc.runtime.links.connection import Connection
    from asyncrpc.runtime.links.link import Link
    from asyncrpc.runtime.membership.rendezvous import Member
    from asyncrpc.runtime.worker import Worker
    from asyncrpc.transport.address import Address
    from asyncrpc.wire.messages import Hello
    from asyncrpc.wire.transfers import Arrivals


class Silent:
    """The sink of a connection that is being closed."""

    def on_message(self, *_message: object) -> None:
        """Drop it."""

    def on_transfer_dropped(self, kind: int, call_id: int) -> None:
        """Drop it."""


SILENT: Final = Silent()


class LaneDialing(ABC):
    """The part of a `Directory` that opens lanes."""

    _worker: Worker
    _connections: dict[Connection, None]
    _links: dict[Connection, Link]
    _closing: bool

    @abstractmethod
    def make_connection(
        self,
        role: Role,
        on_proved: Callable[[Connection], None],
        on_hello: Callable[[Connection, Hello], None],
    ) -> Connection:
        """Make a connection that is ended with this directory."""

    @abstractmethod
    def _member_named(self, name: str) -> Member:
        """Return what is known of a worker."""

    @abstractmethod
    def _usable(self, member: Member) -> list[Address]:
        """Return the addresses that this worker can use, best first."""

    @abstractmethod
    def _is_trusted(self, connection: Connection) -> bool:
        """Check whom the kernel says the peer is, where no secret vouches for it."""

    def _lanes_for(
        self, control: Connection, member: Member, arrivals: Arrivals
    ) -> Lanes:
        """Prepare the lanes of a connection; whoever dialed it dials them."""
        dialed = control.role is Role.DIALER
        return Lanes(
            control,
            arrivals,
            loop=self._worker.loop,
            wanted=self._worker.options.bulk_lanes,
            is_on_host=control.peer is not None and control.peer.host_id == HOST_ID,
            dial=partial(self._dial_lanes, member, control) if dialed else None,
            start_task=self._worker.start_task,
        )

    async def _dial_lanes(
        self, member: Member, control: Connection, count: int
    ) -> None:
        """Open lanes; one is enough.

        Raises:
            TransportError: there is none; the reason of the first.
        """
        tries = [self._dial_lane(member, control) for _ in range(count)]
        errors = await asyncio.gather(*tries, return_exceptions=True)
        if all(errors) and errors[0] is not None:
            raise errors[0]

    async def _dial_lane(self, member: Member, control: Connection) -> None:
        at = control.address
        async with asyncio.timeout(self._worker.options.connect_timeout_s):
            dialled = await connect_any(
                self._usable(member) if at is None else [at],
                lambda: self._new_lane(member, control),
                self._worker.connectors,
            )
            connection = dialled.handler
            hello = await connection.until_open()
        if hello.verdict:
            connection.close()
            raise ConnectError(f"{member.name!r} refused a lane: {hello.verdict}")

    def _new_lane(self, member: Member, control: Connection) -> Connection:
        def on_proved(connection: Connection) -> None:
            ours = self._worker.hello(expects=member.name, lane=control.token)
            connection.hello(ours)

        return self.make_connection(
            Role.DIALER, on_proved, partial(self._on_lane_answer, control)
        )

    def _on_lane_answer(
        self, control: Connection, connection: Connection, hello: Hello
    ) -> None:
        if not self._is_trusted(connection):
            return
        if hello.verdict:
            connection.open_to(SILENT)
            return
        peer = control.peer
        if (
            control.lanes is None
            or peer is None
            or peer.incarnation != hello.incarnation
        ):
            connection.fail(ConnectError("another worker has taken the peer's place"))
            return
        control.lanes.attach(connection)

    def _on_lane_offer(self, connection: Connection, hello: Hello) -> None:
        """A worker that is connected dials a lane."""
        lanes = None if self._closing else self._lanes_named(hello)
        if lanes is None or len(lanes.lanes) >= LANES_MAX:
            verdict = "no such connection" if lanes is None else "too many lanes"
            self._refuse(connection, verdict)
            return
        connection.hello(self._worker.hello())
        lanes.attach(connection)

    def _refuse(self, connection: Connection, verdict: str) -> None:
        """Tell who dials why it is not taken, and end."""
        connection.hello(self._worker.hello(verdict=verdict))
        connection.open_to(SILENT)
        connection.close()

    def _lanes_named(self, hello: Hello) -> Lanes | None:
        """Return the lanes that a dialer means, if the link is still there."""
        for connection, link in self._links.items():
            is_meant = (
                connection.role is Role.ACCEPTOR
                and connection.token == hello.lane
                and link.peer.incarnation == hello.incarnation
            )
            if is_meant:
                return connection.lanes
        return None
