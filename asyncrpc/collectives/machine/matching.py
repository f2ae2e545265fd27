"""Which collective of one rank belongs with which of the others, and why one fails.

A collective fails on all ranks: the rank that notices tells every other.  A failure of
one collective does not affect the next ones.  A rank that is gone fails all that need
it: a lost one all that have not ended, one that has left those that it has not ended.

    noticed here                              blamed
    another rank has begun something else     that rank and this one
    what comes is for a collective that is    likewise
        over here
    it has taken too long                     the ranks that have not come
    a rank is lost, or has left               that rank

Before a group is made here, what others say of it is kept; a worker is believed as long
as it says the same each time of which rank it is, and no other worker says that.

What fails is in the `outbox` until the service has carried it out: refuse the messages,
wake who waits, tell the others if it is news.

Sans-IO; `M` is a message, which is not looked into.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from asyncrpc.collectives.machine.operations import (
    CollectiveFailure,
    Descriptor,
    Mismatch,
    Operation,
    Operations,
)
from asyncrpc.errors import (
    CollectiveError,
    CollectiveTimeoutError,
    GroupChangedError,
    MalformedError,
    RankLostError,
)

M = TypeVar("M")


@dataclass(frozen=True, slots=True)
class Failing(Generic[M]):
    """A collective has failed.

    Attributes:
        number: of the collective; None if these are messages of a stranger.
        failure: why.
        messages: those that are refused with it.
        is_news: whether the other ranks must be told.
    """

    number: int | None
    failure: CollectiveFailure
    messages: Sequence[M]
    is_news: bool


class MatchedCollectives(Generic[M]):
    """The collectives of one group at one rank.

    Attributes:
        label: of the group, for people.
        members: names of the workers, by rank; empty before the group is made here.
        rank: of this worker; -1 before.
        operations: the collectives.
        outbox: what has failed, for the service to carry out, in order.
    """

    def __init__(self) -> None:
        self.label = "a group"
        self.members: Sequence[str] = ()
        self.rank = -1
        self.operations: Operations[M] = Operations()
        self.outbox: list[Failing[M]] = []
        # Why ranks are gone, and before which number collectives do without them: each
        # entry has a lower number than the one before it.
        self._gone: list[tuple[int, CollectiveFailure]] = []
        self._heard: dict[str, int | None] = {}  # who spoke before, as which rank

    def name_of(self, rank: int) -> str:
        """Return how a rank is called in errors."""
        return f"rank {rank} ({self.members[rank]!r})"

    # --- who speaks ------------------------------------------------------------------

    def join(
        self, label: str, members: Sequence[str], rank: int
    ) -> list[tuple[int, CollectiveFailure]]:
        """The group has been made here; what strangers said of it before is dropped.

        Returns:
            The ranks that strangers have spoken as, and why they are refused.
        """
        self.label, self.members, self.rank = label, members, rank
        strangers = []
        for name, spoken in self._heard.items():
            if spoken is None or (spoken < len(members) and members[spoken] == name):
                continue
            problem = f"worker {name!r} is not rank {spoken} of {label}"
            failure = CollectiveFailure(GroupChangedError.code, problem, (name,))
            messages = self.operations.drop(spoken)
            self.outbox.append(Failing(None, failure, messages, is_news=False))
            strangers.append((spoken, failure))
        self._heard.clear()
        return strangers

    def check_speaker(self, name: str, rank: int | None = None) -> None:
        """Refuse a worker that is not in the group, or does not have that rank.

        Raises:
            MalformedError: it is not, as far as is known.
        """
        members = self.members
        if not members:
            is_it = self._is_believed(name, rank)
        elif rank is None:
            is_it = name in members
        else:
            is_it = rank < len(members) and members[rank] == name
        if not is_it:
            who = "a member" if rank is None else f"rank {rank}"
            raise MalformedError(f"worker {name!r} speaks as {who} of {self.label}")

    def _is_believed(self, name: str, rank: int | None) -> bool:
        others = [one for who, one in self._heard.items() if who != name]
        said = self._heard.setdefault(name, rank)
        if rank is not None and said is None:
            said = self._heard[name] = rank
        return rank is None or (said == rank and rank not in others)

    def is_hearsay_of(self, name: str) -> bool:
        """Return whether a group is known by the messages of this worker alone."""
        return not self.members and set(self._heard) <= {name}

    # --- beginning -------------------------------------------------------------------

    def begin(self, descriptor: Descriptor) -> Operation[M] | CollectiveFailure:
        """Begin the next collective, or say why it has failed already."""
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
        """Take the number of the next collective, and let that one fail for all.

        Returns:
            Why everything has failed before; None if it has not.
        """
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

    # --- what others send ------------------------------------------------------------

    def refusal_of(
        self, number: int, rank: int, descriptor: Descriptor | None
    ) -> CollectiveFailure | None:
        """Return why a message for a collective is refused; None: it is taken.

        Args:
            number: of the collective.
            rank: of the sender.
            descriptor: what it believes the collective to be; None: as it said before.
        """
        operations = self.operations
        failure = self.lost_for(number) if self._gone else None
        failure = failure or operations.failure_of(number)
        if failure is None and operations.is_over(number):
            return self.too_late(number, rank, descriptor)
        if failure is None and descriptor is not None:
            self.hear(number, rank, descriptor)
            failure = operations.failure_of(number)
        return failure

    def too_late(
        self, number: int, rank: int, descriptor: Descriptor | None = None
    ) -> CollectiveFailure:
        """Return why nothing is taken from a rank for a collective that is over."""
        theirs, ours = self.name_of(rank), self.name_of(self.rank)
        what = "" if descriptor is None else f", and began {descriptor}"
        return CollectiveFailure(
            CollectiveError.code,
            f"the ranks do not agree on collective {number} of {self.label}: it is "
            f"over at {ours}, which has begun {self.operations.begun}, and {theirs} "
            f"sends to it{what}; all ranks have to begin the same ones in the same "
            "order",
            (self.members[rank], self.members[self.rank]),
        )

    def hear(self, number: int, rank: int, descriptor: Descriptor) -> None:
        """Take another rank's report of what it has begun."""
        mismatch = self.operations.hear(number, rank, descriptor)
        if mismatch is not None:
            self.on_mismatch(number, mismatch)

    def on_mismatch(self, number: int, mismatch: Mismatch) -> None:
        """Two ranks have begun different things: that fails."""
        theirs, ours = self.name_of(mismatch.rank), self.name_of(self.rank)
        self.fail(
            number,
            CollectiveFailure(
                CollectiveError.code,
                f"the ranks do not agree on collective {number} of {self.label}: "
                f"{theirs} began {mismatch.theirs}, {ours} began {mismatch.ours}; all "
                "ranks have to begin the same ones in the same order",
                (self.members[mismatch.rank], self.members[self.rank]),
            ),
        )

    def hear_failure(self, number: int, failure: CollectiveFailure) -> None:
        """Another rank says that a collective has failed, and has told all others."""
        operations = self.operations
        if not operations.is_over(number) and operations.failure_of(number) is None:
            self.fail(number, failure, is_news=False)

    # --- failing ---------------------------------------------------------------------

    def fail(
        self, number: int, failure: CollectiveFailure, *, is_news: bool = True
    ) -> None:
        """Let a collective fail.

        Raises:
            MalformedError: it is too far ahead for any rank to have reached it.
        """
        messages = self.operations.fail(number, failure)
        self.outbox.append(Failing(number, failure, messages, is_news))

    def give_up(
        self, number: int, timeout_s: float, begun: Mapping[int, int | None]
    ) -> None:
        """Let a collective fail that has taken too long.

        Args:
            number: of the collective.
            timeout_s: its limit.
            begun: how many collectives the other ranks have begun, by rank; None: it
                did not say.
        """
        operation = self.operations.running.get(number)
        if operation is None:
            return  # it has ended meanwhile
        late = [
            rank for rank, count in begun.items() if count is None or count <= number
        ]
        who = ", ".join(map(self.name_of, late))
        what = (
            f"these did not come: {who}" if late else "all have come, and are too slow"
        )
        problem = (
            f"{operation.descriptor.operation} {number} of {self.label} has taken more "
            f"than {timeout_s:g} s: {what}"
        )
        names = tuple(self.members[rank] for rank in late)
        self.fail(
            number, CollectiveFailure(CollectiveTimeoutError.code, problem, names)
        )

    # --- ranks that are gone ---------------------------------------------------------

    @property
    def lost(self) -> CollectiveFailure | None:
        """Why every collective fails sooner or later; None: no rank is gone."""
        return self._gone[0][1] if self._gone else None

    @property
    def last_lost(self) -> CollectiveFailure | None:
        """Why the rank is gone that was the last to be missed; None: none is gone."""
        return self._gone[-1][1] if self._gone else None

    def lost_for(self, number: int) -> CollectiveFailure | None:
        """Return why a collective fails because a rank is gone, else None."""
        for ended, failure in self._gone:
            if number >= ended:
                return failure
        return None

    def lose(self, failure: CollectiveFailure, *, ended: int = 0) -> bool:
        """Let everything fail, now and later: a rank is gone.

        Args:
            failure: why.
            ended: collectives before this number do not need that rank any more.

        Returns:
            Whether it is news: whether anything fails that would not have before.
        """
        if self._gone and ended >= self._gone[-1][0]:
            return False
        for number in self.operations.numbers():
            if number >= ended and self.lost_for(number) is None:
                self.fail(number, failure, is_news=False)
        self._gone.append((ended, failure))
        return True

    def leave(self) -> tuple[int, CollectiveFailure]:
        """Leave the group: all fails that has not ended here.

        Returns:
            How many collectives this rank has ended, and what to tell the others.
        """
        who = self.name_of(self.rank)
        problem = f"{who} has closed {self.label}"
        names = (self.members[self.rank],)
        failure = CollectiveFailure(GroupChangedError.code, problem, names)
        ended = min(self.operations.running, default=self.operations.begun)
        self.lose(failure)
        return ended, failure

    def loss_of(self, name: str, reason: str) -> CollectiveFailure | None:
        """Return why all fails if a worker is gone; None: it is not a member."""
        if name not in self.members:
            return None
        who = self.name_of(self.members.index(name))
        problem = (
            f"{who} of {self.label} is lost: {reason}; make a group of those who are "
            "left"
        )
        return CollectiveFailure(RankLostError.code, problem, (name,))
