"""The views of the dashboard: what each asks the group for, and how it is shown."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from typing import Any, Final, NamedTuple, Protocol, TypeVar

from asyncrpc.core.loop.clock import NS_PER_S
from asyncrpc.core.loop.tasks import Tasks
from asyncrpc.core.members import Member
from asyncrpc.extend import Request
from asyncrpc.serving.dashboard.look import Seen, SharedLook
from asyncrpc.serving.dashboard.machine import (
    calls,
    collectives,
    hangs,
    overview,
    references,
    training,
)
from asyncrpc.serving.dashboard.machine.answers import listing_of
from asyncrpc.serving.dashboard.machine.overview import GroupHistory
from asyncrpc.serving.dashboard.machine.paging import Row, page_of
from asyncrpc.serving.dashboard.machine.query import ViewQuery
from asyncrpc.tools.inspection.collective_records import CollectiveHistory
from asyncrpc.tools.inspection.details import CallsSeen
from asyncrpc.tools.inspection.machine.slices import Slices
from asyncrpc.tools.inspection.messages import (
    ListCalls,
    ListReferences,
    TakeSnapshot,
    TellLastCollectives,
    TellSummary,
    TellTraining,
)
from asyncrpc.tools.inspection.polling import (
    NOT_YET,
    GroupPoll,
    GroupQuestions,
    Question,
    Round,
    asking,
)
from asyncrpc.tools.inspection.questions import ANSWER_S
from asyncrpc.tools.inspection.records import WorkerSnapshot
from asyncrpc.tools.inspection.reference_records import ReferencesSeen
from asyncrpc.tools.inspection.summaries import LinkSummary, WorkerSummary

T = TypeVar("T")

# Rows requested from all workers together; each is asked for its share.
ROWS_MAX: Final = 20_000
SNAPSHOTS_AT_ONCE: Final = 2  # reading one takes a millisecond or more
SHARE_MIN: Final = 10
SHARE_MAX: Final = 500


class DashboardView(Protocol):
    """One view."""

    @property
    def name(self) -> str:
        """Return its name, in paths."""

    @property
    def keys(self) -> Collection[str]:
        """Return the keys by which its rows can be sorted."""

    @property
    def sort(self) -> str:
        """Return the key by which they are sorted by default."""

    @property
    def is_up(self) -> bool:
        """Return whether the least row is first by default."""

    async def look_for(self, query: ViewQuery) -> SharedLook[Any, Any]:
        """Return the look that a query needs."""

    def show(self, seen: Seen[Any], query: ViewQuery) -> Slices[dict[str, Any]]:
        """Return the part of a look that a query asks for, in slices."""


class ViewContext(NamedTuple):
    """What all views share.

    Attributes:
        every_s: seconds between two looks.
        after_s: seconds after which a wait counts as too long.
    """

    questions: GroupQuestions
    tasks: Tasks
    every_s: float
    after_s: float


def same(_: Member, answer: T) -> T:
    """Return an answer unchanged."""
    return answer


def sharing(request: type[Request[T]], share_max: int = SHARE_MAX) -> Question[T]:
    """Return a question that asks each member for its share of the rows."""

    def ask(questions: GroupQuestions, member: Member, size: int) -> Any:
        share = max(SHARE_MIN, min(share_max, ROWS_MAX // max(1, size)))
        return questions.ask(member, request(share), timeout_s=ANSWER_S)  # type: ignore[call-arg]

    return ask


# --- overview ------------------------------------------------------------------------


class OverviewDigest(NamedTuple):
    """The result of a look that all viewers of the overview share.

    Attributes:
        rows: of all workers.
        links: of the workers that have answered, by name.
        totals: over all workers.
    """

    rows: list[Row]
    links: dict[str, Sequence[LinkSummary]]
    totals: dict[str, Any]


_OverviewAnswer = tuple[Row, Sequence[LinkSummary]]


class OverviewView:
    """The workers, their links and their rates; a `DashboardView`.

    Attributes:
        look: at all of it.
    """

    name = "overview"
    keys = overview.KEYS
    sort = "rank"
    is_up = True

    def __init__(self, context: ViewContext) -> None:
        self._history = GroupHistory()
        poll: GroupPoll[WorkerSummary, _OverviewAnswer] = GroupPoll(
            context.questions, context.tasks, asking(TellSummary()), self._take
        )
        self.look: SharedLook[_OverviewAnswer, OverviewDigest] = SharedLook(
            context.tasks,
            poll.look,
            self._digest,
            every_s=context.every_s,
            parts_of=lambda digest: [*digest.rows, *digest.links.values()],
        )

    async def look_for(self, query: ViewQuery) -> SharedLook[Any, Any]:
        """See `DashboardView`."""
        return self.look

    @staticmethod
    def _take(member: Member, summary: WorkerSummary) -> _OverviewAnswer:
        return overview.row_of(member.name, member.rank, summary), summary.links

    def _digest(
        self, at_s: float, round_: Round[_OverviewAnswer]
    ) -> Slices[OverviewDigest]:
        rows = [row for row, _ in round_.answers.values()]
        rows += [
            overview.silent_row(name, round_.members[name].rank, silent)
            for name, silent in round_.silent.items()
        ]
        yield len(rows)
        totals = yield from overview.totals_of(rows)
        self._history.add(overview.moment_of(at_s, totals))
        links = {name: links for name, (_, links) in round_.answers.items()}
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


# --- lists ---------------------------------------------------------------------------


class ListingDigest(NamedTuple):
    """The result of a look that all viewers of a list share.

    Attributes:
        rows: all of them.
        left_out: how many rows the workers left out.
        more: further content of the view.
    """

    rows: list[Row]
    left_out: int
    more: dict[str, Any]


class _ListingView:
    """A view that is a list of rows."""

    name: str
    keys: Collection[str]
    sort: str
    is_up = False
    owners: tuple[str, ...] = ("worker",)

    def __init__(self, look: SharedLook[Any, ListingDigest]) -> None:
        self._look = look

    async def look_for(self, query: ViewQuery) -> SharedLook[Any, Any]:
        """See `DashboardView`."""
        return self._look

    def show(
        self, seen: Seen[ListingDigest], query: ViewQuery
    ) -> Slices[dict[str, Any]]:
        """See `DashboardView`."""
        digest = seen.digest
        assert digest is not None
        page = yield from page_of(digest.rows, query, self.owners)
        return {**listing_of(page, query, digest.left_out), **digest.more}


class CallsView(_ListingView):
    """The calls under way; a `DashboardView`."""

    name, keys, sort = "calls", calls.KEYS, "age_s"
    owners = ("caller", "callee")

    def __init__(self, context: ViewContext) -> None:
        poll: GroupPoll[CallsSeen, CallsSeen] = GroupPoll(
            context.questions, context.tasks, sharing(ListCalls), same
        )
        super().__init__(_look(context, poll, self._digest))

    @staticmethod
    def _digest(_: float, round_: Round[CallsSeen]) -> Slices[ListingDigest]:
        rows = yield from calls.rows_of(round_.answers)
        return ListingDigest(rows, calls.left_out_of(round_.answers.values()), {})


class ReferencesView(_ListingView):
    """The references; a `DashboardView`."""

    name, keys, sort = "references", references.KEYS, "age_s"
    owners = ("owner", "creator", "holders")

    def __init__(self, context: ViewContext) -> None:
        poll: GroupPoll[ReferencesSeen, ReferencesSeen] = GroupPoll(
            context.questions, context.tasks, sharing(ListReferences), same
        )
        super().__init__(_look(context, poll, self._digest))

    @staticmethod
    def _digest(_: float, round_: Round[ReferencesSeen]) -> Slices[ListingDigest]:
        rows = yield from references.rows_of(round_.answers)
        left_out = references.left_out_of(round_.answers.values())
        return ListingDigest(rows, left_out, {})


class CollectivesView(_ListingView):
    """The collectives; a `DashboardView`."""

    name, keys, sort = "collectives", collectives.KEYS, "age_s"
    is_up = True
    owners = ("workers",)

    def __init__(self, context: ViewContext) -> None:
        poll: GroupPoll[CollectiveHistory, CollectiveHistory] = GroupPoll(
            context.questions, context.tasks, sharing(TellLastCollectives, 100), same
        )
        super().__init__(_look(context, poll, self._digest))

    @staticmethod
    def _digest(at_s: float, round_: Round[CollectiveHistory]) -> Slices[ListingDigest]:
        rows = yield from collectives.rows_of(round_.answers, int(at_s * NS_PER_S))
        return ListingDigest(rows, 0, {})


class TrainingView(_ListingView):
    """The training; a `DashboardView`."""

    name, keys, sort = "training", training.KEYS, "worker"
    is_up = True

    def __init__(self, context: ViewContext) -> None:
        now_s = context.tasks.loop.time
        poll = GroupPoll(
            context.questions,
            context.tasks,
            sharing(TellTraining, training.PASSES_MAX),
            lambda member, seen: training.TrainingAnswer(seen, now_s(), member.host_id),
        )
        super().__init__(_look(context, poll, self._digest))

    @staticmethod
    def _digest(
        _: float, round_: Round[training.TrainingAnswer]
    ) -> Slices[ListingDigest]:
        answers = round_.answers
        rows = yield from training.rows_of(answers)
        passes = yield from training.passes_of(answers)
        steps = yield from training.steps_of(answers)
        pipeline = yield from training.pipeline_of(answers)
        return ListingDigest(rows, 0, {**passes, **steps, **pipeline})


def _look(
    context: ViewContext, poll: GroupPoll[Any, Any], digest: Any
) -> SharedLook[Any, ListingDigest]:
    return SharedLook(
        context.tasks,
        poll.look,
        digest,
        every_s=context.every_s,
        parts_of=lambda digest: [*digest.rows],
    )


# --- hangs ---------------------------------------------------------------------------


class HangsView:
    """Why the group is stuck; a `DashboardView`."""

    name = "hangs"
    keys = ()
    sort = ""
    is_up = False

    def __init__(self, context: ViewContext) -> None:
        self._after_s = context.after_s
        self._looks = {
            is_thorough: self._make(context, is_thorough=is_thorough)
            for is_thorough in (False, True)
        }

    def _make(
        self, context: ViewContext, *, is_thorough: bool
    ) -> SharedLook[WorkerSnapshot, dict[str, Any]]:
        poll: GroupPoll[WorkerSnapshot, WorkerSnapshot] = GroupPoll(
            context.questions,
            context.tasks,
            asking(TakeSnapshot(is_thorough)),
            same,
            at_once=SNAPSHOTS_AT_ONCE,
        )
        digest = partial(self._digest, is_thorough=is_thorough)
        return SharedLook(context.tasks, poll.look, digest, every_s=context.every_s)

    async def look_for(self, query: ViewQuery) -> SharedLook[Any, Any]:
        """See `DashboardView`."""
        return self._looks[query.is_thorough]

    def _digest(
        self, _: float, round_: Round[WorkerSnapshot], *, is_thorough: bool
    ) -> Slices[dict[str, Any]]:
        snapshots = [*round_.answers.values(), *round_.blocked.values()]
        silent = {
            name: no_answer
            for name, no_answer in round_.silent.items()
            if name not in round_.blocked and no_answer is not NOT_YET
        }
        findings = yield from hangs.findings_of(
            snapshots, silent, after_s=self._after_s
        )
        return {**findings, "is_thorough": is_thorough}

    def show(
        self, seen: Seen[dict[str, Any]], query: ViewQuery
    ) -> Slices[dict[str, Any]]:
        """See `DashboardView`."""
        assert seen.digest is not None
        yield len(seen.digest["nodes"])
        return seen.digest
