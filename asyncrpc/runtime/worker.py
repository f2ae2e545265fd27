"""A worker: an asynchronous context manager that owns every task, socket and thread.

It is a value.  Nothing here is process-wide, so one process may hold many.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import os
import secrets
import tempfile
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar, cast

import torch

from asyncrpc.errors import (
    AlreadyStartedError,
    MalformedError,
    Outcome,
    RejectedError,
    UsageError,
)
from asyncrpc.ids import Incarnation, WorkerId
from asyncrpc.runtime.barrier import Barrier
from asyncrpc.runtime.context import current_worker_var
from asyncrpc.runtime.directory import Directory, check_listen_address
from asyncrpc.runtime.extensions import Propagator, References, Service
from asyncrpc.runtime.futures import CallFuture
from asyncrpc.runtime.group import PeerGroup, group_of
from asyncrpc.runtime.host import HOST_ID
from asyncrpc.runtime.inbound import Mode, Target
from asyncrpc.runtime.landing import ReceivePool
from asyncrpc.runtime.options import Options
from asyncrpc.runtime.peer import Peer
from asyncrpc.runtime.placing import empty
from asyncrpc.runtime.rendezvous import Member, Rendezvous, open_rendezvous
from asyncrpc.runtime.sharing import Sharing
from asyncrpc.runtime.spinning import spinner_for
from asyncrpc.runtime.starting import CallStarter
from asyncrpc.runtime.threads import ThreadPool
from asyncrpc.serde import Codec, FunctionTable, Limits, Policy
from asyncrpc.transport.abc import Connector, Listener
from asyncrpc.transport.address import Address
from asyncrpc.transport.tcp import TcpConnector
from asyncrpc.transport.uds import UdsConnector
from asyncrpc.wire.messages import Hello

T = TypeVar("T")
logger = logging.getLogger("asyncrpc")


class Worker(CallStarter):
    """A participant: it calls functions on others and runs functions for them.

    Attributes:
        name: unique among the workers that can reach one another.
        rank: index in the group; -1 if it has none.
        world_size: number of workers in the group; 0 if it is not fixed.
        incarnation: 64 random bits: this life of this worker.
        options: as given, completed from the environment.
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
                `tcp://host:port`, `file:///path`, a mapping from names to addresses
                such as `{"ps": "tcp://10.0.0.2:7000"}`, or a `LocalRendezvous` shared
                by the workers of one process.
            options: limits, times, secret, policy.
            network: an in-process network to use instead of sockets.

        Raises:
            UsageError: the name is empty, or `rendezvous` is incomplete.
        """
        if not name or not isinstance(name, str):
            raise UsageError(
                f"a worker's name is a text that is not empty, not {name!r}"
            )
        self.name = name
        self.incarnation = Incarnation(secrets.randbits(64) or 1)
        self.options = (options or Options()).with_environment()
        self._rendezvous, self.rank, self.world_size = open_rendezvous(
            rendezvous, rank=rank, world_size=world_size
        )
        self._network = network
        self.functions = FunctionTable(self.options.policy, self.options.allow)
        self.references: References | None = None
        self.propagators: list[Propagator] = []
        self._services: dict[str, Service] = {}
        self._targets: dict[str, Target] = {}
        self._modes: dict[Callable[..., Any], Mode] = {}
        self._known: dict[Callable[..., Any], tuple[str | None, str]] = {}
        self._listeners: list[Listener] = []
        self._tasks: set[asyncio.Task[Any]] = set()
        self.active = 0  # calls that are being served
        self._idle = asyncio.Event()
        self._thread_id = 0
        self._state = "new"
        self._draining = False
        self._token: contextvars.Token[Any] | None = None
        self._directory_path: tempfile.TemporaryDirectory[str] | None = None

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
        self._state = "starting"
        self.loop = asyncio.get_running_loop()
        self._thread_id = threading.get_ident()
        self.pool = self._make_pool()
        # In a simulation time stands still while the loop works: nothing to poll for.
        self.spinner = (
            None
            if self._network is not None
            else spinner_for(self.options.spin, self.loop)
        )
        self.receive_pool = ReceivePool(self.loop, self.options.receive_pool_bytes)
        self.context = contextvars.Context()
        self.context.run(current_worker_var.set, self)
        self.directory = Directory(self)
        self.barriers = Barrier(self)
        self.add_service(self.barriers)
        self.memory = Sharing(self)
        self.add_service(self.memory)
        self.add_service(self.memory.regions)
        self._extend()
        unpacked_bytes_max = self.options.limits.unpacked_bytes_max
        limits = Limits(unpacked_bytes_max=unpacked_bytes_max)
        self.codec = Codec(self.functions, self.references, limits)
        self.codec.shared = self.memory.regions
        try:
            await self._listen()
            members = await self._rendezvous.join(
                self.member, self.options.rendezvous_timeout_s
            )
        except BaseException:
            await self._stop(drain_s=0.0)
            raise
        self.directory.add(members)
        self.directory.add([self.member])
        self._state = "running"
        self.directory.serve()
        self._token = current_worker_var.set(self)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Shut down: in order if the block ended well, at once if it raised."""
        await self.shutdown(drain_timeout_s=None if error is None else 0.0)

    async def shutdown(self, *, drain_timeout_s: float | None = None) -> None:
        """End this worker; waits for no other.  Idempotent.

        New calls are refused, those in flight have `drain_timeout_s` seconds to end
        (None: `Options.drain_timeout_s`), then tasks are cancelled, connections closed
        and threads ended.  A thread that does not end is left behind, with a warning.

        Cancellation:
            The shutdown is completed without waiting any longer, then it is passed on.
        """
        if self._state != "running":
            return
        self._state = "closing"
        if drain_timeout_s is None:
            drain_timeout_s = self.options.drain_timeout_s
        if self._token is not None and current_worker_var.get() is self:
            current_worker_var.set(None)
        await self._stop(drain_s=drain_timeout_s)

    async def _stop(self, *, drain_s: float) -> None:
        try:
            await self._drain(drain_s)
        finally:
            self._state = "closed"
            await asyncio.shield(asyncio.ensure_future(self._tear_down(drain_s)))

    async def _drain(self, timeout_s: float) -> None:
        """Let what is in flight end, in both directions."""
        self._draining = True
        for link in self.directory.links:
            link.say_goodbye()
        if timeout_s <= 0:
            return
        end_s = self.loop.time() + timeout_s
        waiting = [
            call
            for link in self.directory.links
            for call in link.pending
            if isinstance(call, CallFuture)
        ]
        if waiting:
            await asyncio.wait(waiting, timeout=timeout_s)
        self._idle.clear()
        if self.active:
            try:
                async with asyncio.timeout_at(end_s):
                    await self._idle.wait()
            except TimeoutError:
                logger.warning(
                    "worker %r: %d calls had not ended %g s after shutdown began; they "
                    "are cancelled",
                    self.name,
                    self.active,
                    timeout_s,
                )

    async def _tear_down(self, drain_s: float) -> None:
        for listener in self._listeners:
            await listener.close()
        for service in tuple(self._services.values()):
            await service.close()
        await self._cancel_tasks()
        await self.directory.close(min(1.0, drain_s) if drain_s else 0.1)
        await self._cancel_tasks()
        self.receive_pool.close()
        left = await self.pool.close(min(1.0, drain_s) if drain_s else 0.2)
        if left:
            logger.warning(
                "worker %r: these threads run on, their functions do not end: %s",
                self.name,
                ", ".join(left),
            )
        await self._rendezvous.leave(self.options.drain_timeout_s)
        if self._directory_path is not None:
            self._directory_path.cleanup()

    async def _cancel_tasks(self) -> None:
        tasks = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=2.0)

    def _make_pool(self) -> ThreadPool:
        """Return the threads for plain functions; a simulation has others."""
        return ThreadPool(self.name, self.options.threads, self.loop)

    def _extend(self) -> None:
        """Add references, autograd and what else is built on calls; see `asyncrpc`."""

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
        """Every address at which this worker can be reached."""
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
        self, *, expects: str = "", attempt: int = 0, verdict: str = "", lane: int = 0
    ) -> Hello:
        """Return what introduces this worker to a peer."""
        return Hello(
            name=self.name,
            incarnation=self.incarnation,
            rank=self.rank,
            pid=os.getpid(),
            expects=expects,
            attempt=attempt,
            verdict=verdict,
            addresses=self.addresses,
            host_id=HOST_ID,
            strict=self.options.policy is Policy.STRICT,
            lane=lane,
        )

    async def _listen(self) -> None:
        if self._network is not None:
            self.connectors: Mapping[str, Connector] = {
                self._network.scheme: self._network
            }
            where: Sequence[str] = (f"{self._network.scheme}://{self.name}",)
        else:
            self.connectors = {
                "tcp": TcpConnector(interface=self.options.interface),
                "uds": UdsConnector(),
            }
            where = self.options.listen or self._default_addresses()
        for text in where:
            address = Address.parse(text)
            check_listen_address(
                address, has_secret=self.options.secret_bytes is not None
            )
            connector = self.connectors[address.scheme]
            listener = await connector.listen(address, self.directory.accept)
            self._listeners.append(listener)
            if address.scheme == "uds":
                self.memory.listen(address.host)

    def _default_addresses(self) -> list[str]:
        """A Unix socket of our own; with a secret, TCP on every interface too."""
        self._directory_path = tempfile.TemporaryDirectory(prefix="asyncrpc-")
        where = [f"uds://{Path(self._directory_path.name) / 'worker'}"]
        if self.options.secret_bytes is not None:
            where.append("tcp://[::]:0" if has_ipv6() else "tcp://0.0.0.0:0")
        return where

    # --- calls -----------------------------------------------------------------------

    def peer(self, to: str | int) -> Peer:
        """Return another worker, or this one, by name or rank.

        Raises:
            UnknownWorkerError: there is none; the message lists those there are.
            NotStartedError: this worker does not run.
        """
        self.check_running()
        return Peer(self, self.directory.find(to).member.name)

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
        sizes = shape[0] if shape and not isinstance(shape[0], int) else shape
        return empty(self, cast("Sequence[int]", sizes), dtype, self._thread_id)

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

    def run_in_thread(self, job: Callable[[], T]) -> asyncio.Future[T]:
        """Run `job` in a thread of the pool; called on the loop."""
        done: asyncio.Future[T] = self.loop.create_future()

        def finish(result: Any, error: BaseException | None) -> None:
            if done.done():
                return
            if error is not None:
                done.set_exception(error)
            else:
                done.set_result(result)

        self.pool.submit(job, finish)
        return done

    def add_service(self, service: Service) -> None:
        """Let other workers send messages to a part of this one."""
        self._services[service.name] = service

    def service(self, name: Any) -> Service:
        """Return the part of this worker that has a name.

        Raises:
            MalformedError: there is none: the peer speaks another dialect.
        """
        found = self._services.get(name)
        if found is None:
            raise MalformedError(f"there is no service {name!r}")
        return found

    def on_peer_lost(self, peer: WorkerId, reason: str) -> None:
        """Tell every part of this worker that a peer is gone."""
        for service in tuple(self._services.values()):
            service.on_peer_lost(peer, reason)

    # --- the group -------------------------------------------------------------------

    async def barrier(self, timeout_s: float | None = None) -> None:
        """Wait until every worker of the group has come here.

        All must call it the same number of times.  No worker is special, and each
        speaks to about log2(world size) others.

        Args:
            timeout_s: seconds to wait; None: no limit.

        Raises:
            TimeoutError: it passed.  The barrier cannot be used again in this group.
            WorkerLostError: a worker that this one waits for is gone.
            UsageError: the group has no ranks.

        Cancellation:
            The others are told, and their barrier fails too.
        """
        self.check_running()
        async with asyncio.timeout(timeout_s):
            await self.barriers.wait()

    def __repr__(self) -> str:
        where = (
            f"rank {self.rank} of {self.world_size}" if self.rank >= 0 else "no rank"
        )
        return f"<Worker {self.name!r} ({where}), {self._state}>"


def has_ipv6() -> bool:
    """Say whether this host speaks IPv6 at all."""
    return Path("/proc/net/if_inet6").exists()
