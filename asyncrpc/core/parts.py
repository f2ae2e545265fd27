"""The parts of one worker, and which part is given which others.

Each part takes what it needs and no more; only here all of them are known.  What is
built on workers (references, autograd, collectives) takes its parts from here, too.
"""

from __future__ import annotations

import asyncio
import contextvars
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from asyncrpc.core.barriers.graceful_shutdown import GracefulShutdown
from asyncrpc.core.barriers.service import BarrierService
from asyncrpc.core.calls.code import CodeExchange
from asyncrpc.core.calls.context import Deadlines, current_worker_var
from asyncrpc.core.calls.credit import InboundCredit
from asyncrpc.core.calls.error_encoder import ErrorEncoder
from asyncrpc.core.calls.inbound import InboundCall
from asyncrpc.core.calls.peer_memory import OutboundBudget
from asyncrpc.core.calls.requests import CallAdmission
from asyncrpc.core.calls.targets import Targets
from asyncrpc.core.counters import Counters
from asyncrpc.core.devices.backends import DeviceLockHooks, backend_of
from asyncrpc.core.devices.device_lock import DeviceLock
from asyncrpc.core.devices.staging import Devices
from asyncrpc.core.host.shortage import shortage_of
from asyncrpc.core.host.socket_directory import SocketDirectory
from asyncrpc.core.identity import WorkerIdentity
from asyncrpc.core.ids import Incarnation, WorkerId, WorkerInfo
from asyncrpc.core.lifecycle import Lifecycle, refuse_to_pickle
from asyncrpc.core.links.admission import (
    check_listen_address,
    warn_of_short_secret,
)
from asyncrpc.core.links.connection import Connection
from asyncrpc.core.links.connections import Connections, ConnectionSettings
from asyncrpc.core.links.directory import Directory, DirectorySettings
from asyncrpc.core.links.link import Link
from asyncrpc.core.links.routes import default_addresses, open_connectors
from asyncrpc.core.links.sidecar import Listening, Sidecar
from asyncrpc.core.links.tokens import Token, Tokens
from asyncrpc.core.loop.loops import LoopGuard
from asyncrpc.core.loop.spin import spinner_for
from asyncrpc.core.loop.tasks import Tasks
from asyncrpc.core.loop.threads import ThreadPool
from asyncrpc.core.membership.comparison import MembershipTimes
from asyncrpc.core.membership.rendezvous import (
    JoinRendezvous,
    Rendezvous,
    gateway_from,
)
from asyncrpc.core.membership.service import MembershipService
from asyncrpc.core.options import Options
from asyncrpc.core.payloads.prefaulting import Prefaulting
from asyncrpc.core.payloads.receive_pool import ReceivePool
from asyncrpc.core.payloads.sharing import Sharing
from asyncrpc.core.peers.peer import CallStarter, Peer
from asyncrpc.core.serde import Codec, FunctionTable, Limits
from asyncrpc.core.serde.by_value import main_has_a_file
from asyncrpc.core.services.extensions import CallTracer, Propagator, References
from asyncrpc.core.services.registry import Services
from asyncrpc.core.trace.recorder import FlightRecorder
from asyncrpc.core.transport.abc import Connector, Listener
from asyncrpc.core.transport.address import Address
from asyncrpc.core.transport.tcp import TcpListener
from asyncrpc.core.wire.frames import ADDRESSES_CHARACTERS_MAX
from asyncrpc.errors import AsyncRpcError, TransportError, UsageError

T = TypeVar("T")


