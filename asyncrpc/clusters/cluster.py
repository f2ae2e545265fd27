"""`Cluster`: a program that starts its workers, calls them, and ends them.

    async with asyncrpc.Cluster(4) as cluster:
        print(await cluster["w0"].call(os.getpid))

The program's own worker, the *driver*, admits the others; it has no rank.  Where the
workers run is decided by a `Ground`; how they live, in `lives`.  A program that joins
workers which are there already has an `AttachedWorkers` instead.
"""

from __future__ import annotations

import secrets
from collections.abc import Generator, Mapping, Sequence
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

from asyncrpc import Options, Peer
from asyncrpc.api import Worker
from asyncrpc.clusters import kept
from asyncrpc.clusters import machine as m
from asyncrpc.clusters.actors.actors import Actors
from asyncrpc.clusters.actors.spawning import spawn_in
from asyncrpc.clusters.changes import ClusterChanges
from asyncrpc.clusters.code.sender import CodeUpdate
from asyncrpc.clusters.hosts import Ground
from asyncrpc.clusters.lives import WorkerLives
from asyncrpc.clusters.opening import (
    OpenedCluster,
    end_workers,
    open_cluster,
    plan_of,
)
from asyncrpc.clusters.remote.options import RayOptions, SlurmOptions, SshOptions
from asyncrpc.clusters.restarts import RestartLimits
from asyncrpc.clusters.service import cluster_of
from asyncrpc.clusters.settings import (
    WORKERS_MAX,
    ClusterSettings,
    CodePaths,
    check_names,
    check_place,
)
from asyncrpc.clusters.shown import cluster_html, summary_of
from asyncrpc.core.arguments import (
    check_count,
    check_duration,
    check_kind,
    check_texts,
)
from asyncrpc.core.loop.loops import check_loop, loop_for
from asyncrpc.core.worker import leave_running, workers_left_running
from asyncrpc.errors import (
    AlreadyStartedError,
    ClusterError,
    NotStartedError,
    UsageError,
)

T = TypeVar("T")
C = TypeVar("C", bound="Cluster")


