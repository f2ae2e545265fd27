"""A worker: an asynchronous context manager that owns every task, socket and thread.

It is a value.  Nothing here is process-wide, so one process may hold many.
"""

from __future__ import annotations

import asyncio
import contextvars
import os
import secrets
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self, TypeVar

import torch

from asyncrpc.arguments import check_kind, check_seconds, check_text, sizes_of
from asyncrpc.errors import (
    AlreadyStartedError,
    MalformedError,
    Outcome,
    RejectedError,
    UsageError,
)
from asyncrpc.ids import Incarnation, WorkerId, WorkerInfo
from asyncrpc.runtime.calls.context import current_worker_var
from asyncrpc.runtime.calls.credit import InboundCredit
from asyncrpc.runtime.calls.error_encoder import ErrorEncoder
from asyncrpc.runtime.calls.group import PeerGroup, group_of
from asyncrpc.runtime.calls.modes import Mode, Target
from asyncrpc.runtime.calls.peer import Peer
from asyncrpc.runtime.counters import Counters
from asyncrpc.runtime.devices.backends import Turning, backend_of
from asyncrpc.runtime.devices.staging import Devices
from asyncrpc.runtime.devices.turns import Turn
from asyncrpc.runtime.extensions import (
    Propagator,
    References,
    RemembersLost,
    Service,
    ThreadState,
)
from asyncrpc.runtime.forking import FORKED, end_in_forked_children
from asyncrpc.runtime.links.directory import Directory, check_listen_address
from asyncrpc.runtime.links.host import HOST_ID
from asyncrpc.runtime.links.watching import Watch
from asyncrpc.runtime.loops import loop_for
from asyncrpc.runtime.meeting import Meeting
from asyncrpc.runtime.membership.barrier import Barrier
from asyncrpc.runtime.membership.changes import MemberChanges
from asyncrpc.runtime.membership.ending import Ending
from asyncrpc.runtime.membership.meetings import MeetingService
from asyncrpc.runtime.membership.rendezvous import Member, Rendezvous, open_rendezvous
from asyncrpc.runtime.membership.service import MembershipService
from asyncrpc.runtime.options import Options
from asyncrpc.runtime.payloads.landing import ReceivePool
from asyncrpc.runtime.payloads.placing import empty
from asyncrpc.runtime.payloads.sharing import Sharing
from asyncrpc.runtime.socket_directory import SocketDirectory
from asyncrpc.runtime.spinning import spinner_for
from asyncrpc.runtime.threads import ThreadPool, outcome_to
from asyncrpc.serde import Codec, FunctionTable, Limits, Policy
from asyncrpc.transport.abc import Connector, Listener
from asyncrpc.transport.address import Address
from asyncrpc.transport.tcp import TcpConnector
from asyncrpc.transport.tls import open_tls
from asyncrpc.transport.uds import UdsConnector
from asyncrpc.wire.messages import Hello

T = TypeVar("T")

NAME_CHARACTERS_MAX: Final = 255  # it travels in every handshake, and in every error


