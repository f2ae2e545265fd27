"""Looks at all workers of a group at one time, those that do not answer included."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, Generic, NamedTuple, TypeVar

from asyncrpc.errors import (
    AsyncRpcError,
    AuthenticationError,
    ConnectError,
    TransportError,
)
from asyncrpc.inspection.door import Look, look_beside, names_of
from asyncrpc.inspection.histories import CollectiveHistory
from asyncrpc.inspection.machine.graph import AwaitGraph, graph_of
from asyncrpc.inspection.messages import LookBeside, TakeSnapshot, TellCollectives
from asyncrpc.inspection.observer import Observed, Observer
from asyncrpc.inspection.records import NoAnswer, Trouble, WorkerSnapshot
from asyncrpc.runtime.host import HOST_ID
from asyncrpc.runtime.members import Member
from asyncrpc.runtime.membership.machine.membership import Record
from asyncrpc.runtime.membership.messages import AskMembers

T = TypeVar("T")

AT_ONCE: Final = 16  # workers that are looked at together
ANSWER_S: Final = 2.0


class GroupAnswers(NamedTuple, Generic[T]):
    """What the workers of a group have answered.

    Attributes:
        members: that are known, by name.
        answers: by name.
        silent: about the others, by name.
    """

    members: dict[str, Member]
    answers: dict[str, T]
    silent: dict[str, NoAnswer]


class GroupView(NamedTuple):
    """A group at one moment.

    Attributes:
        members: that are known, by name.
        snapshots: of those that could be looked at, by name.
        silent: about the others, by name.
        ranks: of all that are or were members, by name; -1: it has none.
        collectives: of those that could be looked at, by name; empty if they were not
            asked for.
    """

    members: dict[str, Member]
    snapshots: dict[str, WorkerSnapshot]
    silent: dict[str, NoAnswer]
    ranks: dict[str, int]
    collectives: dict[str, CollectiveHistory]

    @property
    def graph(self) -> AwaitGraph:
        """Who waits for whom in it."""
        return graph_of(list(self.snapshots.values()), self.silent)


async def view_of(
    observer: Observer,
    address: str,
    *,
    names: Sequence[str] = (),
    is_thorough: bool = True,
    with_collectives: bool = False,
) -> GroupView:
    """Look at the group of the worker at an address.

    Args:
        observer: who looks.
        address: of any member.
        names: of the workers to look at; empty: all.
        is_thorough: whether each is to find out what nobody can end.
        with_collectives: whether each is to tell its collectives.

    Raises:
        ConnectError: no worker answers there, even at its door.
        AuthenticationError: the secrets differ.

    Cancellation:
        All connections that were made for it are closed.
    """
    question = TakeSnapshot(is_thorough)

    def ask(observed: Observed, _: Member) -> Awaitable[WorkerSnapshot]:
        return observed.ask(question, timeout_s=ANSWER_S)

    look = _GroupLook(observer, ask, with_collectives=with_collectives)
    try:
        await look.enter(address)
        await look.all(names)
    finally:
        look.close()
    snapshots = {**look.through_doors, **look.answers}
    return GroupView(look.members, snapshots, look.silent, look.ranks, look.collectives)


async def ask_all(
    observer: Observer,
    address: str,
    ask: Callable[[Observed, Member], Awaitable[T]],
    *,
    names: Sequence[str] = (),
) -> GroupAnswers[T]:
    """Ask each worker of a group something that only its event loop can answer.

    Args:
        observer: who asks.
        address: of any member.
        ask: asks one worker.
        names: of the workers to ask; empty: all.

    Raises:
        ConnectError: no worker answers there, even at its door.
        AuthenticationError: the secrets differ.

    Cancellation:
        All connections that were made for it are closed.
    """
    look = _GroupLook(observer, ask)
    try:
        await look.enter(address)
        await look.all(names)
    finally:
        look.close()
    for name, snapshot in look.through_doors.items():
        words = f"for {snapshot.blocked_for_s:.1f} s"
        look.silent[name] = NoAnswer(Trouble.BLOCKED, words)
    return GroupAnswers(look.members, look.answers, look.silent)


class _GroupLook(Generic[T]):
    """One look at a group.

    Attributes:
        members, answers, silent: as of `GroupAnswers`.
        through_doors: snapshots of those whose loops do not answer, by name.
        ranks, collectives: as of `GroupView`.
    """

    def __init__(
        self,
        observer: Observer,
        ask: Callable[[Observed, Member], Awaitable[T]],
        *,
        with_collectives: bool = False,
    ) -> None:
        self._ask = ask
        self._with_collectives = with_collectives
        self.members: dict[str, Member] = {}
        self.answers: dict[str, T] = {}
        self.through_doors: dict[str, WorkerSnapshot] = {}
        self.silent: dict[str, NoAnswer] = {}
        self.ranks: dict[str, int] = {}
        self.collectives: dict[str, CollectiveHistory] = {}
        self._observer = observer
        self._observed: dict[str, Observed] = {}
        self._room = asyncio.Semaphore(AT_ONCE)

    async def enter(self, address: str) -> None:
        """Ask the first worker who there is."""
        try:
            observed = await self._observer.connect(address)
            records = await observed.ask(AskMembers(), timeout_s=ANSWER_S)
        except AuthenticationError:
            raise
        except (TransportError, TimeoutError) as error:
            found = await asyncio.to_thread(look_beside, names_of(0, [address])[1:])
            if isinstance(found, NoAnswer):
                raise ConnectError(
                    f"no worker answers at {address}: {str(error) or 'in time'}; "
                    f"{found.trouble.value} ({found.words})"
                ) from error
            self._take_look(found)
            records = found.members
        else:
            self._observed[observed.hello.name] = observed
        self._know(records)

    def _know(self, records: Sequence[Record]) -> None:
        self.members.update(
            {one.member.name: one.member for one in records if one.is_alive}
        )
        self.ranks.update({one.name: one.member.rank for one in records})

    async def all(self, names: Sequence[str]) -> None:
        """Look at each member."""
        wanted = [
            one for one in self.members.values() if not names or one.name in names
        ]
        async with asyncio.TaskGroup() as group:
            for member in wanted:
                if member.name not in self.through_doors:
                    group.create_task(self._one(member))
        async with asyncio.TaskGroup() as group:
            for member in wanted:
                if member.name in self.silent:
                    group.create_task(self._another_way(member))

    async def _one(self, member: Member) -> None:
        async with self._room:
            try:
                observed = self._observed.get(member.name)
                if observed is None:
                    observed = await self._observer.connect(member)
                    self._observed[member.name] = observed
                self.answers[member.name] = await self._ask(observed, member)
                if self._with_collectives:
                    told = await observed.ask(TellCollectives(), timeout_s=ANSWER_S)
                    self.collectives[member.name] = told
            except TimeoutError:
                self.silent[member.name] = NoAnswer(Trouble.SILENT, "")
            except AsyncRpcError as error:
                self.silent[member.name] = NoAnswer(Trouble.SILENT, str(error))

    async def _another_way(self, member: Member) -> None:
        """Look at a worker through its door: from here, or from a member beside it."""
        if member.host_id == HOST_ID:
            names = names_of(member.incarnation, member.addresses)
            self._settle(member, await asyncio.to_thread(look_beside, names))
            return
        for name in self.answers:
            if self.members[name].host_id != member.host_id:
                continue
            try:
                found = await self._observed[name].ask(
                    LookBeside(member.incarnation, list(member.addresses)),
                    timeout_s=2 * ANSWER_S,
                )
            except (AsyncRpcError, TimeoutError):
                continue
            if found.snapshot is not None:
                self._settle(member, Look(found.snapshot, [], found.collectives))
            elif found.no_answer is not None:
                self._settle(member, found.no_answer)
            return

    def _settle(self, member: Member, found: Look | NoAnswer) -> None:
        if isinstance(found, NoAnswer):
            self.silent[member.name] = found
        else:
            self._take_look(found)
            self.silent.pop(member.name, None)

    def _take_look(self, found: Look) -> None:
        self._take(found.snapshot)
        if self._with_collectives and found.collectives is not None:
            self.collectives[found.snapshot.name] = found.collectives

    def _take(self, snapshot: WorkerSnapshot) -> None:
        self.through_doors[snapshot.name] = snapshot

    def close(self) -> None:
        """End the connections."""
        for one in self._observed.values():
            one.close()
