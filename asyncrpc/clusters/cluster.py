"""`Cluster`: a program that starts its workers, calls them, and ends them.

    async with asyncrpc.Cluster(4) as cluster:
        print(await cluster["w0"].call(os.getpid))

The program's own worker, the *driver*, admits the others; it has no rank.  Where the
workers run is decided by a `Ground`; how they live, in `lives`.  A program that joins
workers which are there already has an `AttachedWorkers` instead.
"""

from __future__ import annotations

import secrets
from collections.abc import Generator, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from types import TracebackType
from typing import Any, Final, Self, TypeVar, Unpack

from asyncrpc import JoinRendezvous, LocalRendezvous, Options, Peer
from asyncrpc.api import Worker
from asyncrpc.clusters import kept
from asyncrpc.clusters import machine as m
from asyncrpc.clusters.actors.actors import Actors
from asyncrpc.clusters.actors.spawning import spawn_in
from asyncrpc.clusters.attachment import AttachedWorkers, as_unanswered
from asyncrpc.clusters.changes import ClusterChanges
from asyncrpc.clusters.hosts import Ground, open_hosts
from asyncrpc.clusters.keeping import Keeper
from asyncrpc.clusters.lifetime import start_without_block
from asyncrpc.clusters.lives import WorkerLives, WorkerRecipe
from asyncrpc.clusters.local.processes import LocalGround, OutputRelay, ProgramStreams
from asyncrpc.clusters.remote.options import SlurmOptions, SshOptions
from asyncrpc.clusters.restarts import RestartLimits
from asyncrpc.clusters.roster import Roster
from asyncrpc.clusters.service import ClusterService
from asyncrpc.clusters.settings import (
    NOT_KEPT_BY_SLURM,
    NOT_STARTED_HERE,
    WORKERS_MAX,
    ClusterSettings,
    check_names,
    check_place,
    check_workers,
)
from asyncrpc.clusters.shown import cluster_html, summary_of
from asyncrpc.clusters.threads import in_thread
from asyncrpc.core.arguments import (
    check_count,
    check_duration,
    check_flag,
    check_kind,
    check_texts,
)
from asyncrpc.core.host.socket_directory import SocketDirectory
from asyncrpc.core.loop.loops import check_loop, loop_for
from asyncrpc.core.multiprocessing.environment import threads_each
from asyncrpc.errors import AlreadyStartedError, NotStartedError, UsageError
from asyncrpc.extend import add_service

T = TypeVar("T")

_SECRET_BYTES: Final = 32  # as long as the hash of the HMAC that proves it


