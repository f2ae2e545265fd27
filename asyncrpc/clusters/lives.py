"""The lives of the workers that a program starts: processes, from order to end.

Each worker has a machine that decides when it starts, ends and starts again; this
module carries its decisions out on the hosts of the cluster.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from asyncrpc import Options
from asyncrpc.api import Worker
from asyncrpc.clusters import machine as m
from asyncrpc.clusters.hosts import WorkerHost
from asyncrpc.clusters.presence import Presence
from asyncrpc.clusters.progress import ProgressLine, starting
from asyncrpc.clusters.restarts import RestartBudget, RestartLimits
from asyncrpc.clusters.roster import ClusterWorker, Roster
from asyncrpc.clusters.service import MeetWorkers
from asyncrpc.clusters.threads import in_thread
from asyncrpc.clusters.worker import (
    ProcessOrder,
    WorkerFailed,
    WorkerStarted,
)
from asyncrpc.core.host.run_entry import ENTRY_VARIABLE
from asyncrpc.errors import ClusterError, UsageError, WorkerStartError
from asyncrpc.extend import ask, host_of

KILL_S: Final = 2.0  # after the calls in flight, for `finally` blocks of a worker
_ASK_S: Final = 0.05  # between questions to a worker that does not answer
# What an outer launcher has told the program does not hold for its workers.
NOT_INHERITED: Final = frozenset(
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


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRecipe:
    """What all workers of a cluster have in common.

    Attributes:
        options: of each; without an address to listen at.
        socket_directory: where each listens on a Unix socket alone; None: they listen
            where their options say.
        threads: that torch uses in each; None: an equal share of the host's cores.
        sharers: how many workers share a host.
        keeps: name of the cluster, if its workers may outlive the program.
        is_here: whether all are on this host.
        entry: path of the cluster's entry in the run directory; empty: it has none.
        secret: of the cluster; not shown in any text.
    """

    options: Options
    socket_directory: Path | None
    threads: int | None
    sharers: int
    drain_timeout_s: float
    restart: RestartLimits | None
    keeps: str | None
    is_here: bool
    entry: str
    secret: bytes = field(repr=False)

    def order(self, name: str, number: int, contact: Sequence[str]) -> ProcessOrder:
        """Return the order of a worker; it may block.

        Args:
            number: of the worker in its cluster.
            contact: addresses of the program's worker.
        """
        options = replace(self.options, secret=None)
        has_own_socket = self.socket_directory is not None and self.keeps is not None
        if self.socket_directory is not None and not has_own_socket:
            listen = (f"uds://{self.socket_directory / str(number)}",)
            options = replace(options, network=replace(options.network, listen=listen))
        return ProcessOrder(
            name=name,
            contact=tuple(contact),
            options=options,
            threads=self.threads,
            sharers=self.sharers,
            drain_timeout_s=self.drain_timeout_s,
            path=list(sys.path),
            directory=os.getcwd(),  # noqa: PTH109  (a text, as it travels)
            arguments=list(sys.argv),
            environment={**inherited(), ENTRY_VARIABLE: self.entry},
            secret=self.secret,
            keeps=self.keeps,
            has_own_socket=has_own_socket,
        )


def inherited() -> dict[str, str]:
    """Return the environment that workers have of this process."""
    return {key: value for key, value in os.environ.items() if key not in NOT_INHERITED}


class WorkerLives:
    """Starts, watches and ends the workers of a cluster."""

    def __init__(
        self,
        worker: Worker,
        roster: Roster,
        recipe: WorkerRecipe,
        hosts: Sequence[WorkerHost],
        *,
        prepare: Sequence[Callable[[str, WorkerStarted], Awaitable[object]]],
        progress: ProgressLine,
    ) -> None:
        """Begin without workers.

        Args:
            worker: of the program.
            prepare: awaited in turn before a worker counts as ready.
        """
        self._worker, self._roster, self._recipe = worker, roster, recipe
        self._host = host_of(worker)
        self._hosts = hosts
        self._prepare = prepare
        self._progress = progress
        limits = recipe.restart
        self._shared_budget = None if limits is None else RestartBudget(limits)
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._presence = Presence(worker.members_changed(), self._on_gone)
        self._following = self._loop.create_task(self._presence.follow())
        self.start_timeout_s = 60.0  # set by the cluster before each use

    # --- all workers -----------------------------------------------------------------

    async def start(self, names: Sequence[str]) -> None:
        """Start workers; return once they can be called, or raise and end all."""
        for name in names:
            known = self._roster.members.get(name)
            if known is not None and not known.is_ended:
                raise UsageError(f"names must be new; a worker {name!r} runs already")
        members = []
        for name in names:
            member = self._roster.add(name, self._budget(), self._host_for_next())
            members.append(member)
            self._advance(member, m.StartAsked())
        try:
            await self._until_all_run(members)
            await self._introduce(members)
        except BaseException:
            ending = self._loop.create_task(self.stop(members))
            await asyncio.shield(ending)
            raise

    def _budget(self) -> RestartBudget | None:
        limits = self._recipe.restart
        if limits is None or limits.together:
            return self._shared_budget
        return RestartBudget(limits)

    def _host_for_next(self) -> WorkerHost:
        """Return the host with the fewest workers, the first of these."""
        living = [x.host for x in self._roster.members.values() if not x.is_ended]
        return min(self._hosts, key=living.count)

    async def stop(self, members: Iterable[ClusterWorker]) -> None:
        """End workers, and wait until they have ended."""
        members = list(members)
        for member in members:
            self._advance(member, m.StopAsked())
        for member in members:
            while not member.is_ended:
                await member.news.wait()

    async def resize(self, count: int) -> None:
        """Start or end workers until so many run; the newest end first."""
        names = self._roster.names
        if count > len(names):
            await self.start(self._roster.next_names(count - len(names)))
        else:
            await self.stop([self._roster.member(name) for name in names[count:]])

    async def restart(self, members: Sequence[ClusterWorker]) -> None:
        """End workers and start them again; return once they can be called."""
        for member in members:
            self._advance(member, m.RestartAsked())
        await self._until_all_run(members)
        await self._introduce(members)

    async def ready(self) -> None:
        """Wait until all workers run that are to, and know one another."""
        members = self._roster.members
        while True:
            changing = next((x for x in members.values() if x.is_changing), None)
            if changing is not None:
                await changing.news.wait()
                continue
            for member in members.values():
                if member.is_ended and member.why:
                    problem = f"worker {member.name!r} does not run: {member.why}"
                    raise ClusterError(problem)
            running = [x for x in members.values() if x.is_running]
            if await self._introduce(running):
                return
            await asyncio.sleep(_ASK_S)  # the end of its process will be heard of

    async def close(self, *, stops: bool) -> None:
        """End; the workers as well, unless they are to stay."""
        try:
            if stops:
                await self.stop(self._roster.members.values())
                if self._tasks:
                    await asyncio.wait(self._tasks)
        finally:  # if the wait is cancelled, the host ends what is left
            for task in (*self._tasks, self._following):
                task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _until_all_run(self, members: Sequence[ClusterWorker]) -> None:
        def describe() -> str:
            absent = [member.name for member in members if not member.is_running]
            return starting(self._worker.name, len(members) - len(absent), absent)

        with self._progress.shown(describe):
            for member in members:
                await self._until_running(member)

    async def _introduce(self, members: Sequence[ClusterWorker]) -> bool:
        """Let all workers learn of new ones: their first call may be to one.

        Return whether all have; one that was lost meanwhile has not.
        """
        names = [member.name for member in members]

        async def meet(name: str) -> None:
            await ask(await self._host.link_to(name), MeetWorkers(names))

        asked = map(meet, self._roster.running)
        outcomes = await asyncio.gather(*asked, return_exceptions=True)
        return not any(isinstance(outcome, Exception) for outcome in outcomes)

    async def _until_running(self, member: ClusterWorker) -> None:
        while not member.is_running:
            if member.is_ended:
                failure = member.failure
                raise WorkerStartError(
                    f"worker {member.name!r} did not start: {member.why}",
                    worker=member.name,
                    remote_traceback="" if failure is None else failure.traceback,
                )
            await member.news.wait()

    # --- one worker ------------------------------------------------------------------

    def _advance(self, member: ClusterWorker, event: m.Event) -> None:
        self._roster.advance(member, event, self._act)
        self._let_calls_wait(member)

    def _let_calls_wait(self, member: ClusterWorker) -> None:
        """Let calls to a worker wait while it starts, or is to start again."""
        name, waited_for = member.name, member.awaited
        if member.is_awaited:
            if waited_for is None:
                member.awaited = self._host.expect(name)
        elif waited_for is not None:
            member.awaited = None
            if waited_for.done():  # the program's own worker ends
                return
            if member.is_running:
                waited_for.set_result(None)
            else:
                problem = (
                    f"worker {name!r} did not start: {member.why or 'it was stopped'}"
                )
                waited_for.set_exception(ClusterError(problem))

    def _act(self, member: ClusterWorker, effect: m.Order) -> None:
        match effect:
            case m.StartLife(life):
                self._run(self._live(member, life))
            case m.StopLife():
                self._run(self._end(member))
            case m.RestartOthers(at_s):
                loss = m.OtherLost(f"it restarts with {member.name!r}", at_s)
                for other in self._roster.members.values():
                    if other is not member:
                        self._advance(other, loss)

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _live(self, member: ClusterWorker, life: int) -> None:
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
            if member.process is not None:
                await member.process.begun()
                member.process.send(signal.SIGKILL)
                await member.process.ended
        self._advance(member, m.LifeEnded(life, why, self._loop.time()))

    async def _watch(self, member: ClusterWorker, life: int) -> str:
        assert member.host is not None
        order = await in_thread(self._order, member.name)
        process = await member.host.start(order)
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
            await self._worker.find(member.name)
            for prepare in self._prepare:
                await prepare(member.name, report)
            self._advance(member, m.LifeReady(life))
        return await process.ended

    def _order(self, name: str) -> ProcessOrder:
        number = list(self._roster.members).index(name)
        addresses = self._worker.addresses
        if not self._recipe.is_here:
            # A path of this host may be there by chance.
            addresses = tuple(
                address for address in addresses if not address.startswith("uds:")
            )
        return self._recipe.order(name, number, addresses)

    async def _end(self, member: ClusterWorker) -> None:
        """End a process in order, and kill it if that takes too long."""
        process = member.process
        if process is None:
            return  # `_watch` sees that it is not to go on
        await process.begun()
        process.send(signal.SIGTERM)
        limit_s = self._recipe.drain_timeout_s + KILL_S
        if not (await asyncio.wait([process.ended], timeout=limit_s))[0]:
            process.send(signal.SIGKILL)

    def _on_gone(self, name: str, incarnation: int, why: str) -> None:
        """Kill a process whose worker is lost: what it does is of no use."""
        member = self._roster.members.get(name)
        if member is None or member.incarnation != incarnation:
            return
        if member.is_running and member.process is not None:
            member.process.send(signal.SIGKILL)
