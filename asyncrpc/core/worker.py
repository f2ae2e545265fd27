"""A worker: an asynchronous context manager that owns every task, socket and thread.

It is a value.  Nothing here is process-wide, so one process may hold many workers.
This module is the public interface; the components of a worker are in `parts`.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable, Mapping, Sequence
from types import NoneType, TracebackType
from typing import Any, Self, TypeVar

import torch

from asyncrpc.core.arguments import (
    check_flag,
    check_kind,
    check_name,
    check_seconds,
    check_timeout,
    sizes_of,
)
from asyncrpc.core.calls.context import current_worker_var
from asyncrpc.core.counters import Counters
from asyncrpc.core.html import Cell, State, Tone, panel
from asyncrpc.core.identity import WorkerIdentity
from asyncrpc.core.ids import Incarnation, WorkerId, WorkerInfo
from asyncrpc.core.lifecycle import Event
from asyncrpc.core.links.tokens import JoinTokens
from asyncrpc.core.loop.forking import end_in_forked_children, known_workers
from asyncrpc.core.loop.loops import loop_for, running_loop
from asyncrpc.core.membership.changes import MemberChanges
from asyncrpc.core.membership.rendezvous import Rendezvous, open_rendezvous
from asyncrpc.core.options import Options
from asyncrpc.core.parts import Parts
from asyncrpc.core.payloads.sharing import empty_tensor
from asyncrpc.core.peers.group import PeerGroup, group_of
from asyncrpc.core.peers.peer import Peer
from asyncrpc.core.serde import Policy
from asyncrpc.core.teardown import Teardown, report
from asyncrpc.core.trace.subscription import ITEMS_MAX, Subscription
from asyncrpc.core.transport.abc import Connector
from asyncrpc.errors import NotStartedError, UsageError

E = TypeVar("E", bound=tuple[Any, ...])


def current_worker(name: str | None = None) -> Worker:
    """Return the worker of this task or thread.

    One that has none uses a worker that `await init_rpc(...)`, or `await Cluster(...)`,
    has left running: a task, the only one on its event loop; a thread without a loop,
    the only one of the process.  So each cell of a notebook has the worker of an
    earlier one.  A task whose worker belongs to another event loop uses the only one
    that runs on its own, as a test beside workers of wider fixtures.

    Args:
        name: of one of several that have been left running; None: the current
            worker.

    Raises:
        NotStartedError: no worker runs here: enter a `Worker`, or call `init_rpc`; or
            several do, and none is this task's own.
        UsageError: `name` is not a string.
    """
    check_kind("name", name, (str, type(None)), "the name of a worker, or None")
    worker: Worker | None = current_worker_var.get()
    if worker is None or (name is not None and worker.name != name):
        # Not kept in the context, which may be that of a whole notebook.
        return _left_running(name)
    if not worker.parts.loop_guard.is_on_loop:
        worker = _only_here() or worker
    worker.parts.lifecycle.check_running()
    return worker


def _only_here() -> Worker | None:
    """Return the only worker that runs on the event loop that runs here."""
    here = [worker for worker in _workers() if worker.parts.loop_guard.is_on_loop]
    running = [worker for worker in here if worker.parts.lifecycle.is_usable]
    return running[0] if len(running) == 1 else None


def _workers() -> list[Worker]:
    return [worker for worker in known_workers() if isinstance(worker, Worker)]


def workers_left_running() -> list[Worker]:
    """Return the workers that `init_rpc` has left running for this task or thread."""
    loop = running_loop()
    return [
        worker
        for worker in _left_anywhere()
        if (worker.loop.is_running() if loop is None else worker.loop is loop)
    ]


def leave_running(worker: Worker) -> None:
    """Let a worker be the current one of all tasks of its loop that have no other."""
    worker.parts.is_for_loop = True


def _left_anywhere() -> list[Worker]:
    return [
        worker
        for worker in _workers()
        if worker.parts.is_for_loop and not worker.is_closed
    ]


def _left_running(name: str | None) -> Worker:
    """Return the only worker that `init_rpc` runs for this task or thread."""
    here = workers_left_running()
    matching = [worker for worker in here if name in (None, worker.name)]
    if len(matching) == 1:
        return matching[0]
    if here:
        names = ", ".join(sorted(repr(worker.name) for worker in here))
        raise NotStartedError(
            f"no worker is current here, and init_rpc or Cluster has started {names}: "
            "use what it returned, or current_worker(name)"
        )
    for worker in _left_anywhere():
        where = "another event loop than this"
        if running_loop() is None:
            where = "an event loop that does not run now"
        raise NotStartedError(
            f"worker {worker.name!r} runs on {where}: use it in a coroutine on its own"
        )
    which = "" if name is None else f" of the name {name!r}"
    raise NotStartedError(
        f"there is no running worker{which} here; use `async with asyncrpc.Worker(...)`"
        " or `await asyncrpc.init_rpc(...)` first"
    )


def _name_of(rank: int) -> str:
    """Return the default name of a worker."""
    if rank < 0:
        raise UsageError(
            "name is missing: a worker without a rank needs one; pass name= or rank="
        )
    return f"worker{rank}"


def _end_copy(worker: Worker) -> asyncio.AbstractEventLoop:
    """Make a copy of a worker in a forked process unusable; return its loop."""
    worker.parts.lifecycle.advance(Event.FORK)
    if worker.parts.socket_directory is not None:
        worker.parts.socket_directory.disown()
    return worker.loop


class Worker:
    """A participant: it calls functions on others and runs functions for them.

    Attributes:
        parts: the components of the worker, for packages built on workers; they may
            change with any version.
    """

    def __init__(
        self,
        name: str | None = None,
        *,
        rank: int | None = None,
        world_size: int | None = None,
        rendezvous: str | Mapping[str, str | Sequence[str]] | Rendezvous = "env://",
        options: Options | None = None,
        network: Connector | None = None,
    ) -> None:
        """Describe a worker; `async with` starts it.

        Args:
            name: the worker's name; None: by its rank, as in `worker3`.
            rank: the worker's index, from 0; None takes it from `rendezvous`.
            world_size: the number of workers; None takes it from `rendezvous`.
            rendezvous: how the workers find each other: `env://` (as torchrun, Slurm,
                mpirun and others say), `tcp://host:port`, `file:///path`,
                `join://host:port` of any member of a running group, a mapping from
                names to addresses such as `{"ps": "tcp://10.0.0.2:7000"}`, or a
                `LocalRendezvous` shared by the workers of one process.
            options: limits, times, secret, policy.
            network: an in-process network to use instead of sockets.

        Raises:
            UsageError: the name is empty, longer than 255 characters or not printable,
                `rendezvous` is incomplete, or an argument is of another kind.
        """
        check_name("name", "-" if name is None else name)
        check_kind("options", options, (Options, NoneType), "an Options or None")
        check_kind("network", network, (Connector, NoneType), "a Connector or None")
        completed = (options or Options()).with_environment()
        rendezvous, rank, world_size = open_rendezvous(
            rendezvous, rank=rank, world_size=world_size
        )
        name = name or _name_of(rank)
        is_strict = completed.policy is Policy.STRICT
        identity = WorkerIdentity(name, rank, world_size, is_strict=is_strict)
        self.parts = Parts(identity, completed, rendezvous, network)
        self.parts.extensions.append(self._extend)

    # --- life ------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        """Start: listen, meet the others, and become the current worker of this task.

        Raises:
            AlreadyStartedError: the worker has been started before.
            RendezvousTimeoutError: not all workers appeared; the error names the
                missing ones.
            UsageError: the worker would listen on TCP without authentication, or its
                name or rank is taken.

        Cancellation:
            Everything that was started is stopped again.
        """
        parts = self.parts
        loop_for("a Worker")
        parts.lifecycle.advance(Event.START)
        end_in_forked_children(self, _end_copy)
        self._teardown = Teardown(parts)
        parts.open(self)
        for extend in parts.extensions:
            extend(parts)
        parts.make_codec()
        try:
            await parts.enter()
        except BaseException:
            await self._teardown.run(0.0)
            raise
        parts.lifecycle.advance(Event.STARTED)
        parts.serve()
        current_worker_var.set(self)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Shut down, alone: in order if the block ended well, at once if it raised."""
        await self.shutdown(drain_timeout_s=None if error is None else 0.0)

    async def shutdown(
        self,
        *,
        graceful: bool = False,
        timeout_s: float | None = None,
        drain_timeout_s: float | None = None,
    ) -> None:
        """End this worker, alone or together with the group.  Idempotent.

        Alone, it refuses new calls; those in flight here have `drain_timeout_s` seconds
        to end, then tasks are cancelled, connections closed and threads ended, all
        within one more second.  A thread that does not end is left, with a warning.

        Gracefully, it first waits until every worker of the group has asked for a
        graceful shutdown and no call is in flight anywhere, including calls that other
        calls started, awaited or not; it waits for the calls of tasks that functions
        left running, but not for the tasks.  Until then it serves calls as before.
        Workers that die meanwhile are left out.  Without a rank it ends alone.

        Args:
            graceful: end together with the group.
            timeout_s: seconds to wait for the group, calls in flight included; None: no
                limit until all have asked.
            drain_timeout_s: seconds that calls in flight have to end; those of the
                group, once all have asked for the shutdown.  None: as in the options.

        Raises:
            UsageError: an argument is of another kind, or this is not the worker's
                event loop.
            TimeoutError: `timeout_s` passed; the message names the workers that had not
                asked, or had calls in flight.  The worker has ended anyway.

        Cancellation:
            The worker ends without waiting any longer, then the cancellation is passed
            on.
        """
        check_flag("graceful", graceful)
        check_timeout("timeout_s", timeout_s)
        check_timeout("drain_timeout_s", drain_timeout_s)
        lifecycle = self.parts.lifecycle
        if not lifecycle.is_running and not lifecycle.is_draining:
            return
        self.parts.loop_guard.check_loop("Worker.shutdown")
        if drain_timeout_s is None:
            drain_timeout_s = self.options.drain_timeout_s
        outcome, ending = None, self.parts.graceful_shutdown
        try:
            if graceful and ending.has_group and lifecycle.is_running:
                outcome = await ending.wait(timeout_s, drain_timeout_s)
                drain_timeout_s = min(drain_timeout_s, outcome.left_s)
        except BaseException:
            drain_timeout_s = 0.0
            raise
        finally:
            if current_worker_var.get() is self:
                current_worker_var.set(None)
            await self._teardown.run(drain_timeout_s)
        if outcome is not None:
            report(self.name, outcome, timeout_s)

    @staticmethod
    def _extend(parts: Parts) -> None:
        """Add the services built on calls, such as autograd; see `asyncrpc`."""

    # --- identity --------------------------------------------------------------------

    @property
    def name(self) -> str:
        """Unique among the workers that can reach one another."""
        return self.parts.identity.name

    @property
    def rank(self) -> int:
        """Index in the group; -1 if the worker has no rank."""
        return self.parts.identity.rank

    @property
    def world_size(self) -> int:
        """Number of workers in the group; 0 if it is not fixed."""
        return self.parts.identity.world_size

    @property
    def incarnation(self) -> Incarnation:
        """64 random bits that identify this life of the worker."""
        return self.parts.identity.incarnation

    @property
    def id(self) -> WorkerId:
        """The worker's name and incarnation."""
        return self.parts.identity.id

    @property
    def options(self) -> Options:
        """The worker's options as given, completed from the environment."""
        return self.parts.options

    @property
    def addresses(self) -> tuple[str, ...]:
        """Every address that the worker publishes to its peers."""
        return self.parts.addresses

    @property
    def counters(self) -> Counters:
        """The worker's counters of events."""
        return self.parts.counters

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop that the worker was started on."""
        return self.parts.loop

    @property
    def is_draining(self) -> bool:
        """Whether shutdown has begun."""
        return self.parts.lifecycle.is_draining

    @property
    def is_closed(self) -> bool:
        """Whether the worker has been shut down, or was never started.

        False while it drains: functions in flight may make calls of their own.
        """
        return not self.parts.lifecycle.is_usable

    # --- its peers -------------------------------------------------------------------

    def peer(self, to: str | int) -> Peer:
        """Return another worker, or this one, by name or rank.

        Raises:
            UnknownWorkerError: this worker knows no such worker; see `find`.
            NotStartedError: this worker does not run.
        """
        self.parts.lifecycle.check_running()
        return self.parts.peer(to)

    async def find(self, name: str, *, timeout_s: float | None = None) -> Peer:
        """Return another worker by name, asking others if this one does not know it.

        News of a new member reaches all members within a moment; use this method if
        you cannot wait for the news.

        Args:
            name: the name of the wanted worker.
            timeout_s: seconds for the search; None: `NetworkOptions.connect_timeout_s`.

        Raises:
            UnknownWorkerError: the three members that were asked do not know the
                worker, or the worker has ended.
            NotStartedError: this worker does not run.

        Cancellation:
            No state has changed.
        """
        self.parts.check_on_loop("Worker.find")
        check_name("name", name)
        if timeout_s is None:
            timeout_s = self.options.network.connect_timeout_s
        check_seconds("timeout_s", timeout_s, at_least=0)
        await self.parts.membership.find(name, timeout_s)
        return self.peer(name)

    def members_changed(self) -> MemberChanges:
        """Return an iterator over the changes of the membership from now on.

        To miss no change, read `known_members` after this call.  The iterator ends with
        the worker.  A slow program gets the changes of each worker combined into one.

        Raises:
            NotStartedError: this worker does not run.

        Example:
            >>> async for change in worker.members_changed():
            ...     print(change.kind, change.member.name)
        """
        self.parts.lifecycle.check_running()
        return self.parts.membership.changes()

    @property
    def known_members(self) -> list[WorkerInfo]:
        """Every present member that this worker knows, ordered by rank and name."""
        return self.parts.membership.known

    def group(self, peers: Iterable[str | int | Peer]) -> PeerGroup:
        """Return several workers, to call the same function on all of them.

        Args:
            peers: names, ranks or peers, each worker once; may be empty.

        Raises:
            UnknownWorkerError: one of `peers` does not exist.
            UsageError: a worker is in `peers` twice, or a `Peer` belongs to another
                worker or has options of its own.
            NotStartedError: this worker does not run.
        """
        self.parts.lifecycle.check_running()
        return group_of(self.parts.calls, peers)

    @property
    def tokens(self) -> JoinTokens:
        """Tokens by which workers from outside join through this member."""
        return JoinTokens(self.parts.tokens, self.parts.loop_guard)

    def empty(
        self, *shape: int | Sequence[int], dtype: torch.dtype = torch.float32
    ) -> torch.Tensor:
        """Return a tensor in memory that is shared with the peers of this host.

        Sending it, or a contiguous part of it, to such a peer copies nothing: the peer
        gets the same memory.  Later writes on either side may then be visible on the
        other; this depends on the transport, and no program should rely on it
        (`asyncrpc.share` is for shared state).  The memory is in use until this tensor
        and every tensor that peers received of it are dead.

        Up to 64 KiB, or beyond LimitOptions.shared_memory_bytes, it is not shared.

        Args:
            *shape: sizes, or one sequence of sizes.
            dtype: any dtype except the quantized ones.

        Returns:
            An uninitialized tensor of `shape`, contiguous, on the CPU.

        Raises:
            NotStartedError: this worker does not run.

        Thread safety: from any thread but those of other event loops.
        """
        self.parts.lifecycle.check_running()
        check_kind("dtype", dtype, torch.dtype, "a torch.dtype")
        parts = self.parts
        return empty_tensor(parts.memory, parts.tasks, sizes_of(shape), dtype)

    # --- the group -------------------------------------------------------------------

    async def barrier(self, timeout_s: float | None = None) -> None:
        """Wait until every worker of the group has reached this barrier.

        The n-th call on one worker meets the n-th call on every other worker, so all
        workers must call it equally often.  `asyncrpc.collectives.rendezvous` also has
        tags, payloads, and only some of the workers as members.

        If a barrier fails, it fails at once on every worker that has not passed it,
        including later arrivals.  After that, the live workers can use the next one.

        Args:
            timeout_s: seconds to wait; None: no limit.

        Raises:
            BarrierTimeoutError: `timeout_s` passed here; `missing` names the workers
                that did not reach it.  It is a TimeoutError.
            BarrierBrokenError: another worker gave this barrier up.
            WorkerLostError: a worker is gone; every later barrier raises this as well.
            UsageError: the group has no ranks.

        Cancellation:
            The barrier fails on the other workers as well.
        """
        self.parts.check_on_loop("Worker.barrier")
        if timeout_s is not None:
            check_seconds("timeout_s", timeout_s, at_least=0)
        await self.parts.barriers.barrier(timeout_s)

    def subscribe(
        self, *kinds: type[E], items_max: int = ITEMS_MAX, with_recent: bool = False
    ) -> Subscription[E]:
        """Return the events of this worker from now on; see `asyncrpc.trace`.

        Args:
            *kinds: classes of events, as in `asyncrpc.trace`; without any: all.
            items_max: events that wait to be read; beyond it the oldest are dropped.
            with_recent: begin with the last 2,000 of each kind.

        Raises:
            UsageError: an argument is of another kind, or `items_max` is not positive.
        """
        subscribe = self.parts.recorder.subscribe
        return subscribe(kinds, items_max, with_recent=with_recent)

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
        return f"<Worker {self.name!r} ({where}), {self.parts.lifecycle.state.value}>"

    def _repr_html_(self) -> str:
        state = self.parts.lifecycle.state
        tone: Tone = "good" if self.parts.lifecycle.is_running else "off"
        rows: list[tuple[str, Cell]] = [("state", State(state.value, tone))]
        if self.rank >= 0:
            rows.append(("rank", f"{self.rank} of {self.world_size}"))
        if not self.is_closed:
            members = ", ".join(member.name for member in self.known_members)
            rows += [
                ("process", f"{self.parts.identity.pid} on {os.uname().nodename}"),
                ("addresses", "\n".join(self.addresses)),
                ("members", f"{len(self.known_members):,}: {members}"),
                ("calls served now", f"{self.parts.active:,}"),
            ]
        return panel(f"Worker {self.name!r}", rows=rows)