class Parts:
    """The parts of one worker.

    Attributes:
        identity: of the worker.
        lifecycle: its state.
        loop_guard: refuses the worker outside its own event loop.
        options: as given, completed from the environment.
        counters: count what happens to it.
        recorder: keeps the last events.
        calls: starts calls.
        admission: counts the calls that are served.
        targets: the functions that peers may call.
        services: take messages of peers.
        extensions: called in this order when the worker starts, each with the parts;
            they add what is built on calls, such as services.
        references: remote references; None: the worker has none.
        propagators: take part in every message.
        tracer: shows calls in traces, see `trace_by`; None: calls are not traced.
        note_of: returns the note beside the answer to a call, from what its function
            has said (`InboundCall.note`); None: there are no notes.
        queues: of requests that come to this worker's process, by name: each returns
            its figures, from any thread; metrics show them.
        on_raised: called with exceptions of called functions; a facade prints them.
        random_bytes: returns unpredictable bytes; a simulation has others.
        make_pool: makes the threads for plain functions; a simulation has others.
        tasks: the event loop and its tasks; this and all that follow exist once the
            worker has been started.
        pool: threads for functions.
        host_pool: threads for work on host memory, which waits for no device.
        directory: the peers, and the links to them.
        membership: the other members.
        memory: shared with peers of the host.
        devices: copies to and from devices.
        code: sends functions without a name to peers, and takes theirs.
        codec: values to bytes, and back.
        deadlines: ends functions that run longer than their callers wait.
        context: of running functions.
    """

    def __init__(
        self,
        identity: WorkerIdentity,
        options: Options,
        rendezvous: Rendezvous,
        network: Connector | None,
    ) -> None:
        self.identity = identity
        self.lifecycle = Lifecycle(identity.name)
        self.loop_guard = LoopGuard(self.lifecycle)
        self.options = options
        self.limits = options.limits
        self.counters = Counters()
        self.recorder = FlightRecorder()
        self.functions = _function_table(rendezvous, options)
        self.targets = Targets(
            self.functions, may_run_on_loop=options.limits.on_loop_bytes_max > 0
        )
        self.calls = CallStarter(self.loop_guard, self.functions, options)
        self.services = Services()
        self.admission = CallAdmission(
            self.lifecycle,
            options.limits.inbound_calls_max,
            lambda: self.recorder.now_s(),  # noqa: PLW0108  (a simulation has another)
            peer_bytes_max=options.limits.peer_bytes_max,
            services_hold=self.services.held_for,
        )
        self.extensions: list[Callable[[Parts], None]] = []
        self.references: References | None = None
        self.propagators: list[Propagator] = []
        self.tracer: CallTracer | None = None
        self.note_of: Callable[[Any], Any] | None = None
        self.queues: dict[str, Callable[[], Mapping[str, float]]] = {}
        self.on_raised: Callable[[BaseException], None] | None = None
        self.random_bytes: Callable[[int], bytes] = os.urandom
        self.make_pool: Callable[[], ThreadPool] = self._make_pool
        self.rendezvous = rendezvous
        self.network = network
        self.listeners: list[Listener] = []
        self.socket_directory: SocketDirectory | None = None
        self.connectors: dict[str, Connector] = {}
        self.sidecar = Sidecar(identity, options)
        own = None if options.token is None else Token.parse(options.token)
        self.tokens = Tokens(os.urandom, own)
        self.is_for_loop = False  # `init_rpc` left it running, for any task of its loop
        identity.addresses_of = lambda: self.addresses
        identity.sidecar_at = lambda: self.sidecar.addresses

        calls, services = self.calls, self.services
        self.hello = identity.hello
        self.name = identity.name
        self.target = self.targets.target
        self.mode_of_method = self.targets.mode_of_method
        self.service, self.add_service = services.named, services.add
        self.find_service = services.of_kind
        self.router = services.router
        self.link_to, self.expect = calls.link_to, calls.expect
        self.describe, self.meta_here = calls.describe, calls.meta_here
        self.new_call, self.begin, self.is_known = (
            *(calls.new_call, calls.begin, calls.is_known),
        )
        self.start_call, self.start_remote = calls.start_call, calls.start_remote
        self.thread_states, self.unsent = calls.thread_states, calls.unsent
        self.check_running = self.lifecycle.check_running
        self.check_on_loop = self.loop_guard.check_on_loop
        self.check_loop = self.loop_guard.check_loop
        self.wait_idle = self.admission.wait_idle

    @property
    def rank(self) -> int:
        return self.identity.rank

    @property
    def id(self) -> WorkerId:
        return self.identity.id

    @property
    def active(self) -> int:
        return self.admission.active

    @property
    def is_draining(self) -> bool:
        return self.lifecycle.is_draining

    @property
    def is_closed(self) -> bool:
        return not self.lifecycle.is_usable

    @property
    def is_ending(self) -> bool:
        return self.graceful_shutdown.has_begun

    @property
    def known_members(self) -> list[WorkerInfo]:
        return self.membership.known

    def open_link_to(self, to: str) -> Link | None:
        return self.directory.link_to(to)

    def incarnation_of(self, to: str) -> Incarnation | None:
        return self.directory.known_incarnation(to)

    async def find_member(self, name: str, timeout_s: float) -> None:
        await self.membership.find(name, timeout_s)

    def peer(self, to: str | int) -> Peer:
        if isinstance(to, str) and to in self.calls.expected:
            return Peer(self.calls, to)
        return Peer(self.calls, self.directory.member(to).name)

    def trace_by(self, tracer: CallTracer) -> None:
        """Show the calls that are made and served from now on in traces."""
        self.tracer = self.calls.tracer = tracer

    def __reduce__(self) -> Any:
        """Refuse to be pickled, as part of a `Worker`."""
        refuse_to_pickle()

    # --- starting --------------------------------------------------------------------

    def open(self, current: object) -> None:
        """Make what needs the event loop, which runs in this thread."""
        loop = asyncio.get_running_loop()
        self.loop = loop
        self.loop_guard.open(loop)
        if self.network is not None:  # a simulation, which has a time of its own
            self.recorder.now_s = loop.time
        self.tasks = Tasks(loop)
        self.start_task = self.tasks.start_task
        self.start_eagerly = self.tasks.start_eagerly
        self.on_loop_thread = self.tasks.on_loop_thread
        self.pool = self.make_pool()
        # Work on host memory does not take the lock of devices.
        self.host_pool = (
            ThreadPool(f"{self.name}-host", self.options.threads, loop)
            if self.pool.is_exclusive
            else self.pool
        )
        # In a simulation time stands still while the loop works: nothing to poll for.
        self.spinner = (
            None
            if self.network is not None
            else spinner_for(self.options.network.spin, loop, self.pool, self.host_pool)
        )
        self.receive_pool = ReceivePool(
            loop,
            self.limits.receive_pool_bytes,
            # A simulation has no threads.
            Prefaulting(loop, self.host_pool.submit) if self.network is None else None,
        )
        self.inbound_credit = InboundCredit(
            self.name, loop, self.limits.inbound_bytes_max, self.receive_pool.allow
        )
        self.outbound_budget = OutboundBudget(self.limits.outbound_bytes_max)
        self.deadlines = Deadlines(loop, InboundCall.expire)
        self.context = contextvars.Context()
        self.context.run(current_worker_var.set, current)
        self.devices = Devices(
            self.name, loop, self.pool, self.options.devices.parsed_names
        )
        identity, tasks = self.identity, self.tasks
        peers = self.directory = self._make_directory()
        self.calls.open(self.tasks, self.directory, self.recorder)
        self.barriers = BarrierService(identity, tasks, peers)
        self.graceful_shutdown = GracefulShutdown(
            self.barriers,
            peers,
            is_active=lambda: bool(self.active or self.unsent.count),
            members=lambda: self.membership.table,
        )
        self.memory = Sharing(self)
        self.code = CodeExchange(self, self.counters)
        self.membership: MembershipService = self._make_membership(peers)
        self.membership.on_life = self.graceful_shutdown.on_life
        peers.begin(self.membership, self.memory.on_link, self.membership.on_link)
        peers.observers.router = self.router
        for service in (
            peers.relay,
            self.barriers,
            *(self.memory, self.memory.regions, self.code, self.membership),
        ):
            self.services.add(service)

    def _make_membership(self, peers: Directory) -> MembershipService:
        return MembershipService(
            self.identity,
            self.tasks,
            peers,
            MembershipTimes(
                self.options.liveness.heartbeat_s,
                self.options.liveness.lost_after_s,
                self.options.network.connect_timeout_s,
            ),
            is_static=self.options.membership == "static",
            is_draining=lambda: self.is_draining,
            on_peer_lost=self.services.on_peer_lost,
            recorder=self.recorder,
        )

    def _make_directory(self) -> Directory:
        settings = ConnectionSettings(
            self.secret_for_connections,
            self.limits.message,
            self.receive_pool.make,
            self.random_bytes,
            self.spinner,
            self.tokens,
        )
        network, liveness = self.options.network, self.options.liveness
        directory = Directory(
            self.identity,
            self.tasks,
            self.counters,
            self.recorder,
            DirectorySettings(
                connect_timeout_s=network.connect_timeout_s,
                handshake_timeout_s=network.handshake_timeout_s,
                handshakes_max=self.limits.handshakes_max,
                heartbeat_s=liveness.heartbeat_s,
                lost_after_s=liveness.lost_after_s,
                bulk_lanes=network.bulk_lanes,
                memory_is_ready=self.receive_pool.is_ready,
                secret=self.options.secret_bytes,
                tokens=self.tokens,
            ),
            connections=Connections(self.identity, self.loop, settings),
            connectors=self.connectors,
            make_link=self._make_link,
            services=self.services,
            sidecar=self.sidecar,
        )
        if self.tokens.own is not None:
            directory.routes.own_name = self.name
            directory.routes.gateway = gateway_from(self.rendezvous)
        return directory

    def _make_link(self, peer: WorkerId, connection: Connection) -> Link:
        hello = connection.peer
        is_other = hello is not None and hello.rank < 0 and peer.name != self.name
        if is_other and not self.functions.main_travels:
            # It has joined without a rank, and may run another program.
            self.functions.let_main_travel()
            self.calls.forget_names()
        return Link(self, self.memory, peer, connection)

    def make_codec(self) -> None:
        """Make the codec, once all extensions are there."""
        message = self.limits.message
        limits = Limits(
            unpacked_bytes_max=message.unpacked_bytes_max,
            elements_max=message.elements_max,
        )
        self.codec = Codec(self.functions, self.references, limits, self.devices)
        self.codec.find_shared = self.memory.regions.find
        self.error_encoder = ErrorEncoder(
            self.codec, worker=self.name, pid=self.identity.pid
        )

    async def enter(self) -> None:
        """Listen, and meet the others."""
        try:
            await self.devices.start()
            await self._listen()
            limit_s = self.options.rendezvous_timeout_s
            await self.membership.enter(self.rendezvous, limit_s)
        except OSError as error:
            why = "" if isinstance(error, AsyncRpcError) else shortage_of(error)
            if not why:
                raise
            raise TransportError(f"worker {self.name!r} cannot start: {why}") from error
        self.sidecar.on_members(self.directory.members)

    def serve(self) -> None:
        """Answer the peers that have dialed meanwhile, and all others from now on."""
        # Its own calls need no way around, and a NAT may not lead back in.
        self.directory.add([replace(self.identity.member, addresses=self.listening)])
        self.directory.serve()
        self.membership.start()

    def _make_pool(self) -> ThreadPool:
        """Return the threads for plain functions."""
        options = self.options
        names = options.devices.parsed_names or ()
        exclusive = [device for device in names if backend_of(device.type).is_exclusive]
        is_exclusive = options.devices.exclusive
        if is_exclusive is None:
            is_exclusive = bool(exclusive)
        turning = DeviceLockHooks(exclusive)
        return ThreadPool(
            self.name,
            options.threads,
            self.loop,
            # If the program asks for a lock, it is one for all devices.
            device_lock=DeviceLock(() if options.devices.exclusive else exclusive)
            if is_exclusive
            else None,
            begin=turning.begin if exclusive else None,
            settle=turning.end if exclusive else None,
        )

    # --- addresses -------------------------------------------------------------------

    @property
    def secret_for_connections(self) -> bytes | None:
        """The secret that both ends of a connection must prove to know."""
        return None if self.network is not None else self.options.secret_bytes

    @property
    def addresses(self) -> tuple[str, ...]:
        """Return the addresses at which others can reach this worker."""
        if self.tokens.own is not None:
            return ()  # its gateway tells how it is reached
        return self.options.network.advertise or self.listening

    @property
    def listening(self) -> tuple[str, ...]:
        """Every address at which this worker listens."""
        return tuple(
            str(address)
            for listener in self.listeners
            for address in listener.addresses
        )

    async def _listen(self) -> None:
        doors, make_room = self.sidecar.doors, self.directory.admission.make_room
        self.connectors.update(
            open_connectors(self.options, self.network, doors, make_room)
        )
        if self.network is not None:
            where: Sequence[str] = (f"{self.network.scheme}://{self.name}",)
        else:
            where = self.options.network.listen or self._default_addresses()
            warn_of_short_secret(self.name, self.options.secret_bytes)
        for text in where:
            address = Address.parse(text)
            check_listen_address(address, self.options)
            connector = self.connectors[address.scheme]
            listener = await connector.listen(address, self.directory.accept)
            self.listeners.append(listener)
            if address.scheme == "uds":
                await self.memory.listen(address.host)
        if (length := sum(map(len, self.addresses))) > ADDRESSES_CHARACTERS_MAX:
            raise UsageError(
                f"the addresses of this worker take {length} characters, and peers take"
                f" {ADDRESSES_CHARACTERS_MAX}; name those that others should use in"
                " NetworkOptions.advertise"
            )
        if self.network is None:
            self.sidecar.start(self._sidecar_listening(), self.tasks)
            self.services.on_listening(self.listening)

    def _sidecar_listening(self) -> Listening:
        """Return where peers on other hosts can ask whether this worker runs."""
        listeners = tuple(
            listener for listener in self.listeners if isinstance(listener, TcpListener)
        )
        published = (
            address for address in self.addresses if address.startswith("tcp://")
        )

        async def adopt(sock: Any) -> None:
            await listeners[0].adopt(sock)

        return Listening(tuple(published), listeners, adopt)

    def _default_addresses(self) -> list[str]:
        self.socket_directory = SocketDirectory()
        folder = self.socket_directory.path
        return default_addresses(folder, is_guarded=self.options.is_guarded)

    # --- threads ---------------------------------------------------------------------

    def run_in_thread(self, job: Callable[[], T]) -> asyncio.Future[T]:
        """Run `job` in a thread of the worker; called on the loop."""
        return self.pool.run(job)

    def run_on_host(self, job: Callable[[], T]) -> asyncio.Future[T]:
        """Run `job`, which touches no device, in a thread; called on the loop."""
        return self.host_pool.run(job)


def _function_table(rendezvous: Rendezvous, options: Options) -> FunctionTable:
    # Workers with a rank have been launched together: they run one program.
    is_other = isinstance(rendezvous, JoinRendezvous) or not main_has_a_file()
    return FunctionTable(options.policy, options.allow, main_travels=is_other)
