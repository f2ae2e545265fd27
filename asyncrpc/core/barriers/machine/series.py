"""The rounds of the same members under the same tag, one after the other.

Rounds are numbered from 0 by how often a member has come to one, whether it passed or
failed.  Members have places 0, 1, 2, ... in the order of the call, and form a binary
tree; each member sends only to its *neighbours*: its parent and its children.  So each
has at most three, and with n members the depth is at most floor(log2(n)).

- A member reports to its parent once it has the reports of its children.  When the
  root has all reports, it passes, and sends the result down the tree.  So no member
  passes before all have come.  A member may set a mark; the result says whether one
  did.
- A member that waits in silence sends its neighbours the set of members that it knows
  to have come.  This opens a connection to them, by which it learns which members are
  missing, and notices their death.
- A failure goes to all neighbours, also through members that have not come yet; these
  fail when they come.  A member that the failure did not reach is told when it sends
  something.  A neighbour that is gone fails the round on either side of it.  So every
  member fails that has not passed.
- A member that is at a later round, and has not passed round n, has given n up: round
  n fails.
- If a member learns that the round at which it waits has been passed, it has lost its
  count (it was restarted, or the series was dropped): it goes on at the round of the
  others.

A message holds the knowledge of its sender, and is sent again to every neighbour that
lacks it.  So state of a round that this worker has not come to may be dropped at any
time.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from asyncrpc.core.barriers.messages import (
    Blame,
    Failure,
    Key,
    KnownArrivals,
    Report,
    Result,
    RoundFailed,
    SeriesNotice,
    WaitsElsewhere,
)
from asyncrpc.core.ids import Incarnation
from asyncrpc.core.state_table import StateTable
from asyncrpc.errors import MalformedError

if TYPE_CHECKING:
    from asyncrpc.core.barriers.machine.table import SeriesTable

FAILURES_KEPT: Final = 8  # of a series, for members that come late
ELSEWHERE_MAX: Final = 16  # of a round; one is enough


class SeriesState(enum.Enum):
    """The state of this worker in one series."""

    AWAY = "the worker is at no round"
    GATHERING = "the worker is at a round, and reports of its branch are missing"
    REPORTED = "the worker is at a round, and has reported to its parent"
    PASSED = "the worker knows that all members have come"
    FAILED = "the round has failed"


class SeriesEvent(enum.Enum):
    """An event of this worker in one series."""

    JOIN = "the worker joins the next round"
    REPORT = "the worker reports to its parent"
    ASK = "the parent lacks the report"
    PASS = "all members have come"  # noqa: S105  (no password)
    FAIL = "the round fails"
    CATCH_UP = "the others passed the round before the worker was restarted"
    LEAVE = "the call of the round has returned"


AWAY, GATHERING, REPORTED, PASSED, FAILED = SeriesState
_E = SeriesEvent

TRANSITIONS: Final = StateTable(
    "a series of barriers",
    {
        AWAY: {_E.JOIN: GATHERING},
        GATHERING: {
            _E.REPORT: REPORTED,
            _E.PASS: PASSED,  # the root; or the report came late
            _E.FAIL: FAILED,
            _E.CATCH_UP: GATHERING,
        },
        REPORTED: {
            _E.ASK: GATHERING,
            _E.PASS: PASSED,
            _E.FAIL: FAILED,
            _E.CATCH_UP: GATHERING,
        },
        PASSED: {_E.JOIN: GATHERING, _E.LEAVE: AWAY},
        FAILED: {_E.JOIN: GATHERING, _E.LEAVE: AWAY},
    },
)


def tree_position(place: int, size: int) -> tuple[int | None, tuple[range, ...]]:
    """Return the place of a member's parent, and the branches of its children.

    A branch is a range of places: its head is the first, and the halves of the rest are
    the branches of the head's children.
    """
    parent, branch = None, range(size)
    while True:
        first, end = branch.start + 1, branch.stop
        middle = first + (end - first + 1) // 2
        below = tuple(filter(None, (range(first, middle), range(middle, end))))
        if branch.start == place:
            return parent, below
        parent, branch = branch.start, next(part for part in below if place in part)


@dataclass(slots=True)
class Neighbour:
    """What this worker and a neighbour know of each other in round `latest`."""

    known_arrivals: int = 0  # arrivals that it knows
    elsewhere_told: int = 0  # how many members that wait elsewhere
    is_waiting: bool = False
    mark: bool | None = None  # of its branch; None: it has not reported
    life: Incarnation | None = None  # that takes part in the round


class Series:
    """One series of rounds, as one worker sees it."""

    def __init__(self, key: Key, rank: int, size: int, table: SeriesTable) -> None:
        self.key, replicas = key, key.replicas
        self.ranks: Sequence[int] = range(size) if replicas is None else replicas
        self.state = AWAY
        self.calls = 0  # of this worker, under way or waiting for their turn
        # The round that this worker has come to last, the last one that it knows to be
        # passed, and the latest that it has heard of; -1: none.
        self.number = self.passed = self.latest = -1
        self.failure: Failure | None = None  # of round `number`
        self.is_marked = False  # the round that was passed last
        # Members that are missing in round `latest`, and wait in another series.
        self.elsewhere: list[WaitsElsewhere] = []
        place, count = self.ranks.index(rank), len(self.ranks)
        above, below = tree_position(place, count)
        self.parent = None if above is None else self.ranks[above]
        self._below = {self.ranks[branch.start]: branch for branch in below}
        upwards = () if self.parent is None else (self.parent,)
        self.neighbours = {
            neighbour: Neighbour() for neighbour in (*upwards, *self._below)
        }
        self._table = table
        self._me = 1 << place
        self._whole = (1 << count) - 1
        self._own_mark = False
        # The result of the round passed last, and the children that still lack it.
        self._result = Result(key, -1, is_marked=False)
        self._owed: set[int] = set()
        self._failures: dict[int, Failure] = {}  # by round
        self._untold: dict[tuple[int, int], None] = {}  # neighbour, failed round
        self._known = 0  # the members that have come to round `latest`, one bit each

    @property
    def is_busy(self) -> bool:
        """Whether this worker takes part, or still owes a result to a child."""
        return self.is_waiting or bool(self._owed or self.calls)

    @property
    def is_waiting(self) -> bool:
        """Whether this worker waits at round `number`."""
        return self.state is GATHERING or self.state is REPORTED

    @property
    def has_passed(self) -> bool:
        """Whether this worker has passed round `number`, whose call goes on."""
        return self.state is PASSED

    @property
    def is_missed(self) -> bool:
        """Whether others wait at a round that this worker has not come to."""
        return self.number < self.latest and not self._is_over(self.latest)

    @property
    def missing(self) -> list[int]:
        """The ranks that are not known to have come to round `latest`, in order."""
        places = enumerate(self.ranks)
        return [rank for place, rank in places if not self._known >> place & 1]

    @property
    def newest(self) -> int:
        """The latest round that is known here, by whatever is known of it."""
        return max(self.number, self.passed, self.latest)

    def has_joined(self, rank: int) -> bool:
        """Return whether a member is known to have come to round `latest`."""
        return bool(self._known >> self.ranks.index(rank) & 1)

    # --- actions of this worker ------------------------------------------------------

    def join(self, *, is_marked: bool = False) -> None:
        """Join the next round; it may be passed, or fail, at once."""
        self.number += 1
        self.failure, self._own_mark = None, is_marked
        self._go(SeriesEvent.JOIN)
        failure = self._failures.get(self.number)
        if self.passed >= self.number:
            self._catch_up()
        elif failure is not None:
            self._end(failure)
        elif self.latest > self.number:
            self._give_up_before(self.latest, None)
        else:
            self._enter()

    def fail(self, failure: Failure) -> None:
        """Fail the round that this worker waits at, if any, for all."""
        if self.is_waiting:
            self.fail_round(self.number, failure)

    def fail_next(self, failure: Failure) -> None:
        """Fail the round that this worker waits at, or would come to next, for all."""
        following = max(self.number + 1, self.passed + 1, self.latest)
        self.fail_round(self.number if self.is_waiting else following, failure)

    def fail_round(
        self, number: int, failure: Failure, source: int | None = None
    ) -> None:
        """Fail a round for all, as this worker or the neighbour `source` says."""
        if self._is_over(number):
            return
        self._give_up_before(number, source)
        if self.is_waiting and number == self.number:
            self._end(failure)
        self._failures[number] = failure
        if len(self._failures) > FAILURES_KEPT:
            oldest = min(self._failures)
            del self._failures[oldest]
            for rank in self.neighbours:
                self._untold.pop((rank, oldest), None)
        self._turn_to(number)
        for rank in self.neighbours:
            if rank != source:
                self._untold[rank, number] = None
                self._must_tell(rank)

    def on_lost(self, rank: int, failure: Failure) -> None:
        """Fail the round that needs a lost worker, if there is one."""
        self._owed.discard(rank)
        neighbour = self.neighbours.get(rank)
        if neighbour is not None and self.is_waiting:
            self.fail(failure)
        elif neighbour is not None and neighbour.is_waiting:
            self.fail_round(self.latest, failure)

    def let_go(self) -> None:
        """Note that the call of the round has returned."""
        if self.state is PASSED or self.state is FAILED:
            self._go(SeriesEvent.LEAVE)

    # --- messages of neighbours ------------------------------------------------------

    def receive(self, rank: int, notice: SeriesNotice) -> None:
        """Take the message of a neighbour; refuse what a child or parent cannot say."""
        match notice:
            case KnownArrivals():
                self._on_arrivals(rank, notice)
            case Report():
                self._on_report(rank, notice)
            case Result():
                self._on_result(rank, notice)
            case RoundFailed():
                self._learn_passed(notice.passed)
                self.fail_round(notice.number, notice.failure, rank)
            case WaitsElsewhere():
                self.note_elsewhere(notice, rank)

    def _on_arrivals(self, rank: int, notice: KnownArrivals) -> None:
        self._learn_passed(notice.passed)
        self._give_up_before(max(notice.number, notice.latest), rank)
        self._turn_to(notice.latest)
        if notice.latest == self.latest:
            self._learn(rank, notice.known)
        if notice.is_waiting:
            if notice.number == self.latest:
                self.neighbours[rank].is_waiting = True
            self._answer_waiting(rank, notice.number, lacks=not notice.known & self._me)
        self._relay()

    def _on_report(self, rank: int, notice: Report) -> None:
        branch = self._below.get(rank)
        if branch is None:
            raise MalformedError(f"a report must come from a child, not rank {rank}")
        self._learn_passed(notice.passed)
        self._give_up_before(notice.number, rank)
        self._turn_to(notice.number)
        if notice.number == self.latest and not self._is_over(notice.number):
            child = self.neighbours[rank]
            child.mark, child.is_waiting = notice.is_marked, True
            self._learn(rank, (1 << branch.stop) - (1 << branch.start))
        self._answer_waiting(rank, notice.number, lacks=False)
        self._look()
        self._relay()

    def _on_result(self, rank: int, notice: Result) -> None:
        if rank != self.parent:
            raise MalformedError(f"a result must come from the parent, not rank {rank}")
        if not self.is_waiting or notice.number != self.number:
            self._learn_passed(notice.number)
        elif self._is_branch_here:
            self._pass(is_marked=notice.is_marked)
        else:
            raise MalformedError(
                f"the result from rank {rank} came before the report of this branch"
            )

    def note_elsewhere(self, notice: WaitsElsewhere, source: int | None) -> None:
        """Record that a missing member waits in another series, and pass it on."""
        if (
            notice.number == self.latest
            and len(self.elsewhere) < ELSEWHERE_MAX
            and notice not in self.elsewhere
        ):
            self.elsewhere.append(notice)
            for rank, neighbour in self.neighbours.items():
                if rank != source and (self.is_waiting or neighbour.is_waiting):
                    self._must_tell(rank)

    # --- messages to neighbours ------------------------------------------------------

    def overdue(self) -> list[int]:
        """Return the ranks that must be told of arrivals after a silence."""
        return [
            rank for rank in self.neighbours if self.is_waiting and self._lacks(rank)
        ]

    def notices_for(self, rank: int) -> list[SeriesNotice]:
        """Return the messages for a neighbour now, and record them as sent."""
        notices: list[SeriesNotice] = []
        if rank in self._owed:  # before any message with the new `passed`
            self._owed.remove(rank)
            notices.append(self._result)
        for number in [number for to, number in self._untold if to == rank]:
            del self._untold[rank, number]
            if number in self._failures:
                failed = self.passed, self._failures[number]
                notices.append(RoundFailed(self.key, number, *failed))
        neighbour = self.neighbours[rank]
        if self.state is GATHERING and self._is_branch_here and rank == self.parent:
            self._go(SeriesEvent.REPORT)
            mark = self._branch_mark
            notices.append(Report(self.key, self.number, self.passed, mark))
        elif self.is_waiting or not notices or self._lacks(rank):
            latest = self.is_waiting, self.latest, self._known
            notices.append(KnownArrivals(self.key, self.number, self.passed, *latest))
        notices += self.elsewhere[neighbour.elsewhere_told :]
        neighbour.elsewhere_told = len(self.elsewhere)
        neighbour.known_arrivals |= self._known
        return notices

    # --- helpers ---------------------------------------------------------------------

    def _enter(self) -> None:
        self._turn_to(self.number)
        self._known |= self._me
        self._look()

    def _catch_up(self) -> None:
        """Go on at the round of the others, which have passed this one already."""
        self.number = max(
            self.passed + 1, self.latest, *(n + 1 for n in self._failures)
        )
        self._go(SeriesEvent.CATCH_UP)
        self._enter()

    def _turn_to(self, number: int) -> None:
        """Record that a member has come to a later round than was known."""
        if number > self.latest:
            self.latest = number
            self._known = 0
            self.elsewhere.clear()
            for rank in self.neighbours:
                self.neighbours[rank] = Neighbour()

    def _learn_passed(self, passed: int) -> None:
        self.passed = max(self.passed, passed)
        if self.is_waiting and self.passed >= self.number:
            self._catch_up()

    def _give_up_before(self, later: int, source: int | None) -> None:
        """Fail the round at which this worker waits if others are at a later one."""
        if self.is_waiting and later > self.number:
            says = "" if source is None else f" (reported by {self._table.who(source)})"
            problem = (
                f"other members gave up {self.key.label(self.number)}{says}: they are "
                f"at number {later}"
            )
            self.fail(Failure(Blame.GAVE_UP, problem))

    def _learn(self, rank: int, known: int) -> None:
        self._known |= known & self._whole
        self.neighbours[rank].known_arrivals |= known

    def _answer_waiting(self, rank: int, number: int, *, lacks: bool) -> None:
        """Decide whether a neighbour that waits at a round must be told something."""
        if number in self._failures:
            self._untold[rank, number] = None
            self._must_tell(rank)
        elif number < self.latest or self._is_over(number):
            self._must_tell(rank)
        elif self.state is REPORTED and rank == self.parent and lacks:
            self._go(SeriesEvent.ASK)
            self._must_tell(rank)

    def _is_over(self, number: int) -> bool:
        return number <= self.passed or number in self._failures

    def _relay(self) -> None:
        """Pass on arrivals at once: a worker that does not wait has no silence."""
        if not self.is_waiting:
            for rank, neighbour in self.neighbours.items():
                if neighbour.is_waiting and self._lacks(rank):
                    self._must_tell(rank)

    def _lacks(self, rank: int) -> bool:
        """Return whether a neighbour has not been told of all arrivals."""
        is_open = not self._is_over(self.latest)
        return is_open and bool(self._known & ~self.neighbours[rank].known_arrivals)

    @property
    def _is_branch_here(self) -> bool:
        """Whether all children have reported."""
        return all(self.neighbours[rank].mark is not None for rank in self._below)

    @property
    def _branch_mark(self) -> bool:
        return self._own_mark or any(self.neighbours[rank].mark for rank in self._below)

    def _look(self) -> None:
        """Pass the round, or report, if this worker's branch has come."""
        if self.is_waiting and self._is_branch_here:
            if self.parent is None:
                self._pass(is_marked=self._branch_mark)
            elif self.state is GATHERING:
                self._must_tell(self.parent)

    def _pass(self, *, is_marked: bool) -> None:
        self._go(SeriesEvent.PASS)
        self.passed, self.is_marked = self.number, is_marked
        self._result = Result(self.key, self.number, is_marked)
        self._owed = set(self._below)
        for rank in self._below:
            self._must_tell(rank)

    def _end(self, failure: Failure) -> None:
        self._go(SeriesEvent.FAIL)
        self.failure = failure
        self._table.on_failed(self)

    def _go(self, event: SeriesEvent) -> None:
        self.state = TRANSITIONS.after(self.state, event)

    def _must_tell(self, rank: int) -> None:
        self._table.outbox[self, rank] = None
