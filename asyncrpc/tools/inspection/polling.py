"""Polls a group: over connections that stay open, one round at a time.

A round asks every member one question.  A worker that does not answer delays it by at
most `LATE_S`; the question to it goes on in the background.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from typing import Any, Final, Generic, NamedTuple, Protocol, TypeAlias, TypeVar

from asyncrpc.core.members import Member
from asyncrpc.core.worker import Worker
from asyncrpc.errors import AsyncRpcError
from asyncrpc.extend import Request
from asyncrpc.tools.inspection.group import GroupLook
from asyncrpc.tools.inspection.look_from_worker import LinkQuestions
from asyncrpc.tools.inspection.machine.asking import AskingPlan
from asyncrpc.tools.inspection.machine.wording import blocked
from asyncrpc.tools.inspection.questions import ANSWER_S
from asyncrpc.tools.inspection.records import NoAnswer, Trouble, WorkerSnapshot

T = TypeVar("T")
R = TypeVar("R")

AT_ONCE: Final = 8  # workers asked together: few enough answers for one loop iteration
LATE_S: Final = 0.25  # how long a round waits for a worker
FIRST_S: Final = 5.0  # how long it waits for a worker of which nothing is known yet
# For a worker that has been asked for the first time, and may still answer.
NOT_YET: Final = NoAnswer(Trouble.SILENT, "it has been asked just now")


class GroupQuestions(Protocol):
    """Carries the repeated questions to a group; an `AsksWorkers`.

    Attributes:
        secret: of the group, for the sidecars of workers that do not answer.
    """

    @property
    def secret(self) -> bytes | None:
        """Return the secret of the group, if it has one."""

    async def members(self) -> list[Member]:
        """Return the members of the group."""

    async def ask(self, member: Member, request: Request[T], *, timeout_s: float) -> T:
        """See `AsksWorkers`."""

    def close(self) -> None:
        """Close the connections that were made for the questions."""


class InnerQuestions(LinkQuestions):
    """Asks over the links of a worker; a `GroupQuestions`."""

    def __init__(self, worker: Worker) -> None:
        super().__init__(worker.parts.directory)
        self.secret = worker.options.secret_bytes

    async def members(self) -> list[Member]:
        """See `GroupQuestions`."""
        return self._peers.members

    def close(self) -> None:
        """Do nothing: the links are the worker's."""


class Round(NamedTuple, Generic[R]):
    """The answers of a group.

    Attributes:
        members: the members that were asked, by name.
        answers: what `take` made of the answers, by name.
        silent: why the others gave no answer, by name.
        blocked: snapshots of the silent workers whose loop is blocked, by name.
    """

    workers: int
    members: dict[str, Member]
    answers: dict[str, R]
    silent: dict[str, NoAnswer]
    blocked: dict[str, WorkerSnapshot]


class StartsTasks(Protocol):
    """Owns tasks, and ends them."""

    def start_task(self, coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run a coroutine as a task."""


# Asks one member; the last argument is the size of the group.
Question: TypeAlias = Callable[[GroupQuestions, Member, int], Awaitable[T]]


def asking(request: Request[T]) -> Question[T]:
    """Return a question that sends each member one request."""
    return lambda questions, member, _: questions.ask(
        member, request, timeout_s=ANSWER_S
    )


class GroupPoll(Generic[T, R]):
    """One question that a group is asked again and again."""

    def __init__(
        self,
        questions: GroupQuestions,
        tasks: StartsTasks,
        question: Question[T],
        take: Callable[[Member, T], R],
        *,
        at_once: int = AT_ONCE,
    ) -> None:
        self._questions = questions
        self._tasks = tasks
        self._question = question
        self._take = take
        self._at_once = at_once
        self._plan = AskingPlan()
        self._members: dict[str, Member] = {}
        self._answers: dict[str, R] = {}
        self._silent: dict[str, NoAnswer] = {}
        self._blocked: dict[str, WorkerSnapshot] = {}
        self._asked: dict[str, asyncio.Task[None]] = {}

    async def look(self) -> Round[R]:
        """Ask every member once, except those that did not answer recently."""
        members = await self._questions.members()
        self._know({member.name: member for member in members})
        loop = asyncio.get_running_loop()
        due = iter(self._plan.due(self._members, loop.time()))
        async with asyncio.TaskGroup() as group:
            for _ in range(self._at_once):
                group.create_task(self._lane(due))
        await self._until_known()
        silent = dict(self._silent)
        for name in self._members:
            if name not in self._answers:
                silent.setdefault(name, NOT_YET)
        return Round(
            len(self._members),
            dict(self._members),
            dict(self._answers),
            silent,
            dict(self._blocked),
        )

    def _know(self, members: dict[str, Member]) -> None:
        """Forget workers that are no longer members, or have restarted."""
        for name, known in self._members.items():
            now = members.get(name)
            if now is None or now.incarnation != known.incarnation:
                self._forget(name)
        self._members = members

    def _forget(self, name: str) -> None:
        self._answers.pop(name, None)
        self._silent.pop(name, None)
        self._blocked.pop(name, None)

    async def _lane(self, due: Iterator[str]) -> None:
        for name in due:
            self._plan.on_asked(name)
            asked = self._tasks.start_task(self._ask(self._members[name]))
            self._asked[name] = asked
            await asyncio.wait((asked,), timeout=LATE_S)

    async def _until_known(self) -> None:
        """Wait longer for workers of which nothing is known yet."""
        unknown = [
            asked
            for name, asked in self._asked.items()
            if name not in self._answers and name not in self._silent
        ]
        if unknown:
            await asyncio.wait(unknown, timeout=FIRST_S)

    async def _ask(self, member: Member) -> None:
        name, size = member.name, len(self._members)
        try:
            answer = await self._question(self._questions, member, size)
        except TimeoutError:
            await self._on_silence(member, "")
        except AsyncRpcError as error:
            await self._on_silence(member, str(error))
        else:
            self._plan.on_answer(name)
            if self._is_member(member):
                self._forget(name)
                self._answers[name] = self._take(member, answer)
        finally:
            self._plan.on_end(name)
            self._asked.pop(name, None)

    def _is_member(self, member: Member) -> bool:
        known = self._members.get(member.name)
        return known is not None and known.incarnation == member.incarnation

    async def _on_silence(self, member: Member, words: str) -> None:
        outcome = await self._why(member, NoAnswer(Trouble.SILENT, words))
        self._plan.on_silence(member.name, asyncio.get_running_loop().time())
        if not self._is_member(member):
            return
        self._forget(member.name)
        if isinstance(outcome, NoAnswer):
            self._silent[member.name] = outcome
        else:
            self._silent[member.name] = NoAnswer(Trouble.BLOCKED, blocked(outcome))
            self._blocked[member.name] = outcome

    async def _why(self, member: Member, silent: NoAnswer) -> NoAnswer | WorkerSnapshot:
        """Return why a worker did not answer; its snapshot if its loop is blocked."""
        look = GroupLook(
            self._questions, secret=self._questions.secret, is_thorough=False
        )
        look.members = dict(self._members) | {member.name: member}
        await look.find_out({member.name: silent}, self._answers)
        snapshot = look.snapshots.get(member.name)
        if snapshot is not None and snapshot.blocked_for_s:
            return snapshot
        return look.silent.get(member.name, silent)
