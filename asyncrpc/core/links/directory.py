"""The directory: the known workers, and the link to each.

A connection is made on first use, by the side that needs it first; if both dial at
once, the machine in `machine.pool` decides which one survives.  Its parts do the rest:
`Connections` makes connections, `Dialer` dials, `Reconnector` resumes broken ones,
`LaneDialer` opens lanes, `Liveness` judges peers, `Admission` limits strangers.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final

from asyncrpc.core.counters import Counters
from asyncrpc.core.identity import WorkerIdentity
from asyncrpc.core.ids import Incarnation, WorkerId
from asyncrpc.core.links.admission import Admission
from asyncrpc.core.links.connection import Connection
from asyncrpc.core.links.connections import Connections
from asyncrpc.core.links.dialer import Dialer
from asyncrpc.core.links.entry import FirstMessage, PeerEntry
from asyncrpc.core.links.lane_dialer import LaneDialer
from asyncrpc.core.links.link import Link
from asyncrpc.core.links.liveness import Liveness
from asyncrpc.core.links.machine.pool import DUPLICATE
from asyncrpc.core.links.observers import Observers
from asyncrpc.core.links.peer_table import PeerTable
from asyncrpc.core.links.ports import GroupRecords
from asyncrpc.core.links.reconnector import Reconnector
from asyncrpc.core.links.relay import Relay
from asyncrpc.core.links.routes import Routes
from asyncrpc.core.links.sidecar import Sidecar
from asyncrpc.core.links.sinks import SILENT
from asyncrpc.core.links.tokens import Tokens
from asyncrpc.core.members import Member, member_of
from asyncrpc.core.payloads.ports import MemoryIsReady
from asyncrpc.core.services.ports import Scheduler
from asyncrpc.core.services.registry import Services
from asyncrpc.core.trace.recorder import FlightRecorder
from asyncrpc.core.transport.abc import Connector
from asyncrpc.core.wire.frames import Hello
from asyncrpc.core.wire.handshake import Role
from asyncrpc.errors import (
    AsyncRpcError,
    ClosedError,
    ConnectError,
    ConnectionLostError,
    RefusedError,
    WorkerLostError,
    rebuild,
)

LOST_MAX: Final = 4096  # incarnations that are remembered as lost


@dataclass(frozen=True, slots=True)
class DirectorySettings:
    """What bounds a directory.

    Attributes:
        connect_timeout_s: seconds that a dial may take.
        handshake_timeout_s: seconds that a dialer may take to introduce itself.
        handshakes_max: connections that may wait for that at a time.
        heartbeat_s: seconds after which a silent peer is asked whether it is there.
        lost_after_s: seconds after which a silent peer is lost.
        bulk_lanes: how many lanes a connection has; None: as many as help.
        memory_is_ready: whether memory of payloads may be written to now; None: all
            memory may.
        secret: proves who this worker is to the sidecars of peers; None: there is
            no secret.
        tokens: those that this worker has issued.
    """

    connect_timeout_s: float
    handshake_timeout_s: float
    handshakes_max: int
    heartbeat_s: float
    lost_after_s: float
    bulk_lanes: int | None
    memory_is_ready: MemoryIsReady | None
    secret: bytes | None
    tokens: Tokens


class Directory:
    """The workers that one worker knows.

    Attributes:
        connections: the open ones.
        routes: the addresses of the others.
        admission: connections that have not introduced themselves.
        reconnector: resumes broken connections.
        lane_dialer: opens lanes.
        relay: passes on the connections of guests.
        observers: connections of observers.
        give_rank: see `PeerTable`.
    """

    def __init__(
        self,
        identity: WorkerIdentity,
        scheduler: Scheduler,
        counters: Counters,
        recorder: FlightRecorder,
        settings: DirectorySettings,
        *,
        connections: Connections,
        connectors: Mapping[str, Connector],
        make_link: Callable[[WorkerId, Connection], Link],
        services: Services,
        sidecar: Sidecar,
    ) -> None:
        """Prepare; no worker is known yet.

        Args:
            connectors: by scheme; they may come later.
        """
        self._identity = identity
        self._scheduler = scheduler
        self._counters = counters
        self._recorder = recorder
        self._make_link = make_link
        self._services = services
        self._group: GroupRecords | None = None
        self._on_link: tuple[Callable[[Link], None], ...] = ()
        self._table: PeerTable = PeerTable(identity)
        self.met = self._table.met
        self.give_rank = self._table.give_rank
        self._links: dict[Connection, Link] = {}
        self._by_incarnation: dict[Incarnation, Link] = {}
        # Connections accepted before `serve`; bounded by `LimitOptions.handshakes_max`.
        self._early: list[tuple[Connection, Hello]] | None = []
        # Peers that were given up and may be back: a partition that has healed.
        self._lost: dict[Incarnation, None] = {}
        self.connections = connections
        self.connections.on_lost = self._on_lost
        self.routes = Routes(connectors, timeout_s=settings.connect_timeout_s)
        self.admission = Admission(
            identity,
            scheduler.loop,
            counters,
            handshakes_max=settings.handshakes_max,
            timeout_s=settings.handshake_timeout_s,
        )
        self.observers = Observers(identity, scheduler)
        self._liveness = Liveness(
            scheduler,
            sidecar,
            heartbeat_s=settings.heartbeat_s,
            lost_after_s=settings.lost_after_s,
            secret=settings.secret,
        )
        ways = identity, counters, self.routes, self.connections
        self._dialer: Dialer = Dialer(*ways, self, processes=self._liveness)
        self.relay = Relay(identity, scheduler, self, self.connections, settings.tokens)
        self._dialer.ask_to_dial = self.relay.ask_to_dial
        self.reconnector = Reconnector(
            identity,
            scheduler,
            counters,
            routes=self.routes,
            handshakes=self.connections,
            judge=self._liveness,
            directory=self,
            lost_after_s=settings.lost_after_s,
        )
        self._liveness.on_network_suspected = self.reconnector.try_another_way
        self.lane_dialer = LaneDialer(
            identity,
            scheduler,
            self.routes,
            self.connections,
            wanted=settings.bulk_lanes,
            redial=self.reconnector.on_peer_broken,
            is_ready=settings.memory_is_ready,
        )

    def begin(self, group: GroupRecords, *on_link: Callable[[Link], None]) -> None:
        """Begin, with the parts of the worker that rely on this one."""
        self._group = self.relay.group = group
        self._on_link = on_link

    # --- the known workers -----------------------------------------------------------

    def add(self, members: Iterable[Member]) -> None:
        """Add workers."""
        self._table.add(members)

    def known_incarnation(self, name: str) -> Incarnation | None:
        """Return the incarnation that calls to a worker go to; None if not known."""
        return self._table.incarnation_of(name)

    @property
    def members(self) -> list[Member]:
        """Every worker that is known, by rank and name."""
        return sorted(self._table, key=lambda member: (member.rank, member.name))

    def member(self, to: str | int) -> Member:
        """Return what is known of a worker, by name or rank."""
        return self._table.member(to)

    def find(self, to: str | int) -> PeerEntry:
        """Return the entry of a worker by name or rank; make it at the first use."""
        return self._table.find(to)

    def forget(self, name: str) -> None:
        """Let go of a worker that ended long ago, unless there is a link to it."""
        self._table.forget(name)

    def link_to(self, name: str) -> Link | None:
        """Return the open link to a worker; None if there is none yet."""
        entry = self.met(name)
        if entry is None:
            self.member(name)
            return None
        return entry.link

    @property
    def links(self) -> list[Link]:
        """The links of every open connection, accepted ones to ourselves included."""
        return list(self._links.values())

    def link_of(self, incarnation: Incarnation) -> Link | None:
        """Return the open link to a worker's incarnation."""
        return self._by_incarnation.get(incarnation)

    # --- connecting ------------------------------------------------------------------

    async def open_link(self, to: str | int) -> Link:
        """Return the link to a worker by name or rank, connecting if need be."""
        entry = self.find(to)
        return entry.link or await self.connect(entry)

    async def connect(self, entry: PeerEntry) -> Link:
        """Return the link to a worker, making a connection if needed."""
        link = await self._connect(entry)
        while link.is_lost:  # in the turn in which its dial ended: nothing was sent
            link = await self._connect(entry)
        return link

    async def _connect(self, entry: PeerEntry, *, again: bool = True) -> Link:
        while entry.broken is not None and not self.connections.is_closing:
            # It ends with the connection, which `close` and `lost_after_s` end.
            await entry.broken.connection.resumption.settled()
        if entry.link is not None:
            return entry.link
        if self.connections.is_closing:
            raise self._closed()
        joined = entry.dial is not None
        if entry.dial is None:
            dialing = self._dialer.dial(entry, self._group)
            entry.dial = self._scheduler.start_task(dialing)
            entry.dial.add_done_callback(entry.on_dialed)
        try:
            return await self._await_dial(entry.dial)
        except WorkerLostError as error:
            # No process listened before this caller came; by now one may.
            if not (joined and again and isinstance(error.__cause__, RefusedError)):
                raise
        return await self._connect(entry, again=False)

    async def _await_dial(self, dial: asyncio.Task[Link]) -> Link:
        try:
            return await asyncio.shield(dial)  # of so many attempts, each with a limit
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if dial.cancelled() and not (task and task.cancelling()):
                raise self._closed() from None  # not cancelled itself
            raise
        except AsyncRpcError as error:
            # A copy for each waiter: an error keeps the frames that it has passed, and
            # with them what their callers hold.  So it has no name here, either.
            raise rebuild(type(error), error.args, dict(vars(error))) from (
                error.__cause__
            )

    def _closed(self) -> ClosedError:
        return ClosedError(f"the worker {self._identity.name!r} is shut down")

    def on_answer(self, entry: PeerEntry, connection: Connection, hello: Hello) -> None:
        """The worker that we dialed has answered."""
        if not self.connections.is_trusted(connection):
            return
        if hello.verdict:
            connection.open_to(SILENT)
            return
        name = entry.member.name
        if gateway := entry.member.gateway:  # which has not seen what its guest answers
            hello = self.relay.introduce(connection, hello, gateway)
        why = "" if self._group is None else self._group.refusal(hello)
        if hello.name != name:
            why = f"it is worker {hello.name!r}: the addresses of {name!r} are stale"
        if why:
            connection.fail(ConnectError(f"{connection.where}: {why}"))
            return
        verdict = entry.machine.on_answer(hello.incarnation)
        if not verdict.accept:
            why = "the connection that the peer dialed is kept instead"
            connection.fail(ConnectError(why))
            return
        if verdict.replaced is not None:
            verdict.replaced.end(ConnectionLostError("replaced by a newer connection"))
        self._open(entry, connection, hello, dialed=True)

    # --- being dialed ----------------------------------------------------------------

    def accept(self) -> Connection:
        """Make the handler of an incoming connection."""
        connection = self.connections.make(
            Role.ACCEPTOR, lambda _connection: None, self._on_offer
        )
        self.admission.admit(connection)
        return connection

    @property
    def early_joiners(self) -> list[str]:
        """Names of the workers that ask to join while this worker is starting."""
        early = self._early or ()
        return sorted({hello.name for _, hello in early if not hello.expects})

    def serve(self) -> None:
        """Accept the connections that were dialed while this worker was starting.

        The first worker that knows all others may call the last one, whose functions
        must find a worker that knows all others as well.
        """
        early, self._early = self._early or [], None
        for connection, hello in early:
            if not connection.ended.done():
                self._on_offer(connection, hello)

    def _on_offer(self, connection: Connection, hello: Hello) -> None:
        """A worker dials us, or an observer, which may also look at a start."""
        if self._early is not None and not hello.observes:
            self._early.append((connection, hello))
            return
        if not self.connections.is_trusted(connection):
            return
        if hello.observes:
            if refusal := self.observers.refusal(connection):
                self.connections.refuse(connection, refusal)
            else:
                self.observers.take(connection, hello)
            return
        token = hello.token
        if self.relay.is_guest(connection):
            if not self.relay.lets_in(connection, hello):
                return
            hello = self.relay.introduce(connection, hello)
        is_judged_later = not hello.expects or hello.lane or hello.resume
        if self._group is None or is_judged_later or not self._group.is_claimed(hello):
            self._pass_offer(connection, hello, token)
        else:
            self._scheduler.start_task(self._contest(connection, hello, token))

    async def _contest(self, connection: Connection, hello: Hello, token: int) -> None:
        """Let a worker in unless another one that lives has its name or rank."""
        assert self._group is not None
        why = await self._group.claim(hello)
        if connection.ended.done():
            return
        if why:
            self.connections.refuse(connection, why)
        else:
            self._pass_offer(connection, hello, token)

    def _pass_offer(self, connection: Connection, hello: Hello, token: int) -> None:
        """Take an offer, or pass it on to the member that a guest wants."""
        is_here = hello.expects in ("", self._identity.name)
        if self.relay.is_guest(connection) and not is_here:
            self.relay.forward(connection, hello, token)
        else:
            self.take_offer(connection, hello)

    def take_offer(self, connection: Connection, hello: Hello) -> None:
        """A worker that may be spoken to dials this one; for a guest, its gateway."""
        if hello.lane:
            self.lane_dialer.on_offer(connection, hello)
            return
        if hello.resume:
            self.reconnector.on_offer(connection, hello)
            return
        is_closing, group = self.connections.is_closing, self._group
        if not hello.expects and not is_closing and group is not None:
            group.take_in(connection, hello)
            return
        verdict = self._verdict(connection, hello)
        if verdict:
            self.connections.refuse(connection, verdict)
        else:
            connection.hello(self._identity.hello())

    def _verdict(self, connection: Connection, hello: Hello) -> str:
        """Accept a connection, or return why not."""
        identity = self._identity
        if self.connections.is_closing:
            return "it is shutting down"
        if hello.expects != identity.name:
            return f"this is worker {identity.name!r}, not {hello.expects!r}"
        if hello.name == identity.name:
            return self._accept_own(connection, hello)
        if self._group is not None and (refusal := self._group.refusal(hello)):
            return refusal
        self._learn(hello)
        entry = self.find(hello.name)
        offer = entry.machine.on_offer(hello.incarnation, hello.attempt)
        if not offer.accept:
            return DUPLICATE
        if offer.replaced is not None:
            offer.replaced.end(
                ConnectionLostError("the peer has given up the connection")
            )
        self._open(entry, connection, hello, dialed=False)
        return ""

    def _accept_own(self, connection: Connection, hello: Hello) -> str:
        """Accept our own dial: calls to oneself go through a connection too."""
        if hello.incarnation != self._identity.incarnation:
            return f"the name {hello.name!r} is taken by this worker"
        self._attach(connection, hello)
        return ""

    # --- both ------------------------------------------------------------------------

    def _learn(self, hello: Hello) -> None:
        """Record a worker that introduces itself, or has been restarted."""
        if self.known_incarnation(hello.name) == hello.incarnation:
            return
        entry = self.met(hello.name)
        connection = None if entry is None else entry.machine.connection
        if connection is not None:
            connection.end(ConnectionLostError("the worker has been restarted"))
        self.add([member_of(hello)])

    def _open(
        self,
        entry: PeerEntry,
        connection: Connection,
        hello: Hello,
        *,
        dialed: bool,
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
            connection.open_to(FirstMessage(entry, link))

    def _attach(self, connection: Connection, hello: Hello) -> Link:
        peer = WorkerId(hello.name, Incarnation(hello.incarnation))
        link = self._make_link(peer, connection)
        self._links[connection] = link
        self._note(peer, "opened")
        self.lane_dialer.prepare(connection, self.member(hello.name))
        connection.stream.awaited = link.pending.calls
        connection.open_to(link)
        if peer.incarnation != self._identity.incarnation:
            connection.allow_resuming(
                self.reconnector.on_broken, partial(_next_call_id, link)
            )
            self._liveness.judge(connection, hello)
        if peer.incarnation in self._lost:
            del self._lost[peer.incarnation]
            self._services.on_peer_back(peer)
        for tell in self._on_link:
            tell(link)
        return link

    # --- the end ---------------------------------------------------------------------

    def _on_lost(self, connection: Connection, error: AsyncRpcError | None) -> None:
        self.reconnector.forget(connection)
        link = self._links.pop(connection, None)
        if link is None:
            return
        self._liveness.forget(connection)
        reason = str(error) if error is not None else ""
        entry = self.met(link.peer.name)
        if entry is not None:
            entry.on_lost(connection)
        if self._by_incarnation.get(link.peer.incarnation) is link:
            del self._by_incarnation[link.peer.incarnation]
        reason = reason or connection.peer_closed or "it closed the connection"
        self._note(link.peer, "ended", reason)
        link.on_lost(reason)
        is_other = link.peer.name != self._identity.name
        if is_other and not link.is_proven and self._group is not None:
            self._group.on_unused_lost(link.peer)  # it may hold another, or be gone
        elif is_other and link.is_proven:
            self._lost[link.peer.incarnation] = None
            if len(self._lost) > LOST_MAX:
                del self._lost[next(iter(self._lost))]
            self._counters.workers_lost += 1
            self._services.on_peer_lost(link.peer, reason)

    def set_broken(self, connection: Connection, *, broken: bool) -> None:
        """Make new calls wait while the connection to their peer is broken."""
        link = self._links.get(connection)
        entry = None if link is None else self.met(link.peer.name)
        if link is not None:
            self._note(link.peer, "broken" if broken else "resumed")
        if link is None or entry is None or entry.machine.connection is not connection:
            return
        if broken:
            entry.set_broken(link)
        else:
            entry.on_first(link)  # only a holder of the connection resumes it
            entry.set_link(link)

    def _note(self, peer: WorkerId, change: str, reason: str = "") -> None:
        recorder = self._recorder
        recorder.links.record((recorder.now_s(), peer, change, reason))

    async def close_lanes(self, timeout_s: float) -> None:
        """Send the large payloads that are left, then end the lanes.

        Args:
            timeout_s: seconds; lanes that take longer are left as they are.
        """
        of_links = [link.connection.lanes for link in self._links.values()]
        open_lanes = [lanes for lanes in of_links if lanes is not None]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await asyncio.gather(*(lanes.close() for lanes in open_lanes))

    async def close(self, timeout_s: float) -> None:
        """End every connection, in order where the peer still listens."""
        self.connections.is_closing = True
        await self.close_lanes(timeout_s)
        await self.connections.close(timeout_s)


def _next_call_id(link: Link) -> int:
    return link.pending.next_id