class Cluster:
    """Workers that this program starts, each a process of this host.

    An asynchronous context manager; or `await` it, for the cells of a notebook, and
    `close` it.  `cluster["w0"]` is a `Peer`; meanwhile the program is a worker itself,
    so `asyncrpc.remote("w0", ...)` works as well.  No process outlives the cluster, nor
    the program, however it ends, unless it is kept.

    `Cluster.ssh` and `Cluster.slurm` start the workers on other hosts;
    `Cluster.attach` joins workers that something else has started.

    Its methods raise NotStartedError unless it runs, and UsageError on another loop.

    Thread safety:
        Use it on the event loop that entered it.

    Attributes:
        name: of the program's own worker.
        start_timeout_s: seconds that the start of a worker may take.
    """

    def __init__(
        self,
        workers: int = 1,
        *,
        name: str = "cluster",
        names: Sequence[str] | None = None,
        options: Options | None = None,
        restart: RestartLimits | None = None,
        threads: int | None = None,
        start_timeout_s: float = 60.0,
        drain_timeout_s: float = 0.0,
        keep: bool = False,
    ) -> None:
        """Describe a cluster; `async with` starts it.

        Args:
            workers: how many to start; `start` and `resize` change it later.
            name: of the program's own worker.
            names: of the workers; None: `w0`, `w1` and so on.
            options: of every worker.  The secret is made here unless they have one;
                workers listen on this host alone unless they say where.
            restart: how often a lost worker starts again, and how soon; None: never.
            threads: that torch uses in each worker; None: an equal share of the cores.
            start_timeout_s: seconds that the start of a worker may take.
            drain_timeout_s: seconds that calls in flight have when a worker is stopped.
            keep: whether the workers stay when the program leaves the block or ends.
                `Cluster.attach(name)` joins them, and `end` ends them.  What they print
                goes to files beside their record.

        Raises:
            UsageError: an argument is out of range or has the wrong type.
        """
        check_workers(workers, name, names)
        check_kind("options", options, (Options, type(None)), "an Options or None")
        kinds = (RestartLimits, type(None))
        check_kind("restart", restart, kinds, "a RestartLimits or None")
        check_duration("start_timeout_s", start_timeout_s)
        check_duration("drain_timeout_s", drain_timeout_s)
        check_flag("keep", keep)
        if keep:
            kept.check_name(name)
        threads_each(max(1, workers), threads, "threads")  # checks it
        self.name = name
        self.start_timeout_s = start_timeout_s
        self._first_names = None if names is None else tuple(names)
        self._count = workers
        self._options = options or Options()
        self._restart = restart
        self._threads = threads
        self._drain_timeout_s = drain_timeout_s
        self._is_kept = keep
        self._ground: Ground = LocalGround()
        self._contact: str | tuple[str, ...] = ()  # of workers that are there already
        self._stack = AsyncExitStack()
        self._driver: Worker | None = None
        self._lives: WorkerLives | None = None
        self._attachment: AttachedWorkers | None = None
        self._has_begun = False

    @classmethod
    def ssh(
        cls,
        hosts: Sequence[str],
        workers_per_host: int = 1,
        *,
        ssh: SshOptions | None = None,
        **settings: Unpack[ClusterSettings],
    ) -> Self:
        """Describe a cluster on other hosts, by SSH; `async with` starts it.

        Each host needs Linux, and the same asyncrpc, torch and Python as the program
        has.  Workers and program listen on TCP, and reach one another.  The package
        asyncssh is needed: the extra `ssh`.

        Args:
            hosts: each as `host`, `user@host`, `host:port` or both.
            workers_per_host: how many workers start on each; `start` and `resize`
                start further ones where the fewest are.
            ssh: keys, ports, a jump host, another Python.
            **settings: as of `Cluster`.

        Raises:
            UsageError: an argument is out of range or has the wrong type, or asyncssh
                is missing.
        """
        from asyncrpc.clusters.remote.ssh import SshGround  # noqa: PLC0415  (an extra)

        check_count("workers_per_host", workers_per_host, at_most=WORKERS_MAX)
        check_kind("ssh", ssh, (SshOptions, type(None)), "an SshOptions or None")
        check_texts("hosts", hosts, at_least=1)
        cluster = cls(len(hosts) * workers_per_host, **settings)
        cluster._ground = SshGround(hosts, ssh or SshOptions(), cluster.start_timeout_s)
        return cluster

    @classmethod
    def slurm(
        cls,
        nodes: int = 1,
        workers_per_node: int = 1,
        *,
        slurm: SlurmOptions | None = None,
        **settings: Unpack[ClusterSettings],
    ) -> Self:
        """Describe a cluster on nodes of Slurm; `async with` starts it.

        Inside a job the workers start on its first nodes.  Outside, nodes are asked for
        with `salloc`, and given back at the end.  The nodes need the same files, as
        they have on most clusters.

        Args:
            nodes: how many.
            workers_per_node: how many workers start on each.
            slurm: what to ask for, how long to wait, another Python.
            **settings: as of `Cluster`; Slurm ends what a job leaves, so `keep` is
                refused.

        Raises:
            UsageError: an argument is out of range or has the wrong type.
        """
        from asyncrpc.clusters.remote.slurm import SlurmGround  # noqa: PLC0415

        check_count("nodes", nodes, at_least=1, at_most=WORKERS_MAX)
        check_count("workers_per_node", workers_per_node, at_most=WORKERS_MAX)
        check_kind("slurm", slurm, (SlurmOptions, type(None)), "a SlurmOptions or None")
        if settings.get("keep"):
            raise UsageError(NOT_KEPT_BY_SLURM)
        cluster = cls(nodes * workers_per_node, **settings)
        cluster._ground = SlurmGround(
            nodes, slurm or SlurmOptions(), cluster.start_timeout_s
        )
        return cluster

    @classmethod
    def attach(
        cls,
        where: str | Sequence[str],
        *,
        name: str | None = None,
        options: Options | None = None,
    ) -> Self:
        """Describe a cluster of workers that are there already; `async with` joins it.

        They have been started by a `Cluster` with `keep=True`, by `asyncrpc run`,
        torchrun, Kubernetes or anything else.  The program becomes a further member.
        `peers` are the workers that are there; the workers of other programs that have
        a cluster are not among them.  Leaving the block ends no worker.

        Args:
            where: the name of a cluster that was kept by this user on this host; or
                addresses of some workers, tried in turn, such as `tcp://10.0.0.2:7000`.
            name: of the program's own worker; None: one that nobody else has.
            options: of the program's own worker; it needs the secret of the group,
                which the record of a kept cluster has.

        Raises:
            UsageError: an argument has the wrong type, or is no address.
        """
        check_kind("options", options, (Options, type(None)), "an Options or None")
        contact = kept.contact_of(where)
        cluster = cls(
            0, name=name or f"program-{secrets.token_hex(6)}", options=options
        )
        cluster._contact = contact
        return cluster

    # --- life ------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        """Start the workers; return once all can be called.

        Raises:
            WorkerStartError: a worker did not start; the error has its traceback.
            AlreadyStartedError: the cluster has been entered before.
            UsageError: no event loop runs here, or this is not Linux.

        Cancellation:
            What was started is ended.
        """
        if self._driver is not None:
            raise AlreadyStartedError(
                f"the cluster {self.name!r} has been entered before; make another"
            )
        try:
            await self._enter()
        except BaseException as error:
            await self._stack.__aexit__(type(error), error, error.__traceback__)
            raise
        return self

    async def _enter(self) -> None:
        self._loop = loop_for("a Cluster")
        if self._contact:
            await self._join()
        else:
            check_place()
            await self._begin()
            await self.start(self._count, names=self._first_names)
            self._has_begun = True

    async def _join(self) -> None:
        """Become a member of a group that is there."""
        contact, options = self._contact, self._options
        if isinstance(contact, str):
            contact, secret = await in_thread(kept.read_contact, contact)
            options = replace(options, secret=secret)
        driver = self._own_worker(JoinRendezvous(contact), options)
        with as_unanswered(self._contact):
            self._driver = await self._stack.enter_async_context(driver)
        self._begin_roster()
        self._attachment = AttachedWorkers(driver, self._roster)
        self._stack.push_async_callback(self._attachment.close)
        await self._attachment.open()

    async def _begin(self) -> None:
        """Start the program's own worker, and all that starts others."""
        directory = SocketDirectory()
        self._stack.callback(directory.remove)
        secret = self._options.secret_bytes or (
            secrets.token_hex(_SECRET_BYTES).encode()
        )
        network = self._options.network
        is_told = network.listen or network.advertise or network.interface
        is_by_path = self._ground.is_here and not is_told
        options = replace(self._options, secret=secret)
        if is_by_path:
            listen = (f"uds://{directory.path / 'driver'}",)
            options = replace(options, network=replace(network, listen=listen))
        driver = self._own_worker(LocalRendezvous(1), options)
        self._driver = await self._stack.enter_async_context(driver)
        self._begin_roster()
        keep = None
        if self._is_kept:
            await in_thread(kept.claim, self.name)
            self._stack.push_async_callback(self._forget_unless_kept)
            keep = Keeper(driver, self.name, secret).keep
        relay = OutputRelay(ProgramStreams())
        self._stack.push_async_callback(in_thread, relay.close)
        hosts = await open_hosts(self._ground, relay, self._stack)
        recipe = WorkerRecipe(
            options=self._options,
            socket_directory=directory.path if is_by_path else None,
            threads=self._threads,
            sharers=max(1, -(-self._count // len(hosts))),
            drain_timeout_s=self._drain_timeout_s,
            restart=self._restart,
            keeps=self.name if self._is_kept else None,
            is_here=self._ground.is_here,
            secret=secret,
        )
        self._lives = WorkerLives(driver, self._roster, recipe, hosts, keep)
        self._stack.push_async_callback(self._close_lives)

    def _own_worker(
        self, rendezvous: LocalRendezvous | JoinRendezvous, options: Options
    ) -> Worker:
        worker = Worker(self.name, rendezvous=rendezvous, options=options)
        add_service(worker, ClusterService)
        return worker

    def _begin_roster(self) -> None:
        self._roster = Roster()
        self._stack.callback(self._roster.broadcast.end)

    async def _close_lives(self) -> None:
        assert self._lives is not None
        await self._lives.close(stops=not self._stays)

    async def _forget_unless_kept(self) -> None:
        if not self._stays:
            await in_thread(kept.remove, self.name)

    @property
    def _stays(self) -> bool:
        """Whether the workers stay at the end of the block."""
        return self._is_kept and self._has_begun

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End the workers, and the program's own."""
        await self._stack.__aexit__(kind, error, traceback)

    def __await__(self) -> Generator[Any, None, Self]:
        """Start the workers without a block, for the cells of a notebook.

        They run until `close`.  A cluster of the same name, or that joined at the same
        place, which an earlier `await` has left running on this event loop, is closed
        first: a cell that runs again replaces what it started.
        """
        return start_without_block(self, self._contact or (self.name,)).__await__()

    async def close(self) -> None:
        """End the workers and the program's own, as the end of a block does.

        Idempotent.  Workers that are kept, and those of others, stay.

        Cancellation:
            They end all the same, calls in flight at once.
        """
        if self._driver is not None:
            check_loop("Cluster.close", self._driver.loop, f"the cluster {self.name!r}")
        await self._stack.aclose()

    # --- its workers -----------------------------------------------------------------

    @property
    def worker(self) -> Worker:
        """The program's own worker; NotStartedError: there is none yet."""
        if self._driver is None:
            raise NotStartedError(f"the cluster {self.name!r} must be entered first")
        return self._driver

    @property
    def names(self) -> list[str]:
        """The names of the workers that run, or are to run again."""
        return [] if self._driver is None else self._roster.names

    @property
    def peers(self) -> list[Peer]:
        """The workers that can be called now, in the order of their start."""
        worker = self.worker
        return [worker.peer(name) for name in self._roster.running]

    def __getitem__(self, name: str) -> Peer:
        """Return a worker, by name.

        Raises:
            ClusterError: the worker does not run.
            UsageError: the cluster has no worker of this name.
        """
        worker, member = self._check_runs(), self._roster.member(name)
        member.check_runs(can_restart=self._lives is not None)
        return worker.peer(name)

    def __len__(self) -> int:
        return len(self.names)

    def state(self, name: str) -> m.ClusterWorkerState:
        """Return what a worker does: `"starting"`, `"running"` and so on.

        Raises:
            UsageError: the cluster has no worker of this name.
        """
        _ = self.worker
        return self._roster.member(name).machine.state

    def changes(self) -> ClusterChanges:
        """Return an iterator over the changes of the workers from now on.

        Example:
            >>> async for change in cluster.changes():
            ...     print(change.kind, change.worker, change.why)
        """
        _ = self.worker
        return self._roster.broadcast.changes()

    # --- more and fewer --------------------------------------------------------------

    async def start(
        self, count: int = 1, *, names: Sequence[str] | None = None
    ) -> list[Peer]:
        """Start further workers; return them once they can be called.

        Args:
            count: how many.
            names: of the workers; None: the next of `w0`, `w1` and so on.

        Raises:
            WorkerStartError: a worker did not start; the others that were asked for
                have been ended.
            UsageError: an argument is out of range, or a name is taken.

        Cancellation:
            The new workers are ended.
        """
        lives = self._starter("Cluster.start")
        check_count("count", count, at_most=WORKERS_MAX)
        if names is None:
            names = self._roster.next_names(count)
        check_names(names, count, self.name)
        await lives.start(names)
        return [self.worker.peer(name) for name in names]

    async def stop(self, *names: str) -> None:
        """End workers, in order: calls in flight have `drain_timeout_s`.

        A worker that does not end within two seconds more is killed.  A worker that
        does not run is left as it is.

        Raises:
            UsageError: the cluster has no worker of this name.

        Cancellation:
            They end all the same.
        """
        lives = self._starter("Cluster.stop")
        await lives.stop([self._roster.member(name) for name in names])

    async def restart(self, *names: str) -> None:
        """End workers and start them again; return once they can be called.

        Restarts that the program asks for are not counted in `RestartLimits`.

        Raises:
            WorkerStartError: a worker did not start again.
            UsageError: the cluster has no worker of this name.

        Cancellation:
            They start all the same.
        """
        lives = self._starter("Cluster.restart")
        await lives.restart([self._roster.member(name) for name in names])

    async def resize(self, count: int) -> None:
        """Start or end workers until `count` of them run; the newest end first.

        Raises:
            WorkerStartError: a worker did not start.
            UsageError: `count` is out of range.

        Cancellation:
            New workers are ended; others that were to end, end.
        """
        self._starter("Cluster.resize")
        check_count("count", count, at_most=WORKERS_MAX)
        names = self.names
        if count > len(names):
            await self.start(count - len(names))
        else:
            await self.stop(*names[count:])

    async def spawn(
        self,
        cls: type[T],
        /,
        *args: Any,
        on: Sequence[str | Peer] | None = None,
        per_worker: int = 1,
        remake: bool = False,
        **kwargs: Any,
    ) -> Actors[T]:
        """Make objects of a class on workers; return them once all are made.

        Args:
            cls: the class, whose constructor runs in a thread.
            *args: of the class; the same for each, but for `asyncrpc.scatter(...)`.
            on: the workers, by name; None: all that run now.
            per_worker: how many on each.
            remake: make an object again at its next call if its worker was lost.
            **kwargs: of the class, as `args`.

        Raises:
            RemoteError: a constructor raised; no object is left.
            ClusterError: a worker does not run.
            UsageError: an argument is wrong, the cluster does not run, or not here.

        Cancellation:
            No object is left.
        """
        self._check_loop("Cluster.spawn")
        return await spawn_in(self, cls, args, kwargs, on, per_worker, remake)

    async def end(self, timeout_s: float = 60.0) -> None:
        """End the workers in order, those that are kept as well.

        Args:
            timeout_s: seconds that workers of an attached cluster may take.

        Raises:
            ClusterError: a worker has not ended in time, or was not started by a
                `Cluster`; the others have.

        Cancellation:
            They end all the same.
        """
        self._check_loop("Cluster.end")
        check_duration("timeout_s", timeout_s)
        if self._attachment is None:
            await self.stop(*self._roster.names)
            self._has_begun = False
        else:
            await self._attachment.end(timeout_s)
            if isinstance(self._contact, str):
                await in_thread(kept.remove, self._contact)

    def __repr__(self) -> str:
        summary = summary_of(self._count, self._driver, getattr(self, "_roster", None))
        return f"<Cluster {self.name!r}: {summary}>"

    def _repr_html_(self) -> str:
        roster = getattr(self, "_roster", None)
        return cluster_html(self.name, self._count, self._driver, roster)

    def _check_runs(self) -> Worker:
        if self.worker.is_closed:
            raise NotStartedError(f"the cluster {self.name!r} has ended")
        return self.worker

    def _check_loop(self, used: str) -> None:
        self._check_runs()
        check_loop(used, self._loop, f"the cluster {self.name!r}")

    def _starter(self, used: str) -> WorkerLives:
        """Return what starts workers here, for the running loop."""
        self._check_loop(used)
        if self._lives is None:
            raise UsageError(f"{used} {NOT_STARTED_HERE}")
        self._lives.start_timeout_s = self.start_timeout_s
        return self._lives
