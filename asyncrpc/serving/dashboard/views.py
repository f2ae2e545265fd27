"""The views of the dashboard: what each asks the group for, and how it is shown."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple, Protocol

from asyncrpc.inspection.messages import TellSummary
from asyncrpc.inspection.standing import GroupPoll, GroupQuestions, Round
from asyncrpc.inspection.summaries import LinkSummary, WorkerSummary
from asyncrpc.runtime.members import Member
from asyncrpc.runtime.tasks import Tasks
from asyncrpc.serving.dashboard.look import Seen, SharedLook
from asyncrpc.serving.dashboard.machine import overview
from asyncrpc.serving.dashboard.machine.answers import listing_of
from asyncrpc.serving.dashboard.machine.history import GroupHistory
from asyncrpc.serving.dashboard.machine.paging import Row, Slices, page_of
from asyncrpc.serving.dashboard.machine.query import ViewQuery


class DashboardView(Protocol):
    """One view.

    Attributes:
        name: in paths.
        keys: by which its rows can be sorted; empty: it has none.
        sort: by which they are, unless something else is asked for.
        is_up: whether the least is first then.
    """

    @property
    def name(self) -> str:
        """Return its name."""

    @property
    def keys(self) -> Collection[str]:
        """Return by which keys its rows can be sorted."""

    @property
    def sort(self) -> str:
        """Return by which they are."""

    @property
    def is_up(self) -> bool:
        """Return whether the least is first then."""

    def look_for(self, query: ViewQuery) -> SharedLook[Any, Any]:
        """Return the look that a query needs.

        Raises:
            UsageError: the query lacks something.
        """

    def show(self, seen: Seen[Any], query: ViewQuery) -> Slices[dict[str, Any]]:
        """Return what a query asks for of a look, in slices."""


class ViewContext(NamedTuple):
    """What views are made with.

    Attributes:
        questions: carries questions to the group.
        tasks: owns what goes on.
        every_s: seconds between two looks.
        after_s: seconds after which a wait counts as too long.
    """

    questions: GroupQuestions
    tasks: Tasks
    every_s: float
    after_s: float


class OverviewDigest(NamedTuple):
    """What all who see the overview share.

    Attributes:
        rows: of all workers.
        links: of those that have answered, by name.
        totals: of all.
    """

    rows: list[Row]
    links: dict[str, Sequence[LinkSummary]]
    totals: dict[str, Any]


_Told = tuple[Row, Sequence[LinkSummary]]


class OverviewView:
    """The workers, their links and their rates; a `DashboardView`."""

    name = "overview"
    keys = overview.KEYS
    sort = "rank"
    is_up = True

    def __init__(self, context: ViewContext) -> None:
        """Prepare to look."""
        self._history = GroupHistory()
        poll: GroupPoll[WorkerSummary, _Told] = GroupPoll(
            context.questions, context.tasks, lambda _: TellSummary(), self._take
        )
        self._look: SharedLook[_Told, OverviewDigest] = SharedLook(
            context.tasks, poll.look, self._digest, every_s=context.every_s
        )

    def look_for(self, query: ViewQuery) -> SharedLook[Any, Any]:
        """See `DashboardView`."""
        return self._look

    @staticmethod
    def _take(member: Member, told: WorkerSummary) -> _Told:
        return overview.row_of(member.name, member.rank, told), told.links

    def _digest(self, at_s: float, found: Round[_Told]) -> Slices[OverviewDigest]:
        rows = [row for row, _ in found.told.values()]
        rows += [
            overview.silent_row(name, found.members[name].rank, silent)
            for name, silent in found.silent.items()
        ]
        yield len(rows)
        totals = yield from overview.totals_of(rows)
        self._history.add(overview.moment_of(at_s, totals))
        links = {name: links for name, (_, links) in found.told.items()}
        return OverviewDigest(rows, links, totals)

    def show(
        self, seen: Seen[OverviewDigest], query: ViewQuery
    ) -> Slices[dict[str, Any]]:
        """See `DashboardView`."""
        digest = seen.digest
        assert digest is not None
        page = yield from page_of(digest.rows, query)
        shown = [row["worker"] for row in page.rows]
        return {
            "totals": digest.totals,
            **listing_of(page, query),
            "links": overview.matrix_of(shown, digest.links, seen.workers),
            "history": self._history.columns(),
        }


def views_of(context: ViewContext) -> dict[str, DashboardView]:
    """Return all views, by name."""
    made: list[DashboardView] = [OverviewView(context)]
    return {one.name: one for one in made}
