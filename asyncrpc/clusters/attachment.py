"""The workers of a group that a program has joined: what it sees is what there is.

Nothing is started here.  Each member that is no program's own worker has a machine, as
workers that a program starts have; the changes of the membership are its events.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable

from asyncrpc import ChangeKind, MemberChange
from asyncrpc.api import Worker
from asyncrpc.clusters import machine as m
from asyncrpc.clusters.roster import ClusterWorker, Roster
from asyncrpc.clusters.service import EndWorker, is_program
from asyncrpc.errors import AsyncRpcError, ClusterError
from asyncrpc.extend import ask, host_of


class AttachedWorkers:
    """Follows the membership of the program's worker."""

    def __init__(self, worker: Worker, roster: Roster) -> None:
        self._worker, self._roster = worker, roster
        self._loop = asyncio.get_running_loop()
        self._arriving: dict[str, asyncio.Task[None]] = {}
        self._changes = worker.members_changed()
        self._following = self._loop.create_task(self._follow())

    async def open(self, names: Iterable[str]) -> None:
        """Take in the workers that are there.

        Args:
            names: of some that should be; news of them may not have come yet.
        """
        for name in names:
            with contextlib.suppress(AsyncRpcError):
                await self._worker.find(name)
        self._resync()
        if self._arriving:
            await asyncio.wait(self._arriving.values())

    async def close(self) -> None:
        """Follow no more; the workers stay."""
        tasks = [self._following, *self._arriving.values()]
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)

    async def _follow(self) -> None:
        async for change in self._changes:
            self._note(change)

    def _note(self, change: MemberChange) -> None:
        name = change.member.name
        match change.kind:
            case ChangeKind.JOINED | ChangeKind.BACK:
                self._arrive(name)
            case ChangeKind.LEFT:
                self._leave(name, "")
            case ChangeKind.LOST:
                self._leave(name, "it was lost")
            case ChangeKind.RESTARTED:
                self._leave(name, "another process has its name now")
                self._arrive(name)
            case ChangeKind.RESYNC:
                self._resync()

    def _resync(self) -> None:
        present = {info.name for info in self._worker.known_members}
        for name in present:
            self._arrive(name)
        for name in {*self._roster.names, *self._arriving} - present:
            self._leave(name, "it is not there any more")

    def _arrive(self, name: str) -> None:
        member = self._roster.members.get(name)
        is_known = name == self._worker.name or name in self._arriving
        if is_known or (member is not None and member.is_running):
            return
        task = self._loop.create_task(self._take_in(name))
        self._arriving[name] = task
        task.add_done_callback(lambda _: self._forget(name, task))

    def _forget(self, name: str, task: asyncio.Task[None]) -> None:
        if self._arriving.get(name) is task:
            del self._arriving[name]

    async def _take_in(self, name: str) -> None:
        if await is_program(host_of(self._worker), name):
            return
        member = self._roster.members.get(name) or self._roster.add(name, None, None)
        self._advance(member, m.StartAsked())
        self._advance(member, m.LifeReady(member.machine.life))

    def _leave(self, name: str, why: str) -> None:
        """Note that a worker is gone; without a reason, it has left in order."""
        arriving = self._arriving.pop(name, None)
        if arriving is not None:
            arriving.cancel()
        member = self._roster.members.get(name)
        if member is None or member.is_ended:
            return
        if not why:
            self._advance(member, m.StopAsked())
        life = member.machine.life
        self._advance(member, m.LifeEnded(life, why, self._loop.time()))

    def _advance(self, member: ClusterWorker, event: m.Event) -> None:
        self._roster.advance(member, event, lambda _, __: None)

    async def end(self, timeout_s: float) -> None:
        """End the workers in order; ClusterError: some did not, or are not ours."""
        members = [self._roster.members[name] for name in self._roster.names]
        problems = dict[str, str]()
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.gather(*(self._end(x, problems) for x in members))
        except TimeoutError:
            for member in members:
                if not member.is_ended:
                    problems.setdefault(member.name, f"not within {timeout_s:g} s")
        if problems:
            raise ClusterError(f"these workers have not ended: {_list(problems)}")

    async def _end(self, member: ClusterWorker, problems: dict[str, str]) -> None:
        try:
            link = await host_of(self._worker).link_to(member.name)
            await ask(link, EndWorker())
        except AsyncRpcError as error:
            if not member.is_ended:
                problems[member.name] = str(error)
            return
        while not member.is_ended:
            await member.news.wait()


def _list(problems: dict[str, str]) -> str:
    lines: Iterable[str] = (f"{name!r}: {why}" for name, why in problems.items())
    return "; ".join(lines)
