"""Looks at all workers of a group at once, including those that do not answer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Final, Generic, NamedTuple, Protocol, TypeVar

from asyncrpc.core.host.this_host import HOST_ID
from asyncrpc.core.links.evidence import evidence_at
from asyncrpc.core.links.machine.detector import Evidence
from asyncrpc.core.members import UNKNOWN_INCARNATION, Member
from asyncrpc.core.membership.machine.records import (
    Record,
)
from asyncrpc.errors import (
    AsyncRpcError,
    AuthenticationError,
    ConnectError,
    TransportError,
)
from asyncrpc.extend import Request
from asyncrpc.tools.inspection.beside import Look, look_beside
from asyncrpc.tools.inspection.collective_records import CollectiveHistory
from asyncrpc.tools.inspection.local_socket import names_of
from asyncrpc.tools.inspection.machine.graph import AwaitGraph, graph_of
from asyncrpc.tools.inspection.machine.wording import duration
from asyncrpc.tools.inspection.messages import LookBeside, TakeSnapshot, TellCollectives
from asyncrpc.tools.inspection.observer import Observer
from asyncrpc.tools.inspection.questions import ANSWER_S, ObserverQuestions
from asyncrpc.tools.inspection.records import NoAnswer, Trouble, WorkerSnapshot

T = TypeVar("T")

AT_ONCE: Final = 16  # workers that are looked at together
RUNS: Final = "runs"
# What a worker's liveness sidecar tells, where no closer look is possible.
_TOLD_BY_SIDECAR: Final[Mapping[Evidence, tuple[Trouble, str]]] = {
    Evidence.GONE: (Trouble.GONE, "according to its liveness sidecar"),
    Evidence.STOPPED: (
        Trouble.STOPPED,
        "according to its liveness sidecar: SIGCONT resumes it",
    ),
    Evidence.BUSY: (
        Trouble.BLOCKED,
        (
            "or its interpreter is held by code in C, according to its liveness "
            "sidecar; `asyncrpc why` on its host can tell where"
        ),
    ),
    Evidence.TICKING: (
        Trouble.SILENT,
        "though its event loop runs, according to its liveness sidecar",
    ),
    Evidence.UNREACHABLE: (
        Trouble.SILENT,
        "its liveness sidecar does not answer either",
    ),
}


class GroupAnswers(NamedTuple, Generic[T]):
    """What the workers of a group have answered.

    Attributes:
        members: the known members, by name.
        answers: by name.
        silent: why the others gave no answer, by name.
    """

    members: dict[str, Member]
    answers: dict[str, T]
    silent: dict[str, NoAnswer]


class GroupView(NamedTuple):
    """A group at one moment.

    Attributes:
        members: the known members, by name.
        snapshots: of the workers that could be looked at, by name.
        silent: why the others gave no answer, by name.
        ranks: of all present and former members, by name; -1: no rank.
        collectives: of the workers that could be looked at, by name; empty if they
            were not requested.
    """

    members: dict[str, Member]
    snapshots: dict[str, WorkerSnapshot]
    silent: dict[str, NoAnswer]
    ranks: dict[str, int]
    collectives: dict[str, CollectiveHistory]

    @property
    def graph(self) -> AwaitGraph:
        """The graph of which task or thread waits for which."""
        return graph_of(list(self.snapshots.values()), self.silent)

    def state_of(self, name: str) -> str:
        """Return the state of a worker in words: `RUNS`, or its trouble."""
        no_answer, snapshot = self.silent.get(name), self.snapshots.get(name)
        if no_answer is not None:
            return no_answer.text
        if snapshot is not None and snapshot.blocked_for_s:
            return f"its event loop is blocked, {duration(snapshot.blocked_for_s)}"
        return RUNS


class AsksWorkers(Protocol):
    """Carries questions to the workers of a group."""

    async def ask(self, member: Member, request: Request[T], *, timeout_s: float) -> T:
        """Ask one worker."""


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
        names: of the workers to look at; empty: all.
    """
    asks = ObserverQuestions(observer, address)
    look = GroupLook(
        asks,
        secret=observer.secret,
        is_thorough=is_thorough,
        with_collectives=with_collectives,
    )
    try:
        await _enter(look, asks, address)
        await look.at(name for name in look.members if not names or name in names)
    finally:
        asks.close()
    return look.view