class Worker(Meeting):
    """A participant: it calls functions on others and runs functions for them.

    Attributes:
        name: unique among the workers that can reach one another.
        rank: index in the group; -1 if it has none.
        world_size: number of workers in the group; 0 if it is not fixed.
        incarnation: 64 random bits: this life of this worker.
        pid: of its process, for peers to show.
        options: as given, completed from the environment.
        counters: what has happened to it.
    """

    def __init__(
        self,
        name: str,
        *,
        rank: int | None = None,
        world_size: int | None = None,
        rendezvous: str | Mapping[str, str | Sequence[str]] | Rendezvous = "env://",
        options: Options | None = None,
        network: Connector | None = None,
    ) -> None:
        """Describe a worker; `async with` starts it.

        Args:
            name: its name; not empty.
            rank: its index, from 0; None takes it from `rendezvous`.
            world_size: how many workers there are; None likewise.
            rendezvous: how the workers find each other: `env://` (as torchrun sets it),
                `tcp://host:port`, `file:///path`, `join://host:port` of any member of a
                group that runs, a mapping from names to addresses such as `{"ps":
                "tcp://10.0.0.2:7000"}`, or a `LocalRendezvous` shared by the workers of
                one process.
            options: limits, times, secret, policy.
            network: an in-process network to use instead of sockets.

        Raises:
            UsageError: the name is empty or longer than 255 characters, `rendezvous` is
                incomplete, or an argument is of another kind.
        """
        check_text("name", name, at_most=NAME_CHARACTERS_MAX)
        if options is not None:
            check_kind("options", options, Options, "an Options or None")
        if network is not None:
            check_kind("network", network, Connector, "a Connector or None")
        self.name = name
        self.incarnation = Incarnation(secrets.randbits(64) or 1)
        self.pid = os.getpid()
        self.options = (options or Options()).with_environment()
        self.counters = Counters()
        self._rendezvous, self.rank, self.world_size = open_rendezvous(
            rendezvous, rank=rank, world_size=world_size
        )
        self._network = network
        self.functions = FunctionTable(self.options.policy, self.options.allow)
        self.references: References | None = None
        self.propagators: list[Propagator] = []
        self.thread_states: list[ThreadState] = []
        # Is told what functions of calls raise; a facade prints it, as torch does.
        self.on_raised: Callable[[BaseException], None] | None = None
        self._services: dict[str, Service] = {}
        self._targets: dict[str, Target] = {}
        self._modes: dict[Callable[..., Any], Mode] = {}
        self._known: dict[Callable[..., Any], tuple[str | None, str]] = {}
        self._listeners: list[Listener] = []
        self._tasks: dict[asyncio.Task[Any], None] = {}
        self.active = 0  # calls that are being served
        self._idle = asyncio.Event()
        self._thread_id = 0
        self._state = "new"
        self._draining = False
        self._token: contextvars.Token[Any] | None = None
        self._socket_directory: SocketDirectory | None = None
        self.watch = Watch(self)

    # --- life ------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        """Start: listen, meet the others, and become the current worker of this task.

        Raises:
            AlreadyStartedError: it has been started before.
            RendezvousTimeoutError: not everyone appeared; it names who is missing.
            UsageError: it would listen to strangers, or its name or rank is taken.

        Cancellation:
            What was started is stopped again.
        """
        if self._state != "new":
            raise AlreadyStartedError(
                f"worker {self.name!r} has been started before; make a new Worker"
            )
        self.loop = loop_for("a Worker")
        self._state = "starting"
        end_in_forked_children(self)
        self._thread_id = threading.get_ident()
        self.pool = self._make_pool()
        # Work on host memory waits for no turn at a device, and keeps none.
        self.host_pool = (
            ThreadPool(f"{self.name}-host", self.options.threads, self.loop)
            if self.pool.takes_turns
            else self.pool
        )
        # In a simulation time stands still while the loop works: nothing to poll for.
        self.spinner = (
            None
            if self._network is not None
            else spinner_for(self.options.spin, self.loop, self.pool, self.host_pool)
        )
        self.receive_pool = ReceivePool(self.loop, self.options.receive_pool_bytes)
        self.inbound_credit = InboundCredit(
            self.name, self.loop, self.options.inbound_bytes_max, self.receive_pool
        )
        self.context = contextvars.Context()
        self.context.run(current_worker_var.set, self)
        self.devices = Devices(self)
        self.directory = Directory(self)
        self.barriers = Barrier(self)
        self.add_service(self.barriers)
        self.meetings = MeetingService(self)
        self.add_service(self.meetings)
        self.ending = Ending(self)
        self.add_service(self.ending)
        self.memory = Sharing(self)
        self.add_service(self.memory)
        self.add_service(self.memory.regions)
        self.membership = MembershipService(self)
        self.add_service(self.membership)
        self._extend()
        self._make_codec()
        try:
            await self.devices.start()
            await self._listen()
            limit_s = self.options.rendezvous_timeout_s
            await self.membership.enter(self._rendezvous, limit_s)
        except BaseException:
            await self._stop(drain_s=0.0)
            raise
        # Its own calls need no way around, and a NAT may not lead back in.
        self.directory.add([replace(self.member, addresses=self.listening)])
        self._state = "running"
        self.directory.serve()
        self.membership.start()
        self._token = current_worker_var.set(self)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Shut down, alone: in order if the block ended well, at once if it raised."""
        await self.shutdown(drain_timeout_s=None if error is None else 0.0)

    def end_in_child(self) -> None:
        """Become unusable: this process was forked from the worker's own."""
        self._state = FORKED
        if self._socket_directory is not None:
            self._socket_directory.disown()

    def _make_codec(self) -> None:
        unpacked_bytes_max = self.options.limits.unpacked_bytes_max
        limits = Limits(unpacked_bytes_max=unpacked_bytes_max)
        self.codec = Codec(self.functions, self.references, limits, self.devices)
        self.codec.shared = self.memory.regions
        self.error_encoder = ErrorEncoder(self.codec, worker=self.name, pid=self.pid)

    def _make_pool(self) -> ThreadPool:
        """Return the threads for plain functions; a simulation has others."""
        options = self.options
        names = options.device_names or ()
        exclusive = [one for one in names if backend_of(one.type).is_exclusive]
        takes_turns = options.takes_turns
        if takes_turns is None:
            takes_turns = bool(exclusive)
        turning = Turning(exclusive)
        return ThreadPool(
            self.name,
            options.threads,
            self.loop,
            # Of more than those: a turn that is asked for is one at all devices.
            turn=Turn(() if options.takes_turns else exclusive)
            if takes_turns
            else None,
            begin=turning.begin if exclusive else None,
            settle=turning.end if exclusive else None,
        )

    def _extend(self) -> None:
        """Add references, autograd and what else is built on calls; see `asyncrpc`."""

    def random_bytes(self, count: int) -> bytes:
        """Return bytes that nobody can foresee; a simulation has others."""
        return os.urandom(count)

    @property
    def is_draining(self) -> bool:
        """Whether shutdown has begun."""
        return self._draining

    # --- where it is -----------------------------------------------------------------

    @property
    def secret_for_connections(self) -> bytes | None:
        """The secret that both ends of a connection must prove to know."""
        return None if self._network is not None else self.options.secret_bytes

    @property
    def addresses(self) -> tuple[str, ...]:
        """Every address at which others are told that they can reach this worker."""
        return self.options.advertise or self.listening

    @property
    def listening(self) -> tuple[str, ...]:
        """Every address at which this worker listens."""
        return tuple(
            str(address)
            for listener in self._listeners
            for address in listener.addresses
        )

    @property
    def member(self) -> Member:
        """What others are told of this worker."""
        return Member(self.name, self.rank, self.incarnation, self.addresses, HOST_ID)

    @property
    def id(self) -> WorkerId:
        """This life of this worker."""
        return WorkerId(self.name, self.incarnation)

    def hello(
        self,
        *,
        expects: str = "",
        attempt: int = 0,
        verdict: str = "",
        lane: int = 0,
        resume: int = 0,
        received: int = 0,
    ) -> Hello:
        """Return what introduces this worker to a peer."""
        return Hello(
            name=self.name,
            incarnation=self.incarnation,
            rank=self.rank,
            pid=self.pid,
            expects=expects,
            attempt=attempt,
            verdict=verdict,
            addresses=self.addresses,
            host_id=HOST_ID,
            strict=self.options.policy is Policy.STRICT,
            lane=lane,
            resume=resume,
            received=received,
            watch=self.watch.addresses,
        )

    async def _listen(self) -> None:
        if self._network is not None:
            self.connectors: Mapping[str, Connector] = {
                self._network.scheme: self._network
            }
            where: Sequence[str] = (f"{self._network.scheme}://{self.name}",)
        else:
            self.connectors = {
                "tcp": TcpConnector(
                    interface=self.options.interface, tls=open_tls(self.options.tls)
                ),
                "uds": UdsConnector(),
            }
            where = self.options.listen or self._default_addresses()
        for text in where:
            address = Address.parse(text)
            check_listen_address(address, is_guarded=self.options.is_guarded)
            connector = self.connectors[address.scheme]
            listener = await connector.listen(address, self.directory.accept)
            self._listeners.append(listener)
            if address.scheme == "uds":
                self.memory.listen(address.host)
        if self._network is None:
            await self.watch.start([Address.parse(text) for text in where])

    def _default_addresses(self) -> list[str]:
        """A Unix socket of our own; with a secret, TCP on every interface too."""
        self._socket_directory = SocketDirectory()
        where = [f"uds://{self._socket_directory.path / 'worker'}"]
        if self.options.is_guarded:
            where.append("tcp://[::]:0" if has_ipv6() else "tcp://0.0.0.0:0")
        return where

    # --- calls -----------------------------------------------------------------------

    def peer(self, to: str | int) -> Peer:
        """Return another worker, or this one, by name or rank.

        Raises:
            UnknownWorkerError: there is none; the message lists those there are.  Of
                one that has just joined, others may know: see `find`.
            NotStartedError: this worker does not run.
        """
        self.check_running()
        return Peer(self, self.directory.find(to).member.name)

    async def find(self, name: str, *, timeout_s: float | None = None) -> Peer:
        """Return another worker by name, asking others if this one does not know it.

        Any member can say where another is.  News of one that has just joined reach
        everyone within a moment; this is for those who cannot wait for them.

        Args:
            name: of the worker.
            timeout_s: seconds to ask for; None: `Options.connect_timeout_s`.

        Raises:
            UnknownWorkerError: none of three members that were asked knows it, or it
                has ended.
            NotStartedError: this worker does not run.

        Cancellation:
            Nothing has changed.

        Example:
            >>> late = await worker.find("trainer7")
        """
        self.check_on_loop("Worker.find")
        check_text("name", name, at_most=NAME_CHARACTERS_MAX)
        if timeout_s is None:
            timeout_s = self.options.connect_timeout_s
        check_seconds("timeout_s", timeout_s, at_least=0)
        await self.membership.find(name, timeout_s)
        return self.peer(name)

    def members(self) -> MemberChanges:
        """Return the changes of the membership from now on, to be iterated over.

        Who is there at this moment, `known_members` says: read it after this call, and
        no change is missed in between.  The iteration ends when the worker does.  Each
        call returns an iterator of its own.

        Raises:
            NotStartedError: this worker does not run.

        Example:
            >>> async for change in worker.members():
            ...     print(change.kind, change.member.name)
        """
        self.check_running()
        return self.membership.changes()

    @property
    def known_members(self) -> list[WorkerInfo]:
        """Every member that is there, by rank and name, as far as this worker knows."""
        return self.membership.known

    def group(self, peers: Iterable[str | int | Peer]) -> PeerGroup:
        """Return several workers, to call the same function on all of them.

        Args:
            peers: names, ranks or peers, each worker once; none is allowed, too.

        Raises:
            UnknownWorkerError: one of them does not exist.
            UsageError: one is in it twice, is a peer of another worker, or has options
                of its own.
            NotStartedError: this worker does not run.

        Example:
            >>> losses = await worker.group(["a", "b"]).call(step, batch)
        """
        self.check_running()
        return group_of(self, peers)

    def empty(
        self, *shape: int | Sequence[int], dtype: torch.dtype = torch.float32
    ) -> torch.Tensor:
        """Return a tensor in memory that is shared with the peers of this host.

        Sending it, or a contiguous part of it, to such a peer copies nothing: the peer
        gets the same memory.  So it sees what is written to it later, as this worker
        sees what the peer writes; whether it does is up to the transport, and no
        program should rely on it (`asyncrpc.share` is for that).  The memory is in use
        until this tensor and what every peer made of it are dead.

        A tensor of at most 64 KiB, or one for which there is no room within
        `Options.shared_memory_bytes`, is a plain one.

        Args:
            *shape: sizes, or one sequence of them.
            dtype: any but the quantized ones.

        Returns:
            An uninitialized tensor of `shape`, contiguous, on the CPU.

        Raises:
            NotStartedError: this worker does not run.

        Thread safety: from any thread but those of other event loops.

        Source: torch.empty.
        """
        self.check_running()
        check_kind("dtype", dtype, torch.dtype, "a torch.dtype")
        return empty(self, sizes_of(shape), dtype, self._thread_id)

    # --- what links ask --------------------------------------------------------------

    def admit(self) -> None:
        """Take a call in, or refuse it.

        Raises:
            RejectedError: too many calls, or the worker is shutting down.
        """
        if self._draining:
            raise RejectedError(
                "the worker is shutting down", outcome=Outcome.NOT_EXECUTED
            )
        if self.active >= self.options.inbound_calls_max:
            raise RejectedError(
                f"the worker has {self.active} calls in hand, its limit "
                "(Options.inbound_calls_max); try again later",
                outcome=Outcome.NOT_EXECUTED,
            )

    def on_served(self) -> None:
        """A call has been answered, or nobody waits for it."""
        self.active -= 1
        if not self.active:
            self._idle.set()

    def run_in_thread(
        self, job: Callable[[], T], pool: ThreadPool | None = None
    ) -> asyncio.Future[T]:
        """Run `job` in a thread of a pool, the worker's if None; called on the loop."""
        done: asyncio.Future[T] = self.loop.create_future()
        (pool or self.pool).submit(job, outcome_to(done))
        return done

    def run_on_host(self, job: Callable[[], T]) -> asyncio.Future[T]:
        """Run `job`, which touches no device, in a thread; called on the loop."""
        return self.run_in_thread(job, self.host_pool)

    def add_service(self, service: Service) -> None:
        """Let other workers send messages to a part of this one."""
        self._services[service.name] = service

    def service(self, name: Any) -> Service:
        """Return the part of this worker that has a name.

        Raises:
            MalformedError: there is none: the peer speaks another dialect.
        """
        found = self._services.get(name) if type(name) is str else None
        if found is None:
            raise MalformedError(f"there is no service {name!r:.80}")
        return found

    def on_peer_lost(self, peer: WorkerId, reason: str) -> None:
        """Tell every part of this worker that a peer is gone."""
        for service in tuple(self._services.values()):
            service.on_peer_lost(peer, reason)

    def on_peer_back(self, peer: WorkerId) -> None:
        """Tell every part of this worker that a peer is here again that was lost."""
        for service in tuple(self._services.values()):
            if isinstance(service, RemembersLost):
                service.on_peer_back(peer)

    # --- the group -------------------------------------------------------------------

    async def barrier(self, timeout: float | None = None) -> None:  # noqa: ASYNC109
        """Wait until every worker of the group has come here.

        Barriers are numbered by how often a worker has come to one; all must do so the
        same number of times.  No worker is special, and each speaks to about
        log2(world size) others.

        One that fails does so for everyone who has not passed it yet, at once; those
        who come to it later are told, too.  Then the next one can be used, by all who
        live.

        Args:
            timeout: seconds to wait; None: no limit.

        Raises:
            BarrierTimeoutError: `timeout` passed here; `missing` names who did not
                come.  It is a TimeoutError.
            BarrierBrokenError: another worker gave this barrier up.
            WorkerLostError: a worker is gone; so it is at every later barrier.
            UsageError: the group has no ranks.

        Cancellation:
            The others are told, and their barrier fails too.
        """
        self.check_on_loop("Worker.barrier")
        if timeout is not None:
            check_seconds("timeout", timeout, at_least=0)
        await self.barriers.wait(timeout)

    def __reduce__(self) -> Any:
        """Refuse to be pickled.

        Raises:
            UsageError: always.
        """
        raise UsageError("a Worker stays in its process; send its name")

    def __repr__(self) -> str:
        where = (
            f"rank {self.rank} of {self.world_size}" if self.rank >= 0 else "no rank"
        )
        return f"<Worker {self.name!r} ({where}), {self._state}>"


def has_ipv6() -> bool:
    """Say whether this host speaks IPv6 at all."""
    return Path("/proc/net/if_inet6").exists()
