"""The barriers of one worker, one after the other: who has come, who gave up.

Barriers are numbered by how often each worker has come to one, from 0, whether it
passed or failed.  Every word carries the number of its sender's barrier and of the last
one that it passed, so that numbers keep everyone in step:

- to pass barrier n means that all have come to it; whoever is told may pass it too;
- who is at a later barrier and has not passed n has given n up: so n fails;
- if others are at a later barrier than the one this worker comes to, that one is over,
  and has failed: it could not be passed without this worker.

So a barrier that fails does so for everyone who has not passed it, and the next one is
as good as the first.  Only the latest barrier of others is kept in mind.

A worker that is lost fails the barrier of whoever does not know that it had come.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from asyncrpc.runtime.machine.gathering import Gathering, mask_of


class Blame(enum.Enum):
    """Why a barrier failed."""

    LATE = "some did not come in time"
    LOST = "a worker is gone"


@dataclass(frozen=True, slots=True)
class Failure:
    """How a barrier failed.

    Attributes:
        blame: why.
        problem: in words.
        missing: names of those that had not come, as far as was known.
    """

    blame: Blame
    problem: str
    missing: tuple[str, ...] = ()


class Barriers:
    """What one worker knows of its barriers.

    Attributes:
        number: of the barrier that it has come to last; -1: none.
        passed: of the last one that it knows to be passed; -1: none.
        is_waiting: whether it waits at barrier `number`.
        failure: how that one failed; None if it has not.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.number = -1
        self.passed = -1
        self.is_waiting = False
        self.failure: Failure | None = None
        self._rank = rank
        self._members = range(size)
        self._gathering = self._anew()
        # The latest barrier of others, if it is later than ours, and who came to it.
        self._ahead = -1
        self._known_ahead = 0
        # The latest one that others gave up, if it is later than ours.
        self._failed_ahead: tuple[int, Failure] | None = None

    @property
    def known(self) -> int:
        """Bits of the ranks that have come."""
        return self._gathering.known

    @property
    def missing(self) -> list[int]:
        """The ranks that have not come, as far as is known here."""
        return self._gathering.missing

    @property
    def has_passed(self) -> bool:
        """Whether it has passed the barrier that it has come to last."""
        return self.number >= 0 and self.passed == self.number

    def come(self) -> None:
        """This worker comes to its next barrier; it may be passed, or fail, at once."""
        self.number += 1
        self.failure = None
        self.is_waiting = True
        self._gathering = self._anew()
        failed = self._failed_ahead
        if failed is not None and failed[0] == self.number:
            self.fail(failed[1])
        elif self._ahead > self.number:
            self.fail(_given_up(self.number, self._ahead))
        elif failed is not None and failed[0] > self.number:
            self.fail(_given_up(self.number, failed[0]))
        else:
            if self._ahead == self.number:
                self._gathering.merge(self._known_ahead, 0)
            self._gathering.come(marked=False)
            self._look()

    def hear(self, number: int, passed: int, known: int) -> bool:
        """Take what another worker has told of its barrier.

        Returns:
            Whether it waits at one that is over here, and must be told.
        """
        if number > self.number:
            self._keep(number, known)
        if self.is_waiting:
            if passed >= self.number:
                self._pass()
            elif number > self.number:
                self.fail(_given_up(self.number, number))
            elif number == self.number:
                self._gathering.merge(known, 0)
                self._look()
        is_over = number < self.number or not self.is_waiting
        return passed < number <= self.number and is_over

    def hear_failure(self, number: int, failure: Failure) -> None:
        """Another worker says that a barrier has failed."""
        if number > self.number:
            if self._failed_ahead is None or number > self._failed_ahead[0]:
                self._failed_ahead = number, failure
            failure = _given_up(self.number, number)
        if self.is_waiting and number >= self.number:
            self.fail(failure)

    def on_lost(self, rank: int, failure: Failure) -> None:
        """A worker is gone, of which it may not be known that it has come."""
        if self.is_waiting and rank in self._gathering.missing:
            self.fail(failure)

    def fail(self, failure: Failure) -> None:
        """Fail the barrier that this worker waits at."""
        if self.is_waiting:
            self.is_waiting = False
            self.failure = failure

    def due(self) -> list[int]:
        """Return the ranks to be told now, and take it that they are."""
        return [] if self.failure else self._gathering.due()

    def overdue(self) -> list[int]:
        """Return the ranks to be told after a silence, and take it that they are."""
        return self._gathering.overdue() if self.is_waiting else []

    def awaited(self) -> list[int]:
        """Return the ranks whose loss must be noticed here: they have not come."""
        return self._gathering.awaited() if self.is_waiting else []

    def _keep(self, number: int, known: int) -> None:
        if number > self._ahead:
            self._ahead, self._known_ahead = number, 0
        if number == self._ahead:
            self._known_ahead |= known

    def _look(self) -> None:
        if self._gathering.is_whole:
            self._pass()

    def _pass(self) -> None:
        self.is_waiting = False
        self.passed = self.number
        self._gathering.merge(mask_of(self._members), 0)  # whoever relies on us is due

    def _anew(self) -> Gathering:
        return Gathering(self._rank, self._members)


def _given_up(number: int, later: int) -> Failure:
    return Failure(
        Blame.LATE, f"others have given barrier {number} up: they are at {later}"
    )
