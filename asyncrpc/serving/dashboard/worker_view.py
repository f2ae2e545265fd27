"""The view of one worker, from four questions that only this worker is asked."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Final

from asyncrpc.core.members import Member
from asyncrpc.errors import AsyncRpcError, UsageError
from asyncrpc.serving.dashboard.look import NotFoundError, Seen, SharedLook
from asyncrpc.serving.dashboard.machine import worker as machine
from asyncrpc.serving.dashboard.machine.query import ViewQuery
from asyncrpc.serving.dashboard.machine.worker import EVENTS_MAX, WorkerAnswer
from asyncrpc.serving.dashboard.views import OverviewView, ViewContext
from asyncrpc.tools.inspection.machine.slices import Slices
from asyncrpc.tools.inspection.messages import (
    TakeEvents,
    TakeSnapshot,
    TellDetails,
    TellSummary,
)
from asyncrpc.tools.inspection.polling import Round
from asyncrpc.tools.inspection.questions import ANSWER_S
from asyncrpc.tools.inspection.records import NoAnswer, Trouble

LOOKS_MAX: Final = 32  # workers that are looked at
NAMES_SHOWN_MAX: Final = 20  # in an error


class WorkerView:
    """One worker; a `DashboardView`."""

    name = "worker"
    keys = ()
    sort = ""
    is_up = False

    def __init__(self, context: ViewContext, overview: OverviewView) -> None:
        self._context = context
        self._overview = overview
        self._looks: OrderedDict[str, SharedLook[Any, Any]] = OrderedDict()

    async def look_for(self, query: ViewQuery) -> SharedLook[Any, Any]:
        """See `DashboardView`."""
        if len(query.workers) != 1:
            raise UsageError(
                f"worker must be given once, not {len(query.workers)} times"
            )
        (name,) = query.workers
        await self._member(name)
        if name not in self._looks:
            self._looks[name] = SharedLook(
                self._context.tasks,
                partial(self._ask, name),
                partial(self._digest, name),
                every_s=self._context.every_s,
            )
        self._looks.move_to_end(name)
        while len(self._looks) > LOOKS_MAX:
            self._looks.popitem(last=False)
        return self._looks[name]

    async def _member(self, name: str) -> Member:
        members = {
            member.name: member for member in await self._context.questions.members()
        }
        if name not in members:
            known = sorted(members)
            more = len(known) - NAMES_SHOWN_MAX
            raise NotFoundError(
                f"there is no worker {name!r}; known: "
                f"{', '.join(known[:NAMES_SHOWN_MAX])}"
                + (f" and {more} more" if more > 0 else "")
            )
        return members[name]

    async def _ask(self, name: str) -> Round[WorkerAnswer]:
        member = await self._member(name)
        group = await self._overview.look.newest()
        members = {name: member}
        answers: dict[str, WorkerAnswer] = {}
        silent = dict(group.silent)
        if name in silent:  # it was asked a moment ago, and found silent
            return Round(group.workers, members, answers, silent, {})
        try:
            answers[name] = await self._all_of(member)
        except (AsyncRpcError, TimeoutError) as error:
            silent[name] = NoAnswer(Trouble.SILENT, str(error))
        return Round(group.workers, members, answers, silent, {})

    async def _all_of(self, member: Member) -> WorkerAnswer:
        ask: Callable[..., Awaitable[Any]] = partial(
            self._context.questions.ask, member, timeout_s=ANSWER_S
        )
        return WorkerAnswer(
            await ask(TellSummary()),
            await ask(TellDetails()),
            await ask(TakeSnapshot(False)),  # noqa: FBT003  (a message's field)
            await ask(TakeEvents([], EVENTS_MAX)),
        )

    @staticmethod
    def _digest(
        name: str, _: float, round_: Round[WorkerAnswer]
    ) -> Slices[dict[str, Any]]:
        rank = round_.members[name].rank
        if name in round_.answers:
            return (yield from machine.shown(name, rank, round_.answers[name]))
        silent = round_.silent.get(name, NoAnswer(Trouble.SILENT, ""))
        return machine.shown_silent(name, rank, silent)

    def show(
        self, seen: Seen[dict[str, Any]], query: ViewQuery
    ) -> Slices[dict[str, Any]]:
        """See `DashboardView`."""
        assert seen.digest is not None
        yield 1
        return seen.digest
