"""Carries the questions of an observer to the workers of a group."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Final, TypeVar

from asyncrpc.core.members import Member
from asyncrpc.core.membership.machine.records import (
    Record,
)
from asyncrpc.core.membership.messages import AskMembers
from asyncrpc.errors import AsyncRpcError, ConnectError
from asyncrpc.extend import Request
from asyncrpc.tools.inspection.observer import Observed, Observer

T = TypeVar("T")

ANSWER_S: Final = 2.0
MEMBERS_S: Final = 10.0  # between two requests for the members
TRIES_MAX: Final = 8  # workers that are asked for the members


class ObserverQuestions:
    """Asks as an observer, over connections of its own that stay open.

    It is an `AsksWorkers`, and a `GroupQuestions`.
    """

    def __init__(self, observer: Observer, address: str) -> None:
        self._observer = observer
        self._address = address
        self._observed: dict[str, Observed] = {}
        self._members: list[Member] = []
        self._asked_s = -MEMBERS_S
        self.secret = observer.secret

    async def members(self) -> list[Member]:
        """See `GroupQuestions`."""
        now_s = asyncio.get_running_loop().time()
        if self._members and now_s - self._asked_s < MEMBERS_S:
            return self._members
        members = await self._ask_members()
        beside = await self.beside({member.name for member in members})
        self._members = [*members, *beside]
        self._asked_s = now_s
        self._forget_others()
        return self._members

    async def _ask_members(self) -> list[Member]:
        problem: Exception | None = None
        for observed in await self._ways():
            try:
                records = await observed.ask(AskMembers(), timeout_s=ANSWER_S)
            except (AsyncRpcError, TimeoutError) as error:
                problem = error
                continue
            return [record.member for record in records if record.is_alive]
        raise ConnectError(
            "no worker listed the members of the group: "
            f"{str(problem) or 'no answer in time'}"
        ) from problem

    async def beside(self, known: Collection[str]) -> list[Member]:
        """See `Observer.beside`."""
        return await self._observer.beside(known)

    async def first_records(self) -> list[Record]:
        """Ask the worker at the address for its group."""
        return await (await self._first()).ask(AskMembers(), timeout_s=ANSWER_S)

    async def _first(self) -> Observed:
        observed = await self._observer.connect(self._address)
        self._observed[observed.hello.name] = observed
        return observed

    async def _ways(self) -> list[Observed]:
        """Return connections to ask for the members: open ones, else a new one."""
        usable = [
            observed
            for observed in self._observed.values()
            if not observed.connection.ended.done()
        ]
        return usable[:TRIES_MAX] or [await self._first()]

    def _forget_others(self) -> None:
        lives = {member.name: member.incarnation for member in self._members}
        for name, observed in list(self._observed.items()):
            if lives.get(name) != observed.hello.incarnation:
                self._observed.pop(name).close()

    async def ask(self, member: Member, request: Request[T], *, timeout_s: float) -> T:
        """See `AsksWorkers`."""
        observed = self._observed.get(member.name)
        if observed is None or observed.connection.ended.done():
            observed = await self._observer.connect(member)
            other = self._observed.get(member.name)
            if other is not None and not other.connection.ended.done():
                observed.close()  # another question has connected meanwhile
                observed = other
            self._observed[member.name] = observed
        return await observed.ask(request, timeout_s=timeout_s)

    def close(self) -> None:
        """End the connections."""
        for observed in self._observed.values():
            observed.close()
        self._observed.clear()
