"""Makes the application: for a worker, or for an observer of a group.

The view of one worker asks that worker alone, four questions.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Final

from aiohttp import web

from asyncrpc.core.arguments import check_duration, check_kind, wrong
from asyncrpc.core.loop.loops import loop_for
from asyncrpc.core.loop.tasks import Tasks
from asyncrpc.core.members import Member
from asyncrpc.core.worker import Worker
from asyncrpc.errors import AsyncRpcError, NotStartedError, UsageError
from asyncrpc.serving.dashboard.application import DashboardApplication
from asyncrpc.serving.dashboard.look import NotFoundError, Seen, SharedLook
from asyncrpc.serving.dashboard.machine import worker as machine
from asyncrpc.serving.dashboard.machine.query import ViewQuery
from asyncrpc.serving.dashboard.machine.sessions import Gate
from asyncrpc.serving.dashboard.machine.worker import EVENTS_MAX, WorkerAnswer
from asyncrpc.serving.dashboard.views import (
    CallsView,
    CollectivesView,
    DashboardView,
    HangsView,
    OverviewView,
    ReferencesView,
    TrainingView,
    ViewContext,
)
from asyncrpc.serving.tokens import check_token
from asyncrpc.tools.inspection.machine.slices import Slices
from asyncrpc.tools.inspection.messages import (
    TakeEvents,
    TakeSnapshot,
    TellDetails,
    TellSummary,
)
from asyncrpc.tools.inspection.observer import Observer
from asyncrpc.tools.inspection.polling import GroupQuestions, InnerQuestions, Round
from asyncrpc.tools.inspection.questions import ANSWER_S, ObserverQuestions
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


EVERY_S: Final = 2.0
EVERY_MIN_S: Final = 0.1
AFTER_S: Final = 10.0
_END_S: Final = 1.0  # for the tasks that are running at the end


def dashboard(
    worker: Worker,
    *,
    token: str | None = None,
    every_s: float = EVERY_S,
    after_s: float = AFTER_S,
) -> web.Application:
    """Return an application that shows the group of a worker.

    Mount it at any path, `app.add_subapp("/dashboard", serving.dashboard(worker))`; it
    may be behind a proxy that adds or strips a prefix.  It only asks the group, over
    the links of the worker, while a browser is connected.

    Viewers sign in with the group's secret or the token.  Over HTTPS or on localhost,
    the browser sends a token that it makes of what was typed; otherwise it takes only
    the token.  A program sends the token, as `Authorization: Bearer TOKEN`.  If there
    is neither secret nor token, only browsers of this host and of the user of this
    process are let in.

    Args:
        worker: of this process, on the event loop of the application, running or not
            yet.
        token: gives access: at least 16 ASCII characters, as from
            `secrets.token_urlsafe()`; not the secret of the group.
        every_s: seconds between two looks, of at least 0.1.
        after_s: seconds after which a wait counts as too long.

    Returns:
        An application for `add_subapp`, or to run by itself.

    Raises:
        UsageError: an argument has the wrong type, or is out of range.

    Example:
        >>> app.add_subapp("/dashboard", serving.dashboard(worker))
    """
    check_kind("worker", worker, Worker, "a Worker")
    secret = worker.options.secret_bytes
    gate = _gate(token, secret)
    _check_times(every_s, after_s)

    def questions() -> GroupQuestions:
        if worker.is_closed:
            raise NotStartedError(f"worker {worker.name!r} does not run")
        if worker.loop is not loop_for("dashboard"):
            raise UsageError(
                f"worker {worker.name!r} runs on another event loop than the "
                "application: use `asyncrpc dashboard`, or one loop for both"
            )
        return InnerQuestions(worker)

    return _application(gate, questions, every_s, after_s)


def observing_dashboard(
    observer: Observer,
    address: str,
    *,
    token: str | None = None,
    ticket: str | None = None,
    every_s: float = EVERY_S,
    after_s: float = AFTER_S,
) -> web.Application:
    """Return the application of `dashboard` for an observer."""
    gate = _gate(token, observer.secret, ticket)
    _check_times(every_s, after_s)
    return _application(
        gate, lambda: ObserverQuestions(observer, address), every_s, after_s
    )


def _gate(token: str | None, secret: bytes | None, ticket: str | None = None) -> Gate:
    if token is not None:
        check_token(token)
    return Gate(token=token, secret=secret, ticket=ticket)


def _check_times(every_s: float, after_s: float) -> None:
    check_duration("every_s", every_s)
    if every_s < EVERY_MIN_S:
        raise wrong("every_s", f"at least {EVERY_MIN_S} seconds", every_s)
    check_duration("after_s", after_s)


def _application(
    gate: Gate,
    questions: Callable[[], GroupQuestions],
    every_s: float,
    after_s: float,
) -> web.Application:
    views = _OpenedViews(questions, every_s, after_s)
    return DashboardApplication(gate, views.get, views.close, every_s).make()


def views_by_name(context: ViewContext) -> dict[str, DashboardView]:
    """Return all views, by name."""
    overview = OverviewView(context)
    views: tuple[DashboardView, ...] = (
        overview,
        WorkerView(context, overview),
        CallsView(context),
        ReferencesView(context),
        TrainingView(context),
        CollectivesView(context),
        HangsView(context),
    )
    return {view.name: view for view in views}


class _OpenedViews:
    """The views of one application, from the first request on."""

    def __init__(
        self, questions: Callable[[], GroupQuestions], every_s: float, after_s: float
    ) -> None:
        self._make_questions = questions
        self._every_s = every_s
        self._after_s = after_s
        self._context: ViewContext | None = None
        self._views: dict[str, DashboardView] = {}

    async def get(self) -> dict[str, DashboardView]:
        """Return the views."""
        if self._context is None:
            questions, tasks = self._make_questions(), Tasks(loop_for("dashboard"))
            self._context = ViewContext(questions, tasks, self._every_s, self._after_s)
            self._views = views_by_name(self._context)
        return self._views

    async def close(self) -> None:
        """End the tasks of the views."""
        context, self._context = self._context, None
        if context is not None:
            await context.tasks.cancel(_END_S)
            context.questions.close()
