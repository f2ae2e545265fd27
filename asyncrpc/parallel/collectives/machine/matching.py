"""Matches the collectives of one rank with those of the others, and decides failures.

A collective fails on all ranks: the rank that notices tells every other.  A failure of
one collective does not affect the next ones.  A rank that is gone fails all collectives
that need it.  A lost rank fails every collective that has not ended; a rank that has
left fails the collectives that it has not ended.

    noticed here                              blamed
    another rank has begun another            that rank and this one
        collective under the same number
    a message is for a collective that is     its sender and this rank
        over here
    the time limit has passed                 the ranks that have not come
    a rank is lost, or has left               that rank

Failures are in the `outbox` until the service has carried them out: it refuses the
messages, wakes the waiters, and tells the other ranks of new failures.

Sans-IO; `M` is a message, opaque here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from asyncrpc.errors import (
    CollectiveError,
    CollectiveTimeoutError,
    GroupChangedError,
    MalformedError,
    RankLostError,
)
from asyncrpc.parallel.collectives.machine.operations import (
    CollectiveFailure,
    Descriptor,
    Mismatch,
    Operation,
    Operations,
)

M = TypeVar("M")


@dataclass(frozen=True, slots=True)
class Failing(Generic[M]):
    """A collective has failed.

    Attributes:
        messages: the messages that are refused with it.
        is_news: whether the other ranks must be told.
    """

    number: int
    failure: CollectiveFailure
    messages: Sequence[M]
    is_news: bool


class MatchedCollectives(Generic[M]):
    """The collectives of one group at one rank.

    Attributes:
        label: the description of the group, for people.
        members: names of the workers, by rank; empty before the group is made here.
        rank: the rank of this worker; -1 before the group is made here.
        outbox: failures for the service to carry out, in order.
    """

    def __init__(self) -> None:
        self.label = "a group"
        self.members: Sequence[str] = ()
        self.rank = -1
        self.operations: Operations[M] = Operations()
        self.outbox: list[Failing[M]] = []
        # For ranks that are gone: the number before which collectives do not need the
        # rank, and the failure.  The numbers fall from entry to entry.
        self._gone: list[tuple[int, CollectiveFailure]] = []

    def name_of(self, rank: int) -> str:
        """Return the description of a rank in errors."""
        return f"rank {rank} ({self.members[rank]!r})"

    # --- senders ---------------------------------------------------------------------

    def join(self, label: str, members: Sequence[str], rank: int) -> None:
        """Set the members of the group."""
        self.label, self.members, self.rank = label, members, rank

    def check_speaker(self, name: str, rank: int | None = None) -> None:
        """Refuse a worker that is not in the group, or does not have that rank."""
        members = self.members
        if rank is None:
            is_it = name in members
        else:
            is_it = rank < len(members) and members[rank] == name
        if not is_it:
            who = "a member" if rank is None else f"rank {rank}"
            raise MalformedError(f"worker {name!r} is not {who} of {self.label}")

    # --- beginning -------------------------------------------------------------------

    def begin(self, descriptor: Descriptor) -> Operation[M] | CollectiveFailure:
        """Begin the next collective; return its failure if it has failed already."""
        if self._gone:
            lost = self.lost_for(self.operations.begun)
            if lost is not None:
                return lost
        operation, mismatch = self.operations.begin(descriptor)
        if mismatch is not None:
            self.on_mismatch(operation.number, mismatch)
        if operation.failure is not None:
            self.operations.end(operation)
            return operation.failure
        return operation

    def refuse(self, reason: str) -> CollectiveFailure | None:
        """Take the number of the next collective, and fail it for all ranks."""
        number = self.operations.begun
        lost = self.lost_for(number)
        if lost is not None:
            return lost
        who = self.name_of(self.rank)
        problem = f"collective {number} of {self.label} has failed: {who} {reason}"
        names = (self.members[self.rank],)
        self.fail(number, CollectiveFailure(CollectiveError.code, problem, names))
        operation, _ = self.operations.begin(Descriptor("refuse"))
        self.operations.end(operation)
        return None

    # --- messages of other ranks -----------------------------------------------------

    def refusal_of(
        self, number: int, rank: int, descriptor: Descriptor | None
    ) -> CollectiveFailure | None:
        """Return the failure that refuses a message; None: the message is taken.

        Args:
            descriptor: the sender's description; None: the one that it sent before.
        """
        operations = self.operations
        failure = self.lost_for(number) if self._gone else None
        failure = failure or operations.failure_of(number)
        if failure is None and operations.is_over(number):
            return self.too_late(number, rank, descriptor)
        if failure is None and descriptor is not None:
            self.receive(number, rank, descriptor)
            failure = operations.failure_of(number)
        return failure

    def too_late(
        self, number: int, rank: int, descriptor: Descriptor | None = None
    ) -> CollectiveFailure:
        """Return the failure that refuses a message for a collective that is over."""
        theirs, ours = self.name_of(rank), self.name_of(self.rank)
        begun = "" if descriptor is None else f" and began {descriptor}"
        return CollectiveFailure(
            CollectiveError.code,
            f"the ranks do not agree on collective {number} of {self.label}: {ours} "
            f"has finished it and begun {self.operations.begun} collectives, but "
            f"{theirs} still sends for it{begun}; all ranks must begin the same "
            "collectives in the same order",
            (self.members[rank], self.members[self.rank]),
        )

    def receive(self, number: int, rank: int, descriptor: Descriptor) -> None:
        """Take another rank's report of a collective that it has begun."""
        mismatch = self.operations.receive(number, rank, descriptor)
        if mismatch is not None:
            self.on_mismatch(number, mismatch)

    def on_mismatch(self, number: int, mismatch: Mismatch) -> None:
        """Fail a collective because two ranks began different ones under its number."""
        theirs, ours = self.name_of(mismatch.rank), self.name_of(self.rank)
        self.fail(
            number,
            CollectiveFailure(
                CollectiveError.code,
                f"the ranks do not agree on collective {number} of {self.label}: "
                f"{theirs} began {mismatch.theirs}, {ours} began {mismatch.ours}; all "
                "ranks must begin the same collectives in the same order",
                (self.members[mismatch.rank], self.members[self.rank]),
            ),
        )

    def receive_failure(self, number: int, failure: CollectiveFailure) -> None:
        """Take a failure that another rank has sent to all ranks."""
        operations = self.operations
        if not operations.is_over(number) and operations.failure_of(number) is None:
            self.fail(number, failure, is_news=False)

    # --- failing ---------------------------------------------------------------------

    def fail(
        self, number: int, failure: CollectiveFailure, *, is_news: bool = True
    ) -> None:
        """Fail a collective."""
        messages = self.operations.fail(number, failure)
        self.outbox.append(Failing(number, failure, messages, is_news))

    def give_up(
        self, number: int, timeout_s: float, begun: Mapping[int, int | None]
    ) -> None:
        """Fail a collective whose time limit has passed.

        Args:
            begun: how many collectives each other rank has begun; None: the rank did
                not answer.
        """
        operation = self.operations.running.get(number)
        if operation is None:
            return  # it has ended meanwhile
        late = [
            rank for rank, count in begun.items() if count is None or count <= number
        ]
        who = ", ".join(map(self.name_of, late))
        reason = (
            f"these ranks have not begun it: {who}"
            if late
            else "all ranks have begun it, but it is not finished"
        )
        problem = (
            f"{operation.descriptor.operation} {number} of {self.label} has taken more "
            f"than {timeout_s:g} s: {reason}"
        )
        names = tuple(self.members[rank] for rank in late)
        self.fail(
            number, CollectiveFailure(CollectiveTimeoutError.code, problem, names)
        )

    # --- ranks that are gone ---------------------------------------------------------

    @property
    def lost(self) -> CollectiveFailure | None:
        """The failure by the first rank that is gone; None: no rank is gone."""
        return self._gone[0][1] if self._gone else None

    @property
    def failures(self) -> list[CollectiveFailure]:
        """The failures by ranks that are gone, in the order in which they went."""
        return [failure for _, failure in self._gone]

    @property
    def last_lost(self) -> CollectiveFailure | None:
        """The failure by the last recorded rank that is gone; None: no rank is gone."""
        return self._gone[-1][1] if self._gone else None

    def lost_for(self, number: int) -> CollectiveFailure | None:
        """Return the failure of a collective by a rank that is gone, else None."""
        for ended, failure in self._gone:
            if number >= ended:
                return failure
        return None

    def has_lost(self, names: Iterable[str]) -> bool:
        """Return whether a rank of one of these names is known to be gone."""
        gone = {name for failure in self.failures for name in failure.ranks}
        return not gone.isdisjoint(names)

    def lose(self, failure: CollectiveFailure, *, ended: int = 0) -> bool:
        """Fail all present and later collectives that need a rank that is gone."""
        if self._gone and ended >= self._gone[-1][0]:
            return False
        for number in self.operations.numbers():
            if number >= ended and self.lost_for(number) is None:
                self.fail(number, failure, is_news=False)
        self._gone.append((ended, failure))
        return True

    def leave(self, deed: str) -> tuple[int, CollectiveFailure]:
        """Leave the group: fail all collectives that have not ended here."""
        who = self.name_of(self.rank)
        problem = f"{who} {deed} {self.label}"
        names = (self.members[self.rank],)
        failure = CollectiveFailure(GroupChangedError.code, problem, names)
        ended = min(self.operations.running, default=self.operations.begun)
        self.lose(failure)
        return ended, failure

    def loss_of(self, name: str, reason: str) -> CollectiveFailure | None:
        """Return the failure by the loss of a worker; None: it is not a member."""
        if name not in self.members:
            return None
        who = self.name_of(self.members.index(name))
        problem = (
            f"{who} of {self.label} is lost: {reason}; make a new group of the "
            "remaining workers"
        )
        return CollectiveFailure(RankLostError.code, problem, (name,))
