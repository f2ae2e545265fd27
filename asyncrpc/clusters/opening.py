"""How a cluster opens: the program's worker, and what starts others or follows them.

The program's own worker, the *driver*, admits the workers that it starts; it has no
rank.  Where they run is decided by a `Ground`.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from typing import Any, Final, Self

from asyncrpc import (
    DeviceOptions,
    JoinRendezvous,
    LocalRendezvous,
    Options,
    Policy,
)
from asyncrpc.api import Worker
from asyncrpc.clusters import kept
from asyncrpc.clusters.attachment import AttachedWorkers
from asyncrpc.clusters.code.folders import CodeFolder
from asyncrpc.clusters.code.sender import CodeSender
from asyncrpc.clusters.discovery import find_by_commands
from asyncrpc.clusters.hosts import Ground, open_hosts
from asyncrpc.clusters.keeping import Keeper
from asyncrpc.clusters.lives import WorkerLives, WorkerRecipe
from asyncrpc.clusters.local.processes import LocalGround, OutputRelay, ProgramStreams
from asyncrpc.clusters.progress import ProgressLine
from asyncrpc.clusters.restarts import RestartLimits
from asyncrpc.clusters.roster import Roster
from asyncrpc.clusters.service import ClusterService
from asyncrpc.clusters.settings import (
    NAME_LENGTH_MAX,
    NOT_OF_OTHERS,
    WORKERS_MAX,
    CodePaths,
    check_names,
)
from asyncrpc.clusters.threads import in_thread
from asyncrpc.clusters.worker import WorkerStarted
from asyncrpc.core.arguments import (
    check_count,
    check_duration,
    check_flag,
    check_kind,
    check_text,
)
from asyncrpc.core.host.socket_directory import SocketDirectory
from asyncrpc.core.loop.loops import check_loop
from asyncrpc.core.multiprocessing.environment import threads_each
from asyncrpc.errors import (
    ClusterError,
    NotStartedError,
    TransportError,
    UsageError,
)
from asyncrpc.extend import add_service, host_of

_SECRET_BYTES: Final = 32  # as long as the hash of the HMAC that proves it


@dataclass(slots=True, kw_only=True)
class ClusterPlan:
    """What a cluster is to be.

    Attributes:
        name: of the program's own worker.
        count: of the workers that it starts with.
        names: of these; None: `w0`, `w1` and so on.
        ground: gives the hosts.
        code: what is sent to the workers.
        contact: of workers that are there already: a name, or addresses; empty: the
            cluster starts its own.
    """

    name: str
    count: int
    names: Sequence[str] | None
    options: Options
    restart: RestartLimits | None
    threads: int | None
    drain_timeout_s: float
    is_kept: bool
    ground: Ground
    code: Sequence[CodeFolder] = ()
    contact: str | tuple[str, ...] = ()


def plan_of(
    workers: int,
    *,
    name: str,
    names: Sequence[str] | None,
    options: Options | None,
    restart: RestartLimits | None,
    threads: int | None,
    drain_timeout_s: float,
    keep: bool,
    code: CodePaths,
) -> ClusterPlan:
    """Return a plan for this host, of the arguments of `Cluster`, which it checks."""
    check_count("workers", workers, at_most=WORKERS_MAX)
    check_text("name", name, at_most=NAME_LENGTH_MAX)
    if names is not None:
        check_names(names, workers, name)
    check_kind("options", options, (Options, type(None)), "an Options or None")
    kinds = (RestartLimits, type(None))
    check_kind("restart", restart, kinds, "a RestartLimits or None")
    check_duration("drain_timeout_s", drain_timeout_s)
    check_flag("keep", keep)
    if keep:
        kept.check_name(name)
    threads_each(max(1, workers), threads, "threads")  # checks it
    paths: Any = code if type(code) in {list, tuple} else [code]
    if paths and options is not None and options.policy is Policy.STRICT:
        raise UsageError("code must be empty under Policy.STRICT: no code travels")
    return ClusterPlan(
        name=name,
        count=workers,
        names=None if names is None else tuple(names),
        options=options or Options(),
        restart=restart,
        threads=threads,
        drain_timeout_s=drain_timeout_s,
        is_kept=keep,
        ground=LocalGround(),
        code=[CodeFolder.at(path) for path in paths],
    )


@dataclass(slots=True, kw_only=True)
class OpenedCluster:
    """A cluster that has been opened.

    Attributes:
        worker: the program's own.
        lives: starts and ends workers; None: something else does.
        attached: follows workers that something else has started; None: there are none.
        code: sends the program's files; None: the workers get none.
        loop: on which it is used.
        stays: whether the workers outlive it.
        pid: of the process that has opened it.
    """

    worker: Worker
    roster: Roster
    lives: WorkerLives | None = None
    attached: AttachedWorkers | None = None
    code: CodeSender | None = None
    loop: asyncio.AbstractEventLoop
    stays: bool = False
    pid: int = field(default_factory=os.getpid)

    def alive(self) -> Self:
        """Return it; NotStartedError: it has ended, or this is a forked child."""
        its_name = f"the cluster {self.worker.name!r}"
        if self.pid != os.getpid():
            raise NotStartedError(
                f"{its_name} belongs to the process that this one was forked from;"
                " make another here"
            )
        if self.worker.is_closed:
            raise NotStartedError(f"{its_name} has ended")
        return self

    def here(self, used: str) -> Self:
        """Return it if it is alive; UsageError: another event loop runs here."""
        check_loop(used, self.alive().loop, f"the cluster {self.worker.name!r}")
        return self

    def starter(self, used: str) -> WorkerLives:
        """Return what starts workers; UsageError: another program does."""
        if self.lives is None:
            raise UsageError(f"{used} {NOT_OF_OTHERS}")
        return self.lives


async def open_cluster(
    plan: ClusterPlan, stack: AsyncExitStack, cluster: Any
) -> OpenedCluster:
    """Open a cluster without workers, or with those that are there; `stack` ends it.

    Args:
        cluster: found by `cluster_of` its worker.

    ClusterError: a host cannot be used, or no worker answers.
    """
    if plan.contact:
        return await _join(plan, stack, cluster)
    return await _begin(plan, stack, cluster)


async def _join(
    plan: ClusterPlan, stack: AsyncExitStack, cluster: Any
) -> OpenedCluster:
    """Become a member of a group that is there."""
    contact, options, names = plan.contact, plan.options, list[str]()
    if isinstance(contact, str):
        names, contact, secret = await in_thread(kept.read_contact, contact)
        options = replace(options, secret=secret)
    driver = Worker(plan.name, rendezvous=JoinRendezvous(contact), options=options)
    add_service(driver, lambda host: ClusterService(host, cluster=cluster))
    try:
        await stack.enter_async_context(driver)
    except TransportError as error:
        raise ClusterError(f"no worker of {plan.contact!r} answers: {error}") from error
    opened = _opened(driver, stack)
    opened.attached = AttachedWorkers(driver, opened.roster)
    stack.push_async_callback(opened.attached.close)
    await opened.attached.open(names)
    return opened


async def _begin(
    plan: ClusterPlan, stack: AsyncExitStack, cluster: Any
) -> OpenedCluster:
    """Start the program's own worker, and all that starts others."""
    directory = SocketDirectory()
    stack.callback(directory.remove)
    secret = plan.options.secret_bytes or secrets.token_hex(_SECRET_BYTES).encode()
    network = plan.options.network
    is_told = network.listen or network.advertise or network.interface
    is_by_path = plan.ground.is_here and not is_told
    options = replace(plan.options, secret=secret)
    if not plan.ground.is_here:  # this host need not have the workers' devices
        options = replace(options, devices=DeviceOptions())
    if is_by_path:
        listen = (f"uds://{directory.path / 'driver'}",)
        options = replace(options, network=replace(network, listen=listen))
    driver = Worker(plan.name, rendezvous=LocalRendezvous(1), options=options)
    add_service(driver, lambda host: ClusterService(host, cluster=cluster))
    await stack.enter_async_context(driver)
    opened = _opened(driver, stack)
    prepare: list[Callable[[str, WorkerStarted], Awaitable[object]]] = []
    if plan.code:
        opened.code = CodeSender(host_of(driver), plan.code)
        await opened.code.read()
        driver.parts.functions.check_name = opened.code.check
        prepare.append(opened.code.send_at_start)
    if plan.is_kept:
        await in_thread(kept.claim, plan.name)
        stack.push_async_callback(_forget_unless_it_stays, plan, opened)
        prepare.append(Keeper(driver, plan.name, secret).keep)
    progress = ProgressLine()
    relay = OutputRelay(ProgramStreams(progress))
    stack.push_async_callback(in_thread, relay.close)
    with progress.shown(lambda: f"{plan.name}: {plan.ground.waits_for}"):
        hosts = await open_hosts(plan.ground, relay, stack)
    recipe = WorkerRecipe(
        options=plan.options,
        socket_directory=directory.path if is_by_path else None,
        threads=plan.threads,
        sharers=max(1, -(-plan.count // len(hosts))),
        drain_timeout_s=plan.drain_timeout_s,
        restart=plan.restart,
        keeps=plan.name if plan.is_kept else None,
        is_here=plan.ground.is_here,
        entry=await find_by_commands(stack, driver, plan.count, secret),
        secret=secret,
    )
    opened.lives = WorkerLives(
        driver, opened.roster, recipe, hosts, prepare=prepare, progress=progress
    )
    stack.push_async_callback(_close_lives, opened)
    return opened


def _opened(driver: Worker, stack: AsyncExitStack) -> OpenedCluster:
    roster = Roster()
    stack.callback(roster.broadcast.end)
    return OpenedCluster(worker=driver, roster=roster, loop=asyncio.get_running_loop())


async def _forget_unless_it_stays(plan: ClusterPlan, opened: OpenedCluster) -> None:
    if not opened.stays:
        await in_thread(kept.remove, plan.name)


async def _close_lives(opened: OpenedCluster) -> None:
    assert opened.lives is not None
    await opened.lives.close(stops=not opened.stays)


async def end_workers(
    opened: OpenedCluster, plan: ClusterPlan, timeout_s: float
) -> None:
    """End the workers of a cluster, those that are kept as well."""
    if opened.attached is None:
        assert opened.lives is not None
        await opened.lives.stop(list(opened.roster.members.values()))
        opened.stays = False
        return
    await opened.attached.end(timeout_s)
    if isinstance(plan.contact, str):
        await in_thread(kept.remove, plan.contact)
