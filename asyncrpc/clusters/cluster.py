"""`Cluster`: a program that starts its workers, calls them, and ends them.

    async with asyncrpc.Cluster(4) as cluster:
        print(await cluster["w0"].call(os.getpid))

The program's own worker, the *driver*, admits the others; it has no rank.  Each worker
has a machine that decides when it starts, ends and starts again; this module carries
its decisions out.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import secrets
import signal
import sys
from collections.abc import Coroutine, Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, Final, Self, TypeVar

from asyncrpc import LocalRendezvous, Options, Peer
from asyncrpc.api import Worker
from asyncrpc.clusters import machine as m
from asyncrpc.clusters.actors.actors import Actors
from asyncrpc.clusters.actors.spawning import spawn_in
from asyncrpc.clusters.changes import Broadcast, ClusterChange, ClusterChanges
from asyncrpc.clusters.local.processes import (
    LocalProcess,
    LocalProcesses,
    OutputRelay,
)
from asyncrpc.clusters.presence import Presence
from asyncrpc.clusters.restarts import RestartLimits
from asyncrpc.clusters.threads import in_thread
from asyncrpc.clusters.worker import (
    ProcessOrder,
    WorkerFailed,
    is_importing_main,
    main_module,
)
from asyncrpc.core.arguments import (
    check_count,
    check_duration,
    check_kind,
    check_sequence,
    check_text,
    wrong,
)
from asyncrpc.core.host.socket_directory import SocketDirectory
from asyncrpc.core.loop.loops import check_loop, loop_for
from asyncrpc.core.multiprocessing.environment import threads_each
from asyncrpc.errors import (
    AlreadyStartedError,
    ClusterError,
    NotStartedError,
    UsageError,
    WorkerStartError,
)

T = TypeVar("T")

WORKERS_MAX: Final = 4096
NAME_LENGTH_MAX: Final = 255
KILL_S: Final = 2.0  # after the calls in flight, for `finally` blocks of a worker
_SECRET_BYTES: Final = 32  # as long as the hash of the HMAC that proves it
# What an outer launcher has told the program does not hold for its workers.
_NOT_INHERITED: Final = frozenset(
    {
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "GROUP_RANK",
        "MASTER_ADDR",
        "MASTER_PORT",
        "TORCHELASTIC_USE_AGENT_STORE",
        "ASYNCRPC_SECRET",
        "ASYNCRPC_SECRET_FILE",
    }
)


@dataclass(slots=True, eq=False)
class _ClusterWorker:
    """One worker of the cluster.

    Attributes:
        news: wakes all that wait for its machine; it is never set for long.
        failure: why it did not start, if that is so.
    """

    name: str
    machine: m.WorkerMachine
    process: LocalProcess | None = None
    incarnation: int = 0
    failure: WorkerFailed | None = None
    why: str = ""
    news: asyncio.Event = field(default_factory=asyncio.Event)
    timer: asyncio.TimerHandle | None = None


class Cluster:
    """Workers that this program starts, each a process of this host.

    An asynchronous context manager.  `cluster["w0"]` is a `Peer`; inside the block the
    program is a worker itself, so `asyncrpc.remote("w0", ...)` works as well.  No
    process outlives the block, nor the program, however it ends.

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

        Raises:
            UsageError: an argument is out of range or has the wrong type.
        """
        check_count("workers", workers, at_most=WORKERS_MAX)
        check_text("name", name, at_most=NAME_LENGTH_MAX)
        if names is not None:
            _check_names(names, workers, name)
        check_kind("options", options, (Options, type(None)), "an Options or None")
        kinds = (RestartLimits, type(None))
        check_kind("restart", restart, kinds, "a RestartLimits or None")
        check_duration("start_timeout_s", start_timeout_s)
        check_duration("drain_timeout_s", drain_timeout_s)
        self.name = name
        self._first_names = None if names is None else tuple(names)
        self._count = workers
        self._options = options or Options()
        self._restart = restart
        self._threads = threads_each(max(1, workers), threads, "threads")
        self.start_timeout_s = start_timeout_s
        self._drain_timeout_s = drain_timeout_s
        self._members: dict[str, _ClusterWorker] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._stack = AsyncExitStack()
        self._driver: Worker | None = None

    # --- life ------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        """Start the workers; return once all can be called.

        Raises:
            WorkerStartError: a worker did not start; the error has its traceback.
            AlreadyStartedError: the cluster has been entered before.
            UsageError: no event loop runs here, or the workers' main module starts the
                cluster again since it is not guarded.

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
        if sys.platform != "linux":
            raise UsageError(
                "a Cluster needs Linux, whose kernel ends its workers with the program;"
                " elsewhere start workers by `asyncrpc run`"
            )
        if is_importing_main():
            raise UsageError(
                "a Cluster was entered while one of its workers imports this main"
                " module, so every worker would start others; put the call under"
                " `if __name__ == '__main__':`"
            )
        self._directory = SocketDirectory()
        self._stack.callback(self._directory.remove)
        self._secret = self._options.secret_bytes or (
            secrets.token_hex(_SECRET_BYTES).encode()
        )
        driver = Worker(
            self.name,
            rendezvous=LocalRendezvous(1),
            options=replace(self._at("driver"), secret=self._secret),
        )
        self._driver = await self._stack.enter_async_context(driver)
        self._broadcast = Broadcast(self._loop)
        self._stack.callback(self._broadcast.end)
        self._presence = Presence(driver.members_changed(), self._on_gone)
        following = self._loop.create_task(self._presence.follow())
        self._stack.callback(following.cancel)
        relay = OutputRelay()
        self._stack.push_async_callback(in_thread, relay.close)
        self._processes = await in_thread(LocalProcesses, relay)
        self._processes.open()
        self._stack.push_async_callback(self._processes.close)
        self._stack.push_async_callback(self._stop_all)
        await self.start(self._count, names=self._first_names)

    def _at(self, place: str) -> Options:
        """Return the options of a worker, which listens in the cluster's directory."""
        network = self._options.network
        if network.listen or network.advertise or network.interface:
            return self._options
        listen = (f"uds://{self._directory.path / place}",)
        return replace(self._options, network=replace(network, listen=listen))

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End the workers, and the program's own."""
        await self._stack.__aexit__(kind, error, traceback)

    async def _stop_all(self) -> None:
        await self._stop(self._members.values())
        if self._tasks:
            await asyncio.wait(self._tasks)

    # --- its workers -----------------------------------------------------------------

    @property
    def worker(self) -> Worker:
        """The program's own worker.

        Raises:
            NotStartedError: the cluster has not been entered.
        """
        if self._driver is None:
            raise NotStartedError(f"the cluster {self.name!r} must be entered first")
        return self._driver

    @property
    def names(self) -> list[str]:
        """The names of the workers that run, or are to run again."""
        ended = m.ClusterWorkerState.ENDED
        return [
            name
            for name, member in self._members.items()
            if member.machine.state is not ended
        ]

    @property
    def peers(self) -> list[Peer]:
        """The workers that can be called now, in the order of their start."""
        running = m.ClusterWorkerState.RUNNING
        return [
            self.worker.peer(name)
            for name, member in self._members.items()
            if member.machine.state is running
        ]

    def __getitem__(self, name: str) -> Peer:
        """Return a worker, by name.

        Raises:
            ClusterError: the worker does not run.
            UsageError: the cluster has no worker of this name.
            NotStartedError: the cluster has not been entered.
        """
        worker, member = self.worker, self._member(name)
        if member.machine.state is m.ClusterWorkerState.ENDED:
            raise ClusterError(
                f"worker {name!r} does not run{member.why and f': {member.why}'}; "
                f"`await cluster.restart({name!r})` starts it"
            )
        return worker.peer(name)

    def __len__(self) -> int:
        return len(self.names)

    def state(self, name: str) -> m.ClusterWorkerState:
        """Return what a worker does: `"starting"`, `"running"` and so on.

        Raises:
            UsageError: the cluster has no worker of this name.
        """
        return self._member(name).machine.state

    def changes(self) -> ClusterChanges:
        """Return an iterator over the changes of the workers from now on.

        Raises:
            NotStartedError: the cluster has not been entered.

        Example:
            >>> async for change in cluster.changes():
            ...     print(change.kind, change.worker, change.why)
        """
        _ = self.worker
        return self._broadcast.changes()

    def _member(self, name: str) -> _ClusterWorker:
        member = self._members.get(name) if isinstance(name, str) else None
        if member is None:
            known = ", ".join(map(repr, self._members)) or "none"
            raise wrong("name", f"that of a worker of the cluster ({known})", name)
        return member

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
            NotStartedError: the cluster has not been entered, or has ended.
            UsageError: an argument is out of range, or a name is taken; or another
                event loop runs here.

        Cancellation:
            The new workers are ended.
        """
        self._check_loop("Cluster.start")
        check_count("count", count, at_most=WORKERS_MAX)
        if names is None:
            names = _next_names(count, self.names)
        _check_names(names, count, self.name)
        for name in names:
            known = self._members.get(name)
            if known is not None and known.machine.state is not (
                m.ClusterWorkerState.ENDED
            ):
                raise UsageError(f"names must be new; a worker {name!r} runs already")
        members = []
        for name in names:
            member = _ClusterWorker(name, m.WorkerMachine(self._restart))
            self._members[name] = member
            members.append(member)
            self._advance(member, m.StartAsked())
        await self._until_ready(members)
        return [self.worker.peer(member.name) for member in members]

    async def _until_ready(self, members: Sequence[_ClusterWorker]) -> None:
        try:
            for member in members:
                await self._until_running(member)
        except BaseException:
            ending = self._loop.create_task(self._stop(members))
            await asyncio.shield(ending)
            raise

    async def _until_running(self, member: _ClusterWorker) -> None:
        state = m.ClusterWorkerState
        while member.machine.state is not state.RUNNING:
            if member.machine.state is state.ENDED:
                failure = member.failure
                raise WorkerStartError(
                    f"worker {member.name!r} did not start: {member.why}",
                    worker=member.name,
                    remote_traceback="" if failure is None else failure.traceback,
                )
            await member.news.wait()

    async def stop(self, *names: str) -> None:
        """End workers, in order: calls in flight have `drain_timeout_s`.

        A worker that does not end within two seconds more is killed.  A worker that
        does not run is left as it is.

        Raises:
            NotStartedError: the cluster has not been entered, or has ended.
            UsageError: the cluster has no worker of this name, or another event loop
                runs here.

        Cancellation:
            They end all the same.
        """
        self._check_loop("Cluster.stop")
        await self._stop([self._member(name) for name in names])

    async def _stop(self, members: Iterable[_ClusterWorker]) -> None:
        members = list(members)
        for member in members:
            self._advance(member, m.StopAsked())
        for member in members:
            while member.machine.state is not m.ClusterWorkerState.ENDED:
                await member.news.wait()

    async def restart(self, *names: str) -> None:
        """End workers and start them again; return once they can be called.

        Restarts that the program asks for are not counted in `RestartLimits`.

        Raises:
            WorkerStartError: a worker did not start again.
            NotStartedError: the cluster has not been entered, or has ended.
            UsageError: the cluster has no worker of this name, or another event loop
                runs here.

        Cancellation:
            They start all the same.
        """
        self._check_loop("Cluster.restart")
        members = [self._member(name) for name in names]
        for member in members:
            self._advance(member, m.RestartAsked())
        for member in members:
            await self._until_running(member)

    async def resize(self, count: int) -> None:
        """Start or end workers until `count` of them run; the newest end first.

        Raises:
            WorkerStartError: a worker did not start.
            NotStartedError: the cluster has not been entered, or has ended.
            UsageError: `count` is out of range, or another event loop runs here.

        Cancellation:
            New workers are ended; others that were to end, end.
        """
        self._check_loop("Cluster.resize")
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
            UsageError: an argument is wrong, or the cluster does not run on this loop.

        Cancellation:
            No object is left.
        """
        self._check_loop("Cluster.spawn")
        return await spawn_in(self, cls, args, kwargs, on, per_worker, remake)

    def _check_loop(self, used: str) -> None:
        if self.worker.is_closed:
            raise NotStartedError(f"the cluster {self.name!r} has ended")
        check_loop(used, self._loop, f"the cluster {self.name!r}")

    # --- one worker ------------------------------------------------------------------

    def _advance(self, member: _ClusterWorker, event: m.Event) -> None:
        effects = member.machine.advance(event)
        for effect in effects:
            match effect:
                case m.StartLife(life):
                    self._run(self._live(member, life))
                case m.StopLife():
                    self._run(self._end(member))
                case m.TellChange(kind, life, why):
                    member.why = why
                    self._broadcast.tell(ClusterChange(kind, member.name, life, why))
        if member.timer is not None:
            member.timer.cancel()
            member.timer = None
        due_s = member.machine.wakes_at_s
        if due_s is not None:
            passed = m.TimeCame(due_s)
            member.timer = self._loop.call_at(due_s, self._advance, member, passed)
        member.news.set()  # wakes all that wait now
        member.news.clear()

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _live(self, member: _ClusterWorker, life: int) -> None:
        """Start a process and watch it to its end."""
        member.failure, member.process = None, None
        try:
            async with asyncio.timeout(self.start_timeout_s):
                await self._presence.until_gone(member.name)
            if member.machine.state is m.ClusterWorkerState.STARTING:
                why = await self._watch(member, life)
            else:
                why = "it was stopped before it began"
        except TimeoutError:
            why = f"its former life was still there after {self.start_timeout_s:g} s"
        except Exception as error:  # noqa: BLE001  (the program hears of it)
            why = str(error) or type(error).__name__
        self._advance(member, m.LifeEnded(life, why, self._loop.time()))

    async def _watch(self, member: _ClusterWorker, life: int) -> str:
        order = await in_thread(self._order, member.name)
        process = await self._processes.start(order)
        member.process = process
        if member.machine.state is m.ClusterWorkerState.STOPPING:
            self._run(self._end(member))
        waits: set[asyncio.Future[Any]] = {process.started, process.ended}
        done, _ = await asyncio.wait(
            waits, timeout=self.start_timeout_s, return_when=asyncio.FIRST_COMPLETED
        )
        if not done:
            await process.begun()
            process.send(signal.SIGKILL)
            await process.ended
            return f"it was not ready within {self.start_timeout_s:g} s"
        if process.started.done():
            report = process.started.result()
            if isinstance(report, WorkerFailed):
                member.failure = report
                await process.ended
                return report.summary
            member.incarnation = report.incarnation
            await self.worker.find(member.name)
            self._advance(member, m.LifeReady(life))
        return _end_text(await process.ended)

    def _order(self, name: str) -> ProcessOrder:
        number = list(self._members).index(name)
        environment = {
            key: value for key, value in os.environ.items() if key not in _NOT_INHERITED
        }
        return ProcessOrder(
            name=name,
            contact=self.worker.addresses,
            options=replace(self._at(f"{number}"), secret=None),
            threads=self._threads,
            drain_timeout_s=self._drain_timeout_s,
            main=main_module(),
            path=list(sys.path),
            directory=os.getcwd(),  # noqa: PTH109  (a text, as it travels)
            arguments=list(sys.argv),
            environment=environment,
            secret=self._secret,
        )

    async def _end(self, member: _ClusterWorker) -> None:
        """End a process in order, and kill it if that takes too long."""
        process = member.process
        if process is None:
            return  # `_watch` sees that it is not to go on
        await process.begun()
        process.send(signal.SIGTERM)
        limit_s = self._drain_timeout_s + KILL_S
        if not (await asyncio.wait([process.ended], timeout=limit_s))[0]:
            process.send(signal.SIGKILL)

    def _on_gone(self, name: str, incarnation: int, why: str) -> None:
        """Kill a process whose worker is lost: what it does is of no use."""
        member = self._members.get(name)
        if member is None or member.incarnation != incarnation:
            return
        is_running = member.machine.state is m.ClusterWorkerState.RUNNING
        if is_running and member.process is not None:
            member.process.send(signal.SIGKILL)


def _next_names(count: int, taken: Sequence[str]) -> list[str]:
    names = (
        name for number in itertools.count() if (name := f"w{number}") not in taken
    )
    return list(itertools.islice(names, count))


def _check_names(names: Sequence[str], count: int, own: str) -> None:
    check_sequence("names", names, "a sequence of names, or None")
    for name in names:
        check_text("each of names", name, at_most=NAME_LENGTH_MAX)
    if len(names) != count or len({*names, own}) <= count:
        raise wrong("names", f"{count} different names, none of them {own!r}", names)


def _end_text(code: int) -> str:
    if code < 0:
        return f"its process was killed by {signal.Signals(-code).name}"
    return f"its process exited with code {code}"
