"""The rounds of the same members under the same tag, one after the other.

The calls name the members and their order.  Rounds are numbered from 0 by how often a
member has come to one, whether it passed or failed.  Members form a tree (`tree`); each
member sends only to its *neighbours*: its parent and its children.

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
from collections.abc import Mapping, Sequence
from typing import Final, Protocol

from asyncrpc.core.rounds.machine.messages import (
    Blame,
    Failure,
    Key,
    KnownArrivals,
    Report,
    Result,
    RoundFailed,
    RoundMessage,
    WaitsElsewhere,
    mask_of,
    places_of,
)
from asyncrpc.core.rounds.machine.tree import branch_of, parent_of
from asyncrpc.errors import LocalProtocolError, MalformedError

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

TRANSITIONS: Final[Mapping[SeriesState, Mapping[SeriesEvent, SeriesState]]] = {
    AWAY: {_E.JOIN: GATHERING},
    GATHERING: {
        _E.REPORT: REPORTED,
        _E.PASS: PASSED,  # the root; or the report was asked for again and came late
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
}


class Hub(Protocol):
    """Holds the series of one worker.

    Attributes:
        outbox: series and rank for each message that is due now.
        ended: series whose round has been passed, or has failed.
    """

    outbox: dict[tuple[Series, int], None]
    ended: dict[Series, None]

    def who(self, rank: int) -> str:
        """Return the description of a member in errors."""


class Series:
    """One series of rounds, as one worker sees it.

    Attributes:
        key: the name of the series.
        ranks: the ranks of the members, in the order of their places.
        state: the state of this worker in the series.
        number: the round that this worker has come to last; -1: none.
        passed: the last round that this worker knows to be passed; -1: none.
        latest: the latest round that this worker has heard of; -1: none.
        failure: the failure of round `number`; None if the round has not failed.
        is_marked: whether a member set a mark in the round that was passed last.
        elsewhere: members that are missing in round `latest`, and wait in another
            series.
        parent: the rank of the parent; None at the root.
        neighbours: the ranks of the neighbours.
        counts_other: whether the round that failed together with this one has yet to be
            counted.
    """

    def __init__(
        self,
        key: Key,
        rank: int,
        size: int,
        hub: Hub,
    ) -> None:
        self.key, replicas = key, key.replicas
        self.ranks: Sequence[int] = range(size) if replicas is None else replicas
        self.state = AWAY
        self.number = self.passed = self.latest = -1
        self.counts_other = False
        self.failure: Failure | None = None
        self.is_marked = False
        self.elsewhere: list[WaitsElsewhere] = []
        place, count = self.ranks.index(rank), len(self.ranks)
        above = parent_of(place, count)
        self.parent = None if above is None else self.ranks[above]
        _, below = branch_of(place, count)
        self._below = {self.ranks[one.start]: one for one in below}
        upwards = () if self.parent is None else (self.parent,)
        self.neighbours: tuple[int, ...] = (*upwards, *self._below)
        self._hub = hub
        self._me = 1 << place
        self._whole = (1 << count) - 1
        self._own_mark = False
        # The result of the round passed last, and the children that still lack it.
        self._result = Result(-1, is_marked=False)
        self._owed: dict[int, None] = {}
        self._failures: dict[int, Failure] = {}
        self._untold: dict[int, dict[int, None]] = {}  # failures, by neighbour
        # Of round `latest`:
        self._known = 0
        self._reports: dict[int, bool] = {}  # marks, by child
        self._speakers: dict[int, None] = {}  # neighbours that wait there
        self._told: dict[int, int] = {}  # for each neighbour: arrivals that it knows
        self._elsewhere_told: dict[int, int] = {}

    @property
    def is_busy(self) -> bool:
        """Whether this worker waits, or still owes a result to a child."""
        return self.is_waiting or bool(self._owed)

    @property
    def is_waiting(self) -> bool:
        """Whether this worker waits at round `number`."""
        return self.state is GATHERING or self.state is REPORTED

    @property
    def has_passed(self) -> bool:
        """Whether this worker has passed round `number`."""
        return self.state is PASSED

    @property
    def is_missed(self) -> bool:
        """Whether others wait at a round that this worker has not come to."""
        return self.number < self.latest and not self._is_over(self.latest)

    @property
    def missing(self) -> list[int]:
        """The ranks that are not known to have come, in order."""
        places = places_of(self._whole & ~self._known)
        return [self.ranks[place] for place in places]

    @property
    def newest(self) -> int:
        """The latest round that is known here, by whatever is known of it."""
        return max(self.number, self.passed, self.latest)

    def has_joined(self, rank: int) -> bool:
        """Return whether a member is known to have come to round `latest`."""
        return bool(self._known >> self.ranks.index(rank) & 1)

    def is_neighbour(self, rank: int) -> bool:
        """Return whether a rank is a neighbour of this worker."""
        return rank in self.neighbours

    # --- actions of this worker ------------------------------------------------------

    def join(self, *, is_marked: bool = False) -> None:
        """Join the next round; it may be passed, or fail, at once."""
        self._begin(is_marked=is_marked)
        self._look()

    def abort(self, failure: Failure) -> None:
        """Join the next round only to give it up."""
        self._begin(is_marked=False)
        self.fail(failure)

    def fail(self, failure: Failure) -> None:
        """Fail the round that this worker waits at, for all."""
        if self.is_waiting:
            self._end(failure)
            self._record(self.number, failure, None)

    def fail_ahead(self, number: int, failure: Failure) -> None:
        """Fail a round that this worker has not come to, for all."""
        self._give_up_before(number, None)
        if number > self.passed and number not in self._failures:
            self._record(number, failure, None)

    def count(self, number: int) -> None:
        """Count a round that failed with another one as one that was come to."""
        if not self.is_waiting and self.number < number:
            self.number += 1

    def on_lost(self, rank: int, failure: Failure) -> None:
        """Fail the round that needs a lost worker, if there is one."""
        self._stop_owing(rank)
        if self.is_waiting:
            if self.is_neighbour(rank):
                self.fail(failure)
        elif rank in self._speakers:
            self.fail_ahead(self.latest, failure)

    def let_go(self) -> None:
        """Note that the call of the round has returned."""
        if not self.is_waiting:
            self._go(SeriesEvent.LEAVE)

    # --- messages of neighbours ------------------------------------------------------

    def receive(
        self, rank: int, message: KnownArrivals | Report | Result | RoundFailed
    ) -> None:
        """Take the message of a neighbour.

        Raises:
            MalformedError: the message does not fit the sender's place in the tree.
        """
        match message:
            case KnownArrivals():
                self._receive_arrivals(rank, message)
            case Report():
                self._receive_report(rank, message)
            case Result():
                self._receive_result(rank, message)
            case RoundFailed():
                self._receive_failure(rank, message)

    def _receive_arrivals(self, rank: int, message: KnownArrivals) -> None:
        self._learn_passed(message.passed)
        self._give_up_before(max(message.number, message.latest), rank)
        self._turn_to(message.latest)
        if message.latest == self.latest:
            self._learn(rank, message.known)
        if message.is_waiting:
            if message.number == self.latest:
                self._speakers[rank] = None
            self._answer_waiting(
                rank, message.number, lacks=not message.known & self._me
            )
        self._relay()

    def _receive_report(self, rank: int, message: Report) -> None:
        branch = self._below.get(rank)
        if branch is None:
            raise MalformedError(f"a report must come from a child, not rank {rank}")
        self._learn_passed(message.passed)
        self._give_up_before(message.number, rank)
        self._turn_to(message.number)
        if message.number == self.latest and not self._is_over(message.number):
            self._reports[rank] = message.is_marked
            self._speakers[rank] = None
            self._learn(rank, mask_of(branch))
        self._answer_waiting(rank, message.number, lacks=False)
        self._look()
        self._relay()

    def _receive_result(self, rank: int, message: Result) -> None:
        if rank != self.parent:
            raise MalformedError(f"a result must come from the parent, not rank {rank}")
        if self.is_waiting and message.number == self.number:
            if len(self._reports) < len(self._below):
                raise MalformedError(
                    f"the result from rank {rank} came before the report of this branch"
                )
            self._pass(is_marked=message.is_marked)
        else:
            self._learn_passed(message.number)

    def _receive_failure(self, rank: int, message: RoundFailed) -> None:
        self._learn_passed(message.passed)
        if self._is_over(message.number):
            return
        if self.is_waiting and message.number == self.number:
            self._end(message.failure)
        self._give_up_before(message.number, rank)
        self._record(message.number, message.failure, rank)

    def note_elsewhere(self, found: WaitsElsewhere, source: int | None) -> None:
        """Record that a missing member waits in another series, and pass it on."""
        if (
            found.number == self.latest
            and len(self.elsewhere) < ELSEWHERE_MAX
            and found not in self.elsewhere
        ):
            self.elsewhere.append(found)
            for rank in self.neighbours if self.is_waiting else self._speakers:
                if rank != source:
                    self._must_tell(rank)

    # --- messages to neighbours ------------------------------------------------------

    @property
    def is_overdue(self) -> bool:
        """Whether a neighbour lacks arrivals that this worker knows."""
        return bool(self.overdue())

    def overdue(self) -> list[int]:
        """Return the ranks that must be told after a silence."""
        return [one for one in self.neighbours if self.is_waiting and self._lacks(one)]

    def messages_for(self, rank: int) -> list[RoundMessage]:
        """Return the messages for a neighbour now, and record them as sent."""
        failures = self._failures
        messages: list[RoundMessage] = [
            RoundFailed(number, self.passed, failures[number])
            for number in self._untold.pop(rank, ())
            if number in failures
        ]
        if rank in self._owed:  # before any message with the new `passed`
            messages.insert(0, self._result)
            self._stop_owing(rank)
        if self._must_report(rank):
            self._go(SeriesEvent.REPORT)
            messages.append(Report(self.number, self.passed, self._branch_mark()))
        elif self.is_waiting or not messages or self._lacks(rank):
            about = self.latest, self._known
            messages.append(
                KnownArrivals(self.number, self.passed, self.is_waiting, *about)
            )
        messages += self.elsewhere[self._elsewhere_told.get(rank, 0) :]
        self._elsewhere_told[rank] = len(self.elsewhere)
        self._told[rank] = self._told.get(rank, 0) | self._known
        return messages

    # --- helpers ---------------------------------------------------------------------

    def _begin(self, *, is_marked: bool) -> None:
        self.number += 1
        self.failure, self._own_mark = None, is_marked
        self.counts_other = False
        self._go(SeriesEvent.JOIN)
        failure = self._failures.get(self.number)
        if self.passed >= self.number:
            self._catch_up()
        elif failure is not None:
            self._end(failure)
        elif self.latest > self.number:
            self.fail(self._given_up(self.latest, None))
        else:
            self._enter()

    def _enter(self) -> None:
        self._turn_to(self.number)
        self._known |= self._me

    def _catch_up(self) -> None:
        """Go on at the round of the others, which have passed this one already."""
        self.number = max(
            self.passed + 1, self.latest, *(n + 1 for n in self._failures)
        )
        self._go(SeriesEvent.CATCH_UP)
        self._enter()
        self._look()

    def _turn_to(self, number: int) -> None:
        """Record that a member has come to a later round than was known."""
        if number > self.latest:
            self.latest = number
            self._known = 0
            self._reports.clear()
            self._speakers.clear()
            self._told.clear()
            self.elsewhere.clear()
            self._elsewhere_told.clear()

    def _learn_passed(self, passed: int) -> None:
        self.passed = max(self.passed, passed)
        if self.is_waiting and self.passed >= self.number:
            self._catch_up()

    def _give_up_before(self, later: int, rank: int | None) -> None:
        if self.is_waiting and later > self.number:
            self.fail(self._given_up(later, rank))

    def _given_up(self, later: int, rank: int | None) -> Failure:
        who = "" if rank is None else f" (reported by {self._hub.who(rank)})"
        return Failure(
            Blame.GAVE_UP,
            f"other members gave up {self.key.label(self.number)}{who}: they are at "
            f"number {later}",
        )

    def _learn(self, rank: int, known: int) -> None:
        self._known |= known & self._whole
        self._told[rank] = self._told.get(rank, 0) | known

    def _answer_waiting(self, rank: int, number: int, *, lacks: bool) -> None:
        """Decide whether a neighbour that waits at a round must be told something."""
        if number in self._failures:
            self._untold.setdefault(rank, {})[number] = None
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
            for rank in self._speakers:
                if self._lacks(rank):
                    self._must_tell(rank)

    def _lacks(self, rank: int) -> bool:
        """Return whether a neighbour has not been told of all arrivals."""
        is_open = not self._is_over(self.latest)
        return is_open and bool(self._known & ~self._told.get(rank, 0))

    def _record(self, number: int, failure: Failure, source: int | None) -> None:
        self._failures[number] = failure
        if len(self._failures) > FAILURES_KEPT:
            oldest = min(self._failures)
            del self._failures[oldest]
            for untold in self._untold.values():
                untold.pop(oldest, None)
        self._turn_to(number)
        for rank in self.neighbours:
            if rank != source:
                self._untold.setdefault(rank, {})[number] = None
                self._must_tell(rank)

    def _end(self, failure: Failure) -> None:
        self._go(SeriesEvent.FAIL)
        self.failure = failure
        self.counts_other = failure.failed_with is not None
        if self.latest == self.number:
            self._reports.clear()
        self._hub.ended[self] = None

    def _look(self) -> None:
        if not self.is_waiting or len(self._reports) < len(self._below):
            return
        if self.parent is None:
            self._pass(is_marked=self._branch_mark())
        elif self.state is GATHERING:
            self._must_tell(self.parent)

    def _must_report(self, rank: int) -> bool:
        is_whole = len(self._reports) == len(self._below)
        return self.state is GATHERING and is_whole and rank == self.parent

    def _branch_mark(self) -> bool:
        return self._own_mark or any(self._reports.values())

    def _pass(self, *, is_marked: bool) -> None:
        self._go(SeriesEvent.PASS)
        self.passed, self.is_marked = self.number, is_marked
        self._reports.clear()
        self._result, self._owed = Result(self.number, is_marked), {}
        for rank in self._below:
            self._owed[rank] = None
            self._must_tell(rank)
        self._hub.ended[self] = None

    def _stop_owing(self, rank: int) -> None:
        self._owed.pop(rank, None)

    def _go(self, event: SeriesEvent) -> None:
        after = TRANSITIONS[self.state].get(event)
        if after is None:
            raise LocalProtocolError(
                f"{event.name} cannot happen in a series in the state {self.state.name}"
            )
        self.state = after

    def _must_tell(self, rank: int) -> None:
        self._hub.outbox[self, rank] = None
