"""The directory: which workers there are, and the connection to each.

A connection is made on first use, by whoever needs it first; if both do at once, the
machine in `machine.pool` says which one survives.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Final

from asyncrpc.arguments import check_kind
from asyncrpc.errors import (
    AsyncRpcError,
    AuthenticationError,
    ClosedError,
    ConnectError,
    ConnectionLostError,
    Outcome,
    RefusedError,
    TransportError,
    UnknownWorkerError,
    WorkerLostError,
    rebuild,
)
from asyncrpc.ids import Incarnation, WorkerId
from asyncrpc.runtime.links.admission import Admission
from asyncrpc.runtime.links.connection import Connection
from asyncrpc.runtime.links.entry import Entry
from asyncrpc.runtime.links.host import HOST_ID
from asyncrpc.runtime.links.link import FirstMessage, Link
from asyncrpc.runtime.links.liveness import Liveness
from asyncrpc.runtime.links.reconnecting import Reconnecting
from asyncrpc.runtime.machine.pool import DUPLICATE
from asyncrpc.runtime.membership.rendezvous import Member
from asyncrpc.runtime.payloads.lane_dialing import SILENT
from asyncrpc.transport.address import Address
from asyncrpc.transport.dial import connect_any
from asyncrpc.wire.handshake import NONCE_BYTES, Role
from asyncrpc.wire.messages import Hello

if TYPE_CHECKING:
    from asyncrpc.runtime.worker import Worker

# How often a dial that lost to the peer's own is repeated before it counts as failed.
DIALS_MAX: Final = 5
LOST_MAX: Final = 4096  # incarnations that are remembered as lost
DUPLICATE_WAIT_S: Final = 1.0  # for the connection that won to come up
# After a connection broke in its handshake, which says nothing of the peer.
PAUSES_AFTER_BREAK_S: Final = (0.02, 0.1, 0.5)


class Directory(Reconnecting):
    """The workers that one worker knows."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._entries: dict[str, Entry] = {}
        self._by_rank: dict[int, str] = {}
        # A set, but ordered: in a simulation runs must not depend on addresses.
        self._connections: dict[Connection, None] = {}
        self._links: dict[Connection, Link] = {}
        self._by_incarnation: dict[Incarnation, Link] = {}
        self.admission = Admission(worker)
        # Who dialed before `serve`; bounded by `Options.handshakes_max`.
        self._early: list[tuple[Connection, Hello]] | None = []
        self._closing = False
        self._liveness = Liveness(worker)
        self._trying = set()
        # Those that were given up and may be back: a partition that has healed.
        self._lost: dict[Incarnation, None] = {}

    # --- who there is ----------------------------------------------------------------

    def add(self, members: Iterable[Member]) -> None:
        """Take note of workers."""
        for member in members:
            entry = self._entries.get(member.name)
            if entry is None:
                own = self._worker.incarnation
                self._entries[member.name] = Entry(member, own)
            else:
                entry.member = member
            if member.rank >= 0:
                self._by_rank[member.rank] = member.name

    def forget(self, name: str) -> None:
        """Let go of a worker that ended long ago, unless there is a link to it."""
        entry = self._entries.get(name)
        if entry is None or entry.machine.connection is not None or entry.dial:
            return
        del self._entries[name]
        if self._by_rank.get(entry.member.rank) == name:
            del self._by_rank[entry.member.rank]

    def known_incarnation(self, name: str) -> Incarnation | None:
        """Return the incarnation that calls to a worker go to; None if not known."""
        entry = self._entries.get(name)
        return None if entry is None else entry.member.incarnation

    @property
    def members(self) -> list[Member]:
        """Every worker that is known, by rank and name."""
        found = [entry.member for entry in self._entries.values()]
        return sorted(found, key=lambda member: (member.rank, member.name))

    def find(self, to: str | int) -> Entry:
        """Return a worker by name or rank.

        Raises:
            UnknownWorkerError: there is none.
            UsageError: `to` is neither a name nor a rank.
        """
        check_kind("to", to, (str, int), "the name or the rank of a worker")
        name = self._by_rank.get(to, "") if isinstance(to, int) else to
        entry = self._entries.get(name)
        if entry is None:
            raise UnknownWorkerError(to, sorted(self._entries))
        return entry

    def link_to(self, name: str) -> Link | None:
        """Return the open link to a worker; None if there is none yet.

        Raises:
            UnknownWorkerError: there is no worker of the name.
        """
        entry = self._entries.get(name)
        return (entry or self.find(name)).link

    @property
    def links(self) -> list[Link]:
        """The links of every open connection, accepted ones to ourselves included."""
        return list(self._links.values())

    def link_of(self, incarnation: Incarnation) -> Link | None:
        """Return the open link to a worker's incarnation."""
        return self._by_incarnation.get(incarnation)

    # --- connecting ------------------------------------------------------------------

    async def connect(self, entry: Entry) -> Link:
        """Return the link to a worker, making the connection if there is none.

        Raises:
            WorkerLostError: it cannot be reached; nothing was sent.
            AuthenticationError: the secrets differ.

        Cancellation:
            The dial goes on for others who wait for it, and for the next call.
        """
        link = await self._connect(entry)
        while link.is_lost:  # in the turn in which its dial ended: nothing was sent
            link = await self._connect(entry)
        return link

    async def _connect(self, entry: Entry, *, again: bool = True) -> Link:
        while entry.broken is not None and not self._closing:
            # It ends with the connection, which `close` and `Options.lost_after_s` end.
            await entry.broken.connection.settled()
        if entry.link is not None:
            return entry.link
        if self._closing:
            raise self._closed()
        joined = entry.dial is not None
        if entry.dial is None:
            entry.dial = self._worker.start_task(self._dial(entry))
            entry.dial.add_done_callback(entry.on_dialed)
        try:
            return await self._await_dial(entry.dial)
        except WorkerLostError as error:
            # Nobody listened before this caller came; by now somebody may.
            if not (joined and again and isinstance(error.__cause__, RefusedError)):
                raise
        return await self._connect(entry, again=False)

    async def _await_dial(self, dial: asyncio.Task[Link]) -> Link:
        try:
            return await asyncio.shield(dial)  # of so many attempts, each with a limit
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if dial.cancelled() and not (task and task.cancelling()):
                raise self._closed() from None  # nobody cancelled whoever waits here
            raise
        except AsyncRpcError as error:
            # One for each who waits: an error keeps the frames that it has passed, and
            # with them what their callers hold.  So it has no name here, either.
            raise rebuild(type(error), error.args, dict(vars(error))) from (
                error.__cause__
            )

    async def _dial(self, entry: Entry) -> Link:
        pauses_s = iter(PAUSES_AFTER_BREAK_S)
        for attempt in range(DIALS_MAX):
            if entry.link is not None:
                return entry.link
            if not entry.machine.want(attempt):
                await self._await_proof(entry)
                continue
            dialled = entry.member
            try:
                connection = await self._dial_once(entry, attempt)
            except AuthenticationError:
                self._worker.counters.authentications_failed += 1
                raise
            except (TransportError, TimeoutError) as error:
                broke = isinstance(error, ConnectionLostError)
                if broke and (pause_s := next(pauses_s, None)) is not None:
                    await asyncio.sleep(pause_s)
                elif not await self._may_go_on(entry, dialled):
                    raise self._unreachable(entry, error) from error
                continue
            if connection is None:
                await self._await_winner(entry)
        if entry.link is not None:
            return entry.link
        raise self._unreachable(entry, ConnectError("both sides kept dialing"))

    async def _may_go_on(self, entry: Entry, dialled: Member) -> bool:
        """Say whether a dial that failed need not have been the last."""
        may_go_on = _has_news(entry, dialled)
        if not may_go_on and await self._worker.membership.refresh(dialled.name):
            return True
        return may_go_on or _has_news(entry, dialled)  # come while others were asked

    async def _dial_once(self, entry: Entry, attempt: int) -> Connection | None:
        """Dial; None if the peer's own dial is to survive."""
        try:
            return await self._dial_peer(entry, attempt)
        except BaseException:
            entry.machine.on_dial_failed()
            raise

    async def _dial_peer(self, entry: Entry, attempt: int) -> Connection | None:
        timeout_s = self._worker.options.connect_timeout_s
        addresses = self._usable(entry.member)
        async with asyncio.timeout(timeout_s):
            dialled = await connect_any(
                addresses,
                lambda: self._new_connection(Role.DIALER, entry, attempt),
                self._worker.connectors,
            )
            connection = dialled.handler
            connection.address = dialled.address
            hello = await connection.until_open()
        if hello.verdict == DUPLICATE:
            connection.close()
            return None
        if hello.verdict:
            connection.close()
            raise ConnectError(f"{entry.member.name!r} refused: {hello.verdict}")
        return connection

    async def _await_winner(self, entry: Entry) -> None:
        """Wait a little for the connection that the peer has dialed."""
        if entry.machine.connection is not None:
            return
        entry.settled.clear()
        try:
            async with asyncio.timeout(DUPLICATE_WAIT_S):
                await entry.settled.wait()
        except TimeoutError:
            entry.machine.on_dial_failed()

    async def _await_proof(self, entry: Entry) -> None:
        """Wait until a connection that was taken is open at the peer too, or ends."""
        connection = entry.machine.connection
        assert connection is not None  # nobody else dials
        entry.settled.clear()
        try:
            async with asyncio.timeout(self._worker.options.connect_timeout_s):
                await entry.settled.wait()
        except TimeoutError:
            if not connection.is_broken:  # else its end is decided elsewhere
                connection.end(ConnectionLostError("its dialer does not use it"))

    def _usable(self, member: Member) -> list[Address]:
        """Return the addresses that this worker can use, best first."""
        found = []
        for text in member.addresses:
            address = Address.parse(text)
            if address.scheme not in self._worker.connectors:
                continue
            if address.scheme == "uds" and member.host_id not in ("", HOST_ID):
                continue
            if address.is_loopback and member.host_id not in ("", HOST_ID):
                continue
            found.append(address)
        order = {"mem": 0, "uds": 1, "tcp": 2}
        return sorted(found, key=lambda address: order[address.scheme])

    def _closed(self) -> ClosedError:
        return ClosedError(f"the worker {self._worker.name!r} is shut down")

    def _unreachable(self, entry: Entry, error: BaseException) -> WorkerLostError:
        timeout_s = self._worker.options.connect_timeout_s
        why = f"no connection in {timeout_s:g} s" if not str(error) else str(error)
        return WorkerLostError(
            f"it cannot be reached: {why}",
            to=entry.member.name,
            function="connect",
            outcome=Outcome.NOT_EXECUTED,
        )

    # --- both ends of the handshake --------------------------------------------------

    def accept(self) -> Connection:
        """Make the handler of a connection that somebody dials."""
        connection = self._new_connection(Role.ACCEPTOR, None, 0)
        self.admission.admit(connection)
        return connection

    def _new_connection(
        self, role: Role, entry: Entry | None, attempt: int
    ) -> Connection:
        worker = self._worker

        def on_proved(connection: Connection) -> None:
            if entry is not None and self._is_trusted(connection):
                expects = entry.member.name
                connection.hello(worker.hello(expects=expects, attempt=attempt))

        def on_hello(connection: Connection, hello: Hello) -> None:
            if entry is not None:
                self._on_answer(entry, connection, hello)
            else:
                self._on_offer(connection, hello)

        return self.make_connection(role, on_proved, on_hello)

    def make_connection(
        self,
        role: Role,
        on_proved: Callable[[Connection], None],
        on_hello: Callable[[Connection, Hello], None],
    ) -> Connection:
        """Make a connection that is ended with this directory.

        Args:
            role: which end of it this is.
            on_proved: called once both ends have proved that they know the secret.
            on_hello: called with the peer's HELLO.
        """
        worker = self._worker
        connection = Connection(
            role,
            worker.secret_for_connections,
            loop=worker.loop,
            limits=worker.options.limits,
            make_buffer=worker.receive_pool.make,
            nonce=worker.random_bytes(NONCE_BYTES),
            poller=worker.spinner,
            on_proved=on_proved,
            on_hello=on_hello,
        )
        connection.on_lost = self._on_lost
        # Not before there is a transport: what never had one never ends either.
        connection.on_made = self._note_made
        return connection

    def _note_made(self, connection: Connection) -> None:
        self._connections[connection] = None

    def _on_answer(self, entry: Entry, connection: Connection, hello: Hello) -> None:
        """The worker that we dialed has answered."""
        if not self._is_trusted(connection):
            return
        if not hello.verdict and hello.name != entry.member.name:
            connection.fail(
                ConnectError(
                    f"{connection.where} is worker {hello.name!r}, not "
                    f"{entry.member.name!r}: the addresses given for it are stale"
                )
            )
            return
        if hello.verdict:
            connection.open_to(SILENT)
            return
        verdict = entry.machine.on_answer(hello.incarnation)
        if not verdict.accept:
            connection.fail(ConnectError("the peer's own connection survives"))
            return
        if verdict.replaced is not None:
            verdict.replaced.end(ConnectionLostError("replaced by a newer connection"))
        self._open(entry, connection, hello, dialed=True)

    @property
    def early_dials(self) -> int:
        """How many wait for this worker to have started."""
        return len(self._early or ())

    def serve(self) -> None:
        """Take up the connections of those who dialed while this worker was starting.

        The first to know of everyone may call the last, whose functions must find a
        worker that knows everyone too.
        """
        early, self._early = self._early or [], None
        for connection, hello in early:
            if not connection.ended.done():
                self._on_offer(connection, hello)

    def _on_offer(self, connection: Connection, hello: Hello) -> None:
        """A worker dials us."""
        if self._early is not None:
            self._early.append((connection, hello))
            return
        if not self._is_trusted(connection):
            return
        if hello.lane or hello.resume:
            take = self._on_lane_offer if hello.lane else self._on_resume_offer
            take(connection, hello)
            return
        if not hello.expects and not self._closing:
            self._worker.membership.take_in(connection, hello)
            return
        verdict = self._verdict(connection, hello)
        connection.hello(self._worker.hello(verdict=verdict))
        if verdict:
            connection.open_to(SILENT)
            connection.close()

    def _verdict(self, connection: Connection, hello: Hello) -> str:
        """Take a connection, or say why not."""
        worker = self._worker
        if self._closing:
            return "it is shutting down"
        if hello.expects != worker.name:
            return f"this is worker {worker.name!r}, not {hello.expects!r}"
        if hello.name == worker.name:
            return self._accept_own(connection, hello)
        if refusal := self._worker.membership.refusal(hello):
            return refusal
        self._learn(hello)
        entry = self._entries[hello.name]
        offer = entry.machine.on_offer(hello.incarnation, hello.attempt)
        if not offer.accept:
            return DUPLICATE
        if offer.replaced is not None:
            offer.replaced.end(ConnectionLostError("it has given up the connection"))
        self._open(entry, connection, hello, dialed=False)
        return ""

    def _accept_own(self, connection: Connection, hello: Hello) -> str:
        """Accept our own dial: calls to oneself go through a connection too."""
        if hello.incarnation != self._worker.incarnation:
            return f"the name {hello.name!r} is taken by this worker"
        self._attach(connection, hello)
        return ""

    def _learn(self, hello: Hello) -> None:
        """Take note of a worker that introduces itself, or has been restarted."""
        entry = self._entries.get(hello.name)
        if entry is not None and entry.member.incarnation == hello.incarnation:
            return
        connection = None if entry is None else entry.machine.connection
        if connection is not None:
            connection.end(ConnectionLostError("the worker has been restarted"))
        incarnation = Incarnation(hello.incarnation)
        self.add(
            [
                Member(
                    hello.name,
                    hello.rank,
                    incarnation,
                    hello.addresses,
                    hello.host_id,
                )
            ]
        )

    def _is_trusted(self, connection: Connection) -> bool:
        """Check whom the kernel says the peer is, where no secret vouches for it."""
        credentials = connection.credentials
        if self._worker.secret_for_connections or credentials is None:
            return True
        if credentials.uid == os.getuid():
            return True
        connection.fail(
            AuthenticationError(
                f"the peer runs as user {credentials.uid}, this worker as "
                f"{os.getuid()}; workers of different users need a secret"
            )
        )
        return False

    def _open(
        self, entry: Entry, connection: Connection, hello: Hello, *, dialed: bool
    ) -> None:
        if entry.member.incarnation != hello.incarnation:
            self._learn(hello)
        entry.machine.on_open(connection, dialed=dialed)
        link = self._attach(connection, hello)
        self._by_incarnation[link.peer.incarnation] = link
        if dialed:
            connection.acknowledge(0)  # says that it is open here
            entry.set_link(link)
        else:
            link.is_proven = False
            connection.open_to(FirstMessage(link, partial(entry.on_first, link)))

    def _attach(self, connection: Connection, hello: Hello) -> Link:
        peer = WorkerId(hello.name, Incarnation(hello.incarnation))
        link = Link(self._worker, peer, connection)
        self._links[connection] = link
        member = self._entries[hello.name].member
        connection.prepare_lanes(partial(self._lanes_for, connection, member))
        connection.awaited = link.pending.calls
        connection.open_to(link)
        if peer.incarnation != self._worker.incarnation:
            self.allow_resuming(connection, link)
            self._liveness.watch(link)
            self._worker.watch.on_peer(hello)
        if peer.incarnation in self._lost:
            del self._lost[peer.incarnation]
            self._worker.on_peer_back(peer)
        self._worker.memory.on_link(link)
        self._worker.membership.on_link(link)
        return link

    # --- the end ---------------------------------------------------------------------

    def _on_lost(self, connection: Connection, error: AsyncRpcError | None) -> None:
        self._connections.pop(connection, None)
        link = self._links.pop(connection, None)
        if link is None:
            return
        self._liveness.forget(connection)
        reason = str(error) if error is not None else ""
        entry = self._entries.get(link.peer.name)
        if entry is not None:
            entry.on_lost(connection)
        if self._by_incarnation.get(link.peer.incarnation) is link:
            del self._by_incarnation[link.peer.incarnation]
        reason = reason or connection.peer_closed or "it closed the connection"
        link.on_lost(reason)
        # One that was never in use says nothing of the peer, which may hold another.
        if link.peer.name != self._worker.name and link.is_proven:
            self._lost[link.peer.incarnation] = None
            if len(self._lost) > LOST_MAX:
                del self._lost[next(iter(self._lost))]
            self._worker.counters.workers_lost += 1
            self._worker.on_peer_lost(link.peer, reason)

    def _set_broken(self, connection: Connection, *, broken: bool) -> None:
        link = self._links.get(connection)
        entry = None if link is None else self._entries.get(link.peer.name)
        if link is None or entry is None or entry.machine.connection is not connection:
            return
        if broken:
            entry.link, entry.broken = None, link
        else:
            entry.on_first(link)  # only who holds a connection resumes it
            entry.set_link(link)

    def _control_of(self, connection: Connection) -> Connection:
        return connection.ack_through

    def _member_named(self, name: str) -> Member:
        return self._entries[name].member

    async def close_lanes(self, timeout_s: float) -> None:
        """Send what large payloads are left, then end the lanes.

        Args:
            timeout_s: seconds; lanes that take longer are left as they are.
        """
        lanes = [one.lanes for one in self._links if one.lanes is not None]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await asyncio.gather(*(one.close() for one in lanes))

    async def close(self, timeout_s: float) -> None:
        """End every connection, in order where the peer still listens."""
        self._closing = True
        await self.close_lanes(timeout_s)
        for connection in tuple(self._connections):
            connection.close()
        ended = [connection.ended for connection in tuple(self._connections)]
        if ended:
            await asyncio.wait(ended, timeout=timeout_s)
        for connection in tuple(self._connections):
            connection.fail(ClosedError("the worker is shut down"))
        left = [connection.ended for connection in tuple(self._connections)]
        if left:
            await asyncio.wait(left, timeout=1.0)


def _has_news(entry: Entry, dialled: Member) -> bool:
    """Say whether a peer has dialed itself, or is known to be elsewhere now."""
    return entry.machine.connection is not None or entry.member != dialled
