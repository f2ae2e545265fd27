"""The relay: guests, which no member can dial, and the member that they joined by.

A *guest* joined from outside with a token, by a connection to one member, its
*gateway*. It dials every member at the gateway's port, and its HELLO says which it
wants: the gateway dials that member, passes on both HELLOs, and joins the two
connections into one.  From then on it passes bytes on unread, so all that runs over
connections runs here, too: streams, large payloads, resuming.

A member that wants to call a guest cannot dial it; it asks the gateway, which asks the
guest to dial the member.  So all connections are the guest's own, to one port.

A guest that dials another guest of the same gateway waits at the gateway, which asks
the other to come for it: that one dials as well, and the two connections become one.
The guest that came is the acceptor from then on, as if it had been dialed.

The gateway vouches for its guests: to members it proves the secret, to the guest
that it knows the token.  It fills in what a guest cannot know: that it is reached by
way of the gateway.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Final

from asyncrpc.core.identity import WorkerIdentity
from asyncrpc.core.ids import Incarnation, WorkerId
from asyncrpc.core.links.connection import Connection
from asyncrpc.core.links.connections import Connections
from asyncrpc.core.links.ports import JOIN_REFUSED, GroupRecords
from asyncrpc.core.links.sinks import SILENT
from asyncrpc.core.links.tokens import Tokens
from asyncrpc.core.members import RELAY, Member
from asyncrpc.core.services.ports import PeerLink, Scheduler
from asyncrpc.core.services.router import takes
from asyncrpc.core.services.schema import Integer, Notice, message
from asyncrpc.core.transport.splice import Splice
from asyncrpc.core.wire.frames import Hello
from asyncrpc.core.wire.handshake import Role
from asyncrpc.errors import (
    AsyncRpcError,
    ClosedError,
    ConnectError,
    MalformedError,
    TransportError,
    UnknownWorkerError,
)

if TYPE_CHECKING:
    from asyncrpc.core.links.directory import Directory

SERVICE: Final = "relay"
SOMEBODY: Final = "*"  # expected by a guest that comes for another one
SPLICES_MAX: Final = 4096  # connections that one gateway relays


@message(
    SERVICE, "dial", about="the sender, which wants to be dialed; a gateway, for it"
)
class DialMember(Notice):
    """Ask a guest, or its gateway for it, to dial a member."""

    guest: str
    member: str
    rank: Annotated[int, Integer(-1, 1 << 31, "a rank, or -1")]
    incarnation: int
    addresses: tuple[str, ...]
    host_id: str


@message(
    SERVICE,
    "meet",
    about="a guest that waits at the sender, the gateway of the receiver",
)
class MeetGuest(Notice):
    """Ask a guest to come for another one, which waits at their gateway."""

    guest: str
    token: int


@dataclass(slots=True)
class _WaitingGuest:
    """A guest that has dialed another one, and waits for it to come."""

    connection: Connection
    hello: Hello  # for the guest that comes
    come: asyncio.Future[None]


class Relay:
    """Passes on the connections of guests; a `Service` for the workers that call them.

    Attributes:
        group: knows the gateway of this worker, if it is a guest.
        splices: what is passed on, and by which tickets its ends have come.
    """

    name = SERVICE

    def __init__(
        self,
        identity: WorkerIdentity,
        scheduler: Scheduler,
        peers: Directory,
        handshakes: Connections,
        tokens: Tokens,
    ) -> None:
        self._identity = identity
        self._scheduler = scheduler
        self._peers = peers
        self._handshakes = handshakes
        self._tokens = tokens
        self.splices: dict[Splice, tuple[bytes, ...]] = {}
        self._waiting: dict[int, _WaitingGuest] = {}  # by the token of the connection
        self.group: GroupRecords | None = None
        tokens.on_end = self._on_token_ended
        self.routes = (
            takes(DialMember, self._on_dial),
            takes(MeetGuest, self._on_meet),
        )

    # --- the gateway -----------------------------------------------------------------

    def is_guest(self, connection: Connection) -> bool:
        """Return whether a peer came with a token of this worker.

        A guest's connections to itself come with its own.
        """
        ticket, own = connection.ticket, self._tokens.own
        return bool(ticket) and (own is None or ticket != own.ticket)

    def introduce(
        self, connection: Connection, hello: Hello, gateway: str = ""
    ) -> Hello:
        """Return the HELLO of a guest with what only its gateway knows.

        Args:
            gateway: of the guest; empty: this worker.
        """
        gateway = gateway or self._identity.name
        if self.group is not None:
            hello = self.group.introduce_guest(hello)
        known = replace(
            hello,
            addresses=(f"{RELAY}{gateway}",),
            host_id=f"behind {gateway}",
            sidecar=(),
            token=0,
        )
        connection.peer = known
        return known

    def lets_in(self, connection: Connection, hello: Hello) -> bool:
        """Return whether a guest may come with its token; else it is refused."""
        refusal = self._tokens.refusal(connection.ticket, hello.name)
        if refusal:
            is_joining = not hello.expects
            verdict = f"{JOIN_REFUSED}{refusal}" if is_joining else refusal
            self._handshakes.refuse(connection, verdict)
        return not refusal

    def forward(self, connection: Connection, hello: Hello, token: int) -> None:
        """Pass on the connection of a guest to the member that it wants."""
        if token:
            self._bring_together(connection, hello, token)
        else:
            self._scheduler.start_task(self._forward(connection, hello))

    async def _forward(self, guest: Connection, hello: Hello) -> None:
        try:
            await self._dial_for(guest, hello)
        except (AsyncRpcError, TimeoutError) as error:
            if not guest.ended.done():
                why = str(error) or "no answer in time"
                self._handshakes.refuse(guest, f"{hello.expects!r}: {why}")

    async def _dial_for(self, guest: Connection, hello: Hello) -> None:
        """Dial a member for a guest; the answer joins the two connections."""
        if self._peers.known_incarnation(hello.expects) is None:
            raise UnknownWorkerError(hello.expects, ())
        member = self._peers.member(hello.expects)
        if len(self.splices) + len(self._waiting) >= SPLICES_MAX:
            raise ConnectError(
                f"the gateway already relays {SPLICES_MAX} connections, its limit; try "
                "again later"
            )
        passed_on = replace(hello, token=guest.token)
        if gateway := member.gateway:
            if gateway != self._identity.name:
                raise ConnectError(
                    f"it joined through gateway {gateway!r}; guests of different "
                    "gateways cannot reach each other: let both join through the same "
                    "member"
                )
            await self._call_guest(guest, passed_on)
            return

        def introduce(connection: Connection) -> None:
            connection.hello(passed_on)

        def on_hello(connection: Connection, answer: Hello) -> None:
            self._join(guest, connection, answer)

        def make() -> Connection:
            return self._handshakes.make(Role.DIALER, introduce, on_hello)

        routes = self._peers.routes
        async with asyncio.timeout(routes.timeout_s):
            dialled = await routes.connect(routes.to(member), make)
            await dialled.handler.until_open()

    async def _call_guest(self, guest: Connection, hello: Hello) -> None:
        """Ask a guest to come for another one, and wait until it has."""
        link = self._peers.link_to(hello.expects)
        if link is None:
            raise ConnectError("it is a guest that is not connected to its gateway")
        loop = self._scheduler.loop
        waiting = _WaitingGuest(guest, hello, loop.create_future())
        self._waiting[hello.token] = waiting
        try:
            link.tell(MeetGuest(hello.expects, hello.token))
            async with asyncio.timeout(self._peers.routes.timeout_s):
                await asyncio.wait(
                    (waiting.come, guest.ended), return_when=asyncio.FIRST_COMPLETED
                )
        finally:
            del self._waiting[hello.token]

    def _bring_together(self, guest: Connection, hello: Hello, token: int) -> None:
        """A guest comes for another one: make one connection of both."""
        waiting = self._waiting.get(token)
        if (
            waiting is None
            or waiting.come.done()
            or waiting.connection.ended.done()
            or waiting.hello.expects != hello.name
        ):
            self._handshakes.refuse(guest, "the guest that waited has given up")
            return
        guest.hello(waiting.hello)  # its answer goes through the splice
        waiting.come.set_result(None)
        self._splice(waiting.connection, guest)

    def _join(self, guest: Connection, member: Connection, answer: Hello) -> None:
        """Pass on a member's answer, and all that follows, in both directions."""
        if guest.ended.done():
            member.fail(ClosedError("the guest has given up"))
            return
        guest.hello(answer)
        if answer.verdict:
            for connection in (guest, member):
                connection.open_to(SILENT)
                connection.close()
            return
        self._splice(guest, member)

    def _splice(self, guest: Connection, member: Connection) -> None:
        tickets = tuple(filter(None, (guest.ticket, member.ticket)))
        try:
            ends = guest.release_transport(), member.release_transport()
        except TransportError as error:
            guest.fail(error)
            member.fail(error)
            return
        self.splices[Splice(*ends, self._forget)] = tickets

    def _forget(self, splice: Splice) -> None:
        self.splices.pop(splice, None)

    def _on_token_ended(self, ticket: bytes, why: str) -> None:
        """End all connections of a guest, at once."""
        for splice, used in tuple(self.splices.items()):
            if ticket in used:
                splice.abort()
        for connection in tuple(self._handshakes.live):
            if connection.ticket == ticket:
                connection.close(f"the guest's token {why}")

    # --- the guest -------------------------------------------------------------------

    def _on_meet(self, link: PeerLink, message: MeetGuest) -> None:
        """Come for another guest, if this is the one that is asked."""
        if message.guest == self._identity.name and self._peers.routes.gateway:
            self._check_gateway(link)
            self._scheduler.start_task(self._come(message.token))

    async def _come(self, token: int) -> None:
        """Dial the gateway, which joins this connection and the waiting guest's."""

        def introduce(connection: Connection) -> None:
            # The token says which guest it is for; it is not for the gateway itself.
            ours = self._identity.hello(expects=SOMEBODY)
            connection.hello(replace(ours, token=token))

        def on_hello(connection: Connection, hello: Hello) -> None:
            if hello.verdict:
                connection.open_to(SILENT)
                connection.close()
                return
            connection.role = Role.ACCEPTOR
            self._peers.take_offer(connection, hello)

        def make() -> Connection:
            return self._handshakes.make(Role.DIALER, introduce, on_hello)

        routes = self._peers.routes
        try:
            async with asyncio.timeout(routes.timeout_s):
                dialled = await routes.connect(list(routes.gateway or ()), make)
                await dialled.handler.until_open()
        except (AsyncRpcError, TimeoutError):  # the waiting guest finds out by itself
            return

    # --- the caller of a guest -------------------------------------------------------

    async def ask_to_dial(self, guest: Member) -> None:
        """Ask a guest to dial this worker."""
        gateway = guest.gateway
        if gateway == self._identity.name:
            raise ConnectError("it is a guest that is not connected to its gateway")
        try:
            link = await self._peers.open_link(gateway)
        except AsyncRpcError as error:
            raise ConnectError(f"its gateway {gateway!r}: {error}") from error
        own = self._identity.hello()
        link.tell(
            DialMember(
                guest.name,
                own.name,
                own.rank,
                own.incarnation,
                own.addresses,
                own.host_id,
            )
        )

    def _check_gateway(self, link: PeerLink) -> None:
        """Check that a message comes from the member that this guest joined by."""
        gateway = "" if self.group is None else self.group.gateway
        if link.peer.name != gateway:
            raise MalformedError(
                f"worker {link.peer.name!r} may not ask this guest to dial others; "
                f"only its gateway {gateway!r} may"
            )

    def _on_dial(self, link: PeerLink, message: DialMember) -> None:
        """Dial a member, if this is the guest; pass it on, if this is its gateway."""
        is_own = link.peer == WorkerId(message.member, Incarnation(message.incarnation))
        if not is_own and message.guest != self._identity.name:
            raise MalformedError(
                f"worker {link.peer.name!r} may ask a guest to dial itself, but not "
                f"{message.member!r}"
            )
        if not is_own:
            self._check_gateway(link)
        if message.guest != self._identity.name:
            guest = None
            if self._peers.known_incarnation(message.guest) is not None:
                guest = self._peers.link_to(message.guest)
            if guest is not None:  # else it is gone: the asker finds out by itself
                guest.tell(message)
            return
        incarnation = Incarnation(message.incarnation)
        if self._peers.known_incarnation(message.member) != incarnation:
            where = (message.addresses, message.host_id)
            self._peers.add([Member(message.member, message.rank, incarnation, *where)])
        self._scheduler.start_task(self._dial_back(message.member))

    async def _dial_back(self, name: str) -> None:
        try:
            await self._peers.open_link(name)
        except AsyncRpcError:  # the asker asks again, or gives up
            return

    # --- life ------------------------------------------------------------------------

    def on_peer_lost(self, peer: WorkerId, reason: str) -> None:
        """Do nothing: connections end by themselves."""

    async def close(self) -> None:
        """End what is passed on."""
        self._tokens.close()
        for splice in tuple(self.splices):
            splice.abort()
