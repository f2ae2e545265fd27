"""Opens lanes: how the two ends of a link find each other again.

A lane is dialed as a connection is, with the whole handshake.  Its HELLO names the
connection that it belongs to, by a number that only its two ends have seen.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from asyncrpc.core.host.this_host import HOST_ID
from asyncrpc.core.identity import WorkerIdentity
from asyncrpc.core.links.connection import Connection
from asyncrpc.core.links.connections import Connections
from asyncrpc.core.links.routes import Routes
from asyncrpc.core.links.sinks import SILENT
from asyncrpc.core.members import Member
from asyncrpc.core.options import LANES_MAX
from asyncrpc.core.payloads.lanes import Lanes
from asyncrpc.core.payloads.ports import MemoryIsReady
from asyncrpc.core.services.ports import Scheduler
from asyncrpc.core.wire.chunks import Arrivals
from asyncrpc.core.wire.frames import Hello
from asyncrpc.core.wire.handshake import Role
from asyncrpc.errors import ConnectError


class LaneDialer:
    """Opens the lanes of one worker, and accepts those that peers open."""

    def __init__(
        self,
        identity: WorkerIdentity,
        scheduler: Scheduler,
        routes: Routes,
        handshakes: Connections,
        *,
        wanted: int | None,
        redial: Callable[[Connection, int], None],
        is_ready: MemoryIsReady | None,
    ) -> None:
        """Prepare.

        Args:
            wanted: how many lanes a link has; None: as many as suit the transport.
        """
        self._identity = identity
        self._scheduler = scheduler
        self._routes = routes
        self._handshakes = handshakes
        self._wanted = wanted
        self._redial = redial
        self._is_ready = is_ready

    def prepare(self, control: Connection, member: Member) -> None:
        """Let a connection have lanes, once a large payload needs them."""
        control.prepare_lanes(partial(self._lanes_for, control, member))

    def _lanes_for(
        self, control: Connection, member: Member, arrivals: Arrivals
    ) -> Lanes:
        """Return the lanes of a connection; the side that dialed it dials them."""
        dialed = control.role is Role.DIALER
        return Lanes(
            control,
            arrivals,
            loop=self._scheduler.loop,
            wanted=self._wanted,
            is_on_host=control.peer is not None and control.peer.host_id == HOST_ID,
            dial=partial(self._dial_all, member, control) if dialed else None,
            redial=self._redial,
            start_task=self._scheduler.start_task,
            is_ready=self._is_ready,
        )

    async def _dial_all(self, member: Member, control: Connection, count: int) -> None:
        """Open lanes; one is enough."""
        tries = [self.dial(member, control) for _ in range(count)]
        errors = await asyncio.gather(*tries, return_exceptions=True)
        if all(errors) and errors[0] is not None:
            raise errors[0]

    async def dial(self, member: Member, control: Connection) -> None:
        """Open one more lane of a connection that this side has dialed."""
        at = control.address
        async with asyncio.timeout(self._routes.timeout_s):
            dialled = await self._routes.connect(
                self._routes.to(member) if at is None else [at],
                lambda: self._new_lane(member, control),
            )
            connection = dialled.handler
            hello = await connection.until_open()
        if hello.verdict:
            connection.close()
            raise ConnectError(f"{member.name!r} refused a lane: {hello.verdict}")

    def _new_lane(self, member: Member, control: Connection) -> Connection:
        def introduce(connection: Connection) -> None:
            ours = self._identity.hello(expects=member.name, lane=control.token)
            connection.hello(ours)

        return self._handshakes.make(
            Role.DIALER, introduce, partial(self._on_answer, control)
        )

    def _on_answer(
        self, control: Connection, connection: Connection, hello: Hello
    ) -> None:
        if not self._handshakes.is_trusted(connection):
            return
        if hello.verdict:
            connection.open_to(SILENT)
            return
        peer = control.peer
        if control.lanes is None or peer is None or not peer.is_of(hello):
            connection.fail(ConnectError("another worker has taken the peer's place"))
            return
        control.lanes.attach(connection)

    def on_offer(self, connection: Connection, hello: Hello) -> None:
        """A worker that is connected dials a lane."""
        lanes = None if self._handshakes.is_closing else self._lanes_named(hello)
        if lanes is None or len(lanes.lanes) + len(lanes.accepted) >= LANES_MAX:
            verdict = "no such connection" if lanes is None else "too many lanes"
            self._handshakes.refuse(connection, verdict)
            return
        connection.hello(self._identity.hello())
        lanes.attach(connection)

    def _lanes_named(self, hello: Hello) -> Lanes | None:
        """Return the lanes that a dialer means, if the link is still there."""
        for connection in self._handshakes.live:
            is_meant = (
                connection.role is Role.ACCEPTOR
                and connection.lanes is not None
                and connection.token == hello.lane
                and connection.peer is not None
                and connection.peer.is_of(hello)
            )
            if is_meant:
                return connection.lanes
        return None