async def ask_all(
    observer: Observer,
    address: str,
    ask: Callable[[AsksWorkers, Member], Awaitable[T]],
    *,
    names: Sequence[str] = (),
) -> GroupAnswers[T]:
    """Ask each worker of a group something that only its event loop can answer.

    Args:
        names: of the workers to ask; empty: all.
    """
    asks = ObserverQuestions(observer, address)
    look = GroupLook(asks, secret=observer.secret, is_thorough=False)
    answers: dict[str, T] = {}
    failed: dict[str, str] = {}
    room = asyncio.Semaphore(AT_ONCE)

    async def ask_member(member: Member) -> None:
        async with room:
            try:
                answers[member.name] = await ask(asks, member)
            except TimeoutError:
                failed[member.name] = ""
            except AsyncRpcError as error:
                failed[member.name] = str(error)

    try:
        await _enter(look, asks, address)
        async with asyncio.TaskGroup() as group:
            for name, member in look.members.items():
                if name not in look.snapshots and (not names or name in names):
                    group.create_task(ask_member(member))
        await look.at(failed)  # find out why they do not answer
    finally:
        asks.close()
    silent = {name: NoAnswer(Trouble.SILENT, why) for name, why in failed.items()}
    for name, snapshot in look.snapshots.items():
        if snapshot.blocked_for_s:
            words = f"for {snapshot.blocked_for_s:.1f} s"
            silent[name] = NoAnswer(Trouble.BLOCKED, words)
    return GroupAnswers(look.members, answers, {**silent, **look.silent})


async def _enter(look: GroupLook, asks: ObserverQuestions, address: str) -> None:
    """Learn the members from the worker at the address."""
    try:
        records = await asks.first_records()
    except AuthenticationError:
        raise
    except (TransportError, TimeoutError) as error:
        outcome = await asyncio.to_thread(look_beside, names_of(0, [address])[1:])
        if isinstance(outcome, NoAnswer):
            raise ConnectError(
                f"no worker answers at {address} ({str(error) or 'no answer in time'}"
                f"); {outcome.trouble.value} ({outcome.words})"
            ) from error
        look.take_look(outcome)
        records = outcome.members
    look.know(records)
    look.know_beside(await asks.beside(look.members))