class Cluster:
    """Workers that this program starts, each a process of this host.

    An asynchronous context manager; or `await` it, for the cells of a notebook, and
    `close` it.  `cluster["w0"]` is a `Peer`; meanwhile the program is a worker itself,
    so `asyncrpc.remote("w0", ...)` works as well.  No process outlives the cluster, nor
    the program, however it ends, unless it is kept.

    `Cluster.ssh`, `Cluster.slurm` and `Cluster.ray` start the workers on other hosts;
    `Cluster.attach` joins workers that something else has started.

    Raises:
        NotStartedError: (each method) it has not been entered, or has ended.
        UsageError: (each method) an argument is wrong, or another event loop runs here
            than the one that entered it.

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
        code: CodePaths = (),
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
            code: folders of modules, packages or modules that workers get, for hosts
                that do not see the program's files; `update_code` sends them again.

        Raises:
            UsageError: an argument is out of range or has the wrong type.
        """
        check_duration("start_timeout_s", start_timeout_s)
        self.name = name
        self.start_timeout_s = start_timeout_s
        self._plan = plan_of(
            workers,
            name=name,
            names=names,
            options=options,
            restart=restart,
            threads=threads,
            drain_timeout_s=drain_timeout_s,
            keep=keep,
            code=code,
        )
        self._stack = AsyncExitStack()
        self._opened: OpenedCluster | None = None

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

        Each host needs Linux, and the same asyncrpc, torch and Python as the program.
        Workers and program reach one another by TCP.  It needs the extra `ssh`.

        Args:
            hosts: each as `host`, `user@host`, `host:port` or both.
            workers_per_host: how many workers start on each; `start` and `resize`
                start further ones where the fewest are.
            ssh: keys, ports, a jump host, another Python.
            **settings: as of `Cluster`.

        Raises:
            UsageError: an argument is wrong, or asyncssh is missing.
        """
        from asyncrpc.clusters.remote.ssh import SshGround  # noqa: PLC0415  (an extra)

        check_count("workers_per_host", workers_per_host, at_most=WORKERS_MAX)
        check_texts("hosts", hosts, at_least=1)
        return _on(
            SshGround(hosts, ssh), cls(len(hosts) * workers_per_host, **settings)
        )

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
        return _on(SlurmGround(nodes, slurm), cls(nodes * workers_per_node, **settings))

    @classmethod
    def ray(
        cls,
        bundles: Sequence[Mapping[str, float]],
        workers_per_bundle: int = 1,
        *,
        ray: RayOptions | None = None,
        **settings: Unpack[ClusterSettings],
    ) -> Self:
        """Describe a cluster in bundles of Ray; `async with` reserves and starts it.

        The program has called `ray.init`.  It needs the extra `ray`.

        Args:
            bundles: what Ray reserves for each host server, such as `{"GPU": 1}`.
            workers_per_bundle: how many workers start in each.
            ray: how the bundles are placed, and what runs there.
            **settings: as of `Cluster`, without `keep`: Ray ends what a job leaves.

        Raises:
            UsageError: an argument is out of range or has the wrong type.
        """
        from asyncrpc.clusters.ray.ground import RayGround  # noqa: PLC0415  (an extra)

        check_count("workers_per_bundle", workers_per_bundle, at_most=WORKERS_MAX)
        ground = RayGround(bundles, ray)  # checks them
        return _on(ground, cls(len(bundles) * workers_per_bundle, **settings))

    @classmethod
    def attach(
        cls,
        where: str | Sequence[str],
        *,
        name: str | None = None,
        options: Options | None = None,
    ) -> Self:
        """Describe a cluster of workers that are there already; `async with` joins it.

        Started by a `Cluster` with `keep=True`, `asyncrpc run`, torchrun or anything
        else.  `peers` are the workers that are there; those of other programs that have
        a cluster are not among them.  Leaving the block ends no worker.

        Args:
            where: the name of a cluster that was kept by this user on this host; or
                addresses of some workers, tried in turn, such as `tcp://10.0.0.2:7000`.
            name: of the program's own worker; None: one that nobody else has.
            options: of the program's own worker; it needs the secret of the group,
                which the record of a kept cluster has.
        """
        check_kind("options", options, (Options, type(None)), "an Options or None")
        own = name or f"program-{secrets.token_hex(6)}"
        cluster = cls(0, name=own, options=options)
        cluster._plan.contact = kept.contact_of(where)
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
        _check_is_new(self)
        loop_for("a Cluster")
        if not self._plan.contact:
            check_place()
        try:
            self._plan.ground.start_timeout_s = self.start_timeout_s
            self._opened = await open_cluster(self._plan, self._stack, self)
            if not self._plan.contact:
                await self.start(self._plan.count, names=self._plan.names)
                self._opened.stays = self._plan.is_kept
        except BaseException as error:
            await self._stack.__aexit__(type(error), error, error.__traceback__)
            raise
        return self

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

        They run until `close`, or the end of the program.  What an earlier `await` for
        a cluster of the same name has left on this loop is closed first.

        Raises:
            WorkerStartError: a worker did not start; and as the begin of a block.

        Cancellation:
            What was started is ended.
        """
        return _start_anew(self).__await__()

    async def close(self) -> None:
        """End the workers and the program's own, as the end of a block does.

        Idempotent.  Workers that are kept, and those of others, stay.

        Cancellation:
            They end all the same, calls in flight at once.
        """
        if self._opened is not None:
            check_loop("Cluster.close", self._opened.loop, f"the cluster {self.name!r}")
        await self._stack.aclose()

    @property
    def subject(self) -> str | tuple[str, ...]:
        """Internal: what it is a cluster of; those of one replace one another."""
        return self._plan.contact or (self.name,)

    # --- its workers -----------------------------------------------------------------

    @property
    def worker(self) -> Worker:
        """The program's own worker."""
        return self._entered.worker

    @property
    def _entered(self) -> OpenedCluster:
        if self._opened is None:
            raise NotStartedError(f"the cluster {self.name!r} must be entered first")
        return self._opened

    @property
    def names(self) -> list[str]:
        """The names of the workers that run, or are to run again."""
        return [] if self._opened is None else self._opened.roster.names

    @property
    def peers(self) -> list[Peer]:
        """The workers that can be called now, in the order of their start."""
        opened = self._entered
        return [opened.worker.peer(name) for name in opened.roster.running]

    def __getitem__(self, name: str) -> Peer:
        """Return a worker, by name.

        Raises:
            ClusterError: the worker does not run.
            UsageError: the cluster has no worker of this name.
        """
        opened = self._entered.alive()
        member = opened.roster.member(name)
        if member.is_ended:
            remedy = f"; `await cluster.restart({name!r})` starts it"
            raise ClusterError(
                f"worker {name!r} does not run{member.why and f': {member.why}'}"
                f"{'' if opened.lives is None else remedy}"
            )
        return opened.worker.peer(name)

    def __len__(self) -> int:
        return len(self.names)

    def state(self, name: str) -> m.ClusterWorkerState:
        """Return what a worker does: `"starting"`, `"running"` and so on.

        Raises:
            UsageError: the cluster has no worker of this name.
        """
        return self._entered.roster.member(name).machine.state

    def changes(self) -> ClusterChanges:
        """Return an iterator over the changes of the workers from now on."""
        return self._entered.roster.broadcast.changes()

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
            UsageError: an argument is wrong, or a name taken; and as in the class.

        Cancellation:
            The new workers are ended.
        """
        lives = self._starter("Cluster.start")
        check_count("count", count, at_most=WORKERS_MAX)
        if names is None:
            names = self._entered.roster.next_names(count)
        check_names(names, count, self.name)
        await lives.start(names)
        return [self.worker.peer(name) for name in names]

    async def stop(self, *names: str) -> None:
        """End workers, in order: calls in flight have `drain_timeout_s`.

        A worker that does not end within two seconds more is killed.  A worker that
        does not run is left as it is.

        Raises:
            UsageError: the cluster has no worker of this name; and as in the class.

        Cancellation:
            They end all the same.
        """
        lives = self._starter("Cluster.stop")
        await lives.stop([self._entered.roster.member(name) for name in names])

    async def restart(self, *names: str) -> None:
        """End workers and start them again; return once they can be called.

        Restarts that the program asks for are not counted in `RestartLimits`.

        Raises:
            WorkerStartError: a worker did not start again.
            UsageError: the cluster has no worker of this name; and as in the class.

        Cancellation:
            They start all the same.
        """
        lives = self._starter("Cluster.restart")
        await lives.restart([self._entered.roster.member(name) for name in names])

    async def resize(self, count: int) -> None:
        """Start or end workers until `count` of them run; the newest end first.

        Raises:
            WorkerStartError: a worker did not start.
            UsageError: `count` is out of range; and as in the class.

        Cancellation:
            New workers are ended; others that were to end, end.
        """
        lives = self._starter("Cluster.resize")
        check_count("count", count, at_most=WORKERS_MAX)
        await lives.resize(count)

    async def ready(self) -> None:
        """Wait until all workers run that are to, after a loss for example.

        They know one another then.

        Raises:
            ClusterError: a worker failed, and no restart is left.

        Cancellation:
            Only the waiting ends.
        """
        await self._starter("Cluster.ready").ready()

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

        Cancellation:
            No object is left.
        """
        self._entered.here("Cluster.spawn")
        return await spawn_in(self, cls, args, kwargs, on, per_worker, remake)

    async def update_code(self) -> CodeUpdate:
        """Send the files of `code` that have changed, and load their modules anew.

        What other modules and objects have taken of a module stays, as with
        `importlib.reload`, and is in the `CodeUpdate`.

        Raises:
            ClusterError: a worker could not load the code; the others have.

        Cancellation:
            Some workers may have the new code.
        """
        self._starter("Cluster.update_code")
        if self._entered.code is None:
            raise UsageError("Cluster.update_code needs a cluster with code=")
        return await self._entered.code.update(self._entered.roster.running)

    async def dashboard(self, *, host: str = "127.0.0.1", port: int = 0) -> str:
        """Serve a page that shows the cluster; return its address, with a token.

        Whoever has the address sees the cluster, until its end.

        Args:
            host: address of the interface to listen at.
            port: to listen at; 0: a free one.

        Raises:
            UsageError: an argument is wrong, the port is in use; and as in the class.

        Cancellation:
            Nothing is served.
        """
        worker = self._entered.here("Cluster.dashboard").worker
        from asyncrpc.clusters.dashboard import serve_dashboard  # noqa: PLC0415

        return await serve_dashboard(self._stack, worker, host, port)

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
        opened = self._entered.here("Cluster.end")
        check_duration("timeout_s", timeout_s)
        await end_workers(opened, self._plan, timeout_s)

    def __repr__(self) -> str:
        return f"<Cluster {self.name!r}: {summary_of(self._plan.count, self._opened)}>"

    def _repr_html_(self) -> str:
        summary = summary_of(self._plan.count, self._opened)
        return cluster_html(self.name, summary, self._opened)

    def _starter(self, used: str) -> WorkerLives:
        """Return what starts workers here, for the running loop."""
        lives = self._entered.here(used).starter(used)
        lives.start_timeout_s = self.start_timeout_s
        return lives


def _check_is_new(cluster: Cluster) -> None:
    if cluster._opened is not None:  # noqa: SLF001
        raise AlreadyStartedError(
            f"the cluster {cluster.name!r} has been entered before; make another"
        )


def _on(ground: Ground, cluster: C) -> C:
    """Let a cluster start its workers on a ground."""
    if cluster._plan.is_kept and ground.not_kept:  # noqa: SLF001  (its own class's)
        raise UsageError(ground.not_kept)
    cluster._plan.ground = ground  # noqa: SLF001
    return cluster


async def _start_anew(cluster: C) -> C:
    """Start it, and close what an earlier `await` for the same subject has left."""
    _check_is_new(cluster)
    for former in map(cluster_of, workers_left_running()):
        if isinstance(former, Cluster) and former.subject == cluster.subject:
            await former.close()
    await cluster.__aenter__()
    leave_running(cluster.worker)
    return cluster