class GroupLook:
    """One look at a group.

    Attributes:
        members, snapshots, silent, ranks, collectives: as of `GroupView`.
    """

    def __init__(
        self,
        asks: AsksWorkers,
        *,
        secret: bytes | None,
        is_thorough: bool,
        with_collectives: bool = False,
    ) -> None:
        self._asks = asks
        self._secret = secret
        self._question = TakeSnapshot(is_thorough)
        self._with_collectives = with_collectives
        self._room = asyncio.Semaphore(AT_ONCE)
        self._answered: dict[str, None] = {}  # a set, but ordered
        self.members: dict[str, Member] = {}
        self.snapshots: dict[str, WorkerSnapshot] = {}
        self.silent: dict[str, NoAnswer] = {}
        self.ranks: dict[str, int] = {}
        self.collectives: dict[str, CollectiveHistory] = {}

    @property
    def view(self) -> GroupView:
        """The group as seen so far."""
        return GroupView(
            self.members, self.snapshots, self.silent, self.ranks, self.collectives
        )

    def know(self, records: Iterable[Record]) -> None:
        """Add members."""
        records = list(records)
        self.members.update(
            {record.member.name: record.member for record in records if record.is_alive}
        )
        self.ranks.update({record.name: record.member.rank for record in records})

    def know_beside(self, members: Iterable[Member]) -> None:
        """Add workers that are looked at as well but are not members."""
        for member in members:
            self.members[member.name] = member
            self.ranks[member.name] = member.rank

    def take(self, snapshot: WorkerSnapshot) -> None:
        """Take the snapshot of a worker."""
        self.snapshots[snapshot.name] = snapshot
        self._answered[snapshot.name] = None

    def take_look(self, look: Look) -> None:
        """Take what a worker has told through its local socket."""
        self.take(look.snapshot)
        if self._with_collectives and look.collectives is not None:
            self.collectives[look.snapshot.name] = look.collectives

    async def at(self, names: Iterable[str]) -> None:
        """Look at members by name; skip those that have been looked at."""
        wanted = [
            self.members[name]
            for name in names
            if name not in self.snapshots and name not in self.silent
        ]
        async with asyncio.TaskGroup() as group:
            for member in wanted:
                group.create_task(self._ask_member(member))
        async with asyncio.TaskGroup() as group:
            for member in wanted:
                if member.name in self.silent:
                    group.create_task(self._another_way(member))

    async def find_out(
        self, silent: Mapping[str, NoAnswer], answered: Iterable[str]
    ) -> None:
        """Look another way at members that did not answer an earlier question."""
        self.silent.update(silent)
        self._answered.update(dict.fromkeys(answered))
        async with asyncio.TaskGroup() as group:
            for name in silent:
                group.create_task(self._another_way(self.members[name]))

    async def _ask_member(self, member: Member) -> None:
        async with self._room:
            try:
                ask = self._asks.ask
                self.take(await ask(member, self._question, timeout_s=ANSWER_S))
                if self._with_collectives:
                    collectives = await ask(
                        member, TellCollectives(), timeout_s=ANSWER_S
                    )
                    self.collectives[member.name] = collectives
            except TimeoutError:
                self.silent[member.name] = NoAnswer(Trouble.SILENT, "")
            except AsyncRpcError as error:
                self.silent[member.name] = NoAnswer(Trouble.SILENT, str(error))

    async def _another_way(self, member: Member) -> None:
        """Look at a worker through its local socket, from here or from its host.

        If no other member of its host has answered, ask its liveness sidecar.
        """
        if member.host_id == HOST_ID:
            names = names_of(member.incarnation, member.addresses)
            self._settle(member, await asyncio.to_thread(look_beside, names))
            return
        for beside in self._beside(member):
            try:
                answer = await self._asks.ask(
                    beside,
                    LookBeside(member.incarnation, list(member.addresses)),
                    timeout_s=2 * ANSWER_S,
                )
            except (AsyncRpcError, TimeoutError):
                continue
            if answer.snapshot is not None:
                self._settle(member, Look(answer.snapshot, [], answer.collectives))
            elif answer.no_answer is not None:
                self._settle(member, answer.no_answer)
            return
        if member.incarnation != UNKNOWN_INCARNATION:
            await self._ask_sidecar(member)

    def _beside(self, member: Member) -> list[Member]:
        """Return the members on a member's host that have answered."""
        return [
            other
            for other in map(self.members.get, self._answered)
            if other is not None and other.host_id == member.host_id != ""
        ]

    async def _ask_sidecar(self, member: Member) -> None:
        evidence = await evidence_at(
            member.addresses,
            member.incarnation,
            secret=self._secret,
            timeout_s=ANSWER_S,
        )
        reason = _TOLD_BY_SIDECAR.get(evidence)
        if reason is not None:
            self._settle(member, NoAnswer(*reason))

    def _settle(self, member: Member, outcome: Look | NoAnswer) -> None:
        if isinstance(outcome, NoAnswer):
            self.silent[member.name] = outcome
        else:
            self.take_look(outcome)
            self.silent.pop(member.name, None)
